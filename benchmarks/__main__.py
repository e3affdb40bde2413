"""Run benchmarks in sequence, and record their results: ``make bench`` or ``python -m benchmarks``.

::

    python -m benchmarks                                  # all of SUITE
    python -m benchmarks disk "look_up --busy"            # these, whose results replace their older ones
    python -m benchmarks --small                          # a smoke test that records nothing
    python -m benchmarks gpu --output benchmarks/results/gpu.json

Each runs in a process of its own. One that fails is listed at the end, and keeps its older result.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import results
from benchmarks.results import Result

SUITE = (
    "tiers",
    "memory",
    "codecs",
    "codec_quality",
    "copies",
    "disk",
    "catalog",
    "policies",
    "look_up",
    "look_up --busy",
    "look_up --policy lru",
    "steps",
    "kv_events",
    "metrics",
    "recording",
    "fingerprints",
    "cold_loads",
    "load_or_compute",
    "priorities",
    "transports",
    "peers",
    "push",
    "move",
    "pools --size 4 --size 32",
    "controller",
    "proxy",
    "growth",
    "busy",
    "engine",
    "disaggregated",
)
SEPARATE = {
    "codec_first_tokens": "installs LMCache, and creates a network namespace, as root",
    "codec_links": "creates a network namespace, as root",
    "compare": "installs LMCache",
    "controller_failover": "takes two minutes, and kills what it has started",
    "controller_instances": "starts a thousand processes",
    "controller_rebuild": "takes 6 GB of memory with the figures of docs/controller.md",
    "faults": "installs LMCache, and mounts a folder",
    "gpu": "needs a GPU",
    "gpu_engine": "needs a GPU and a vLLM for it",
    "hit_rates": "needs traces",
    "misses": "needs traces",
    "no_hits": "takes an hour until its noise permits a statement",
    "proxy_streams": "needs 20,000 open files",
    "replay_vllm": "needs a trace",
    "retention": "needs traces",
    "serving": "installs LMCache, and takes a quarter of an hour for each workload",
    "simulate": "takes minutes, and 3 GB in the temporary folder",
    "states": "starts three engines",
    "traces": "takes ten minutes",
    "verify": "starts three engines",
    "whatif": "needs traces",
    "write_admission": "needs traces",
}
"""Why these are not part of :data:`SUITE`."""
LIMIT_SECONDS = 3600


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks in sequence.")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="default: those of make bench")
    parser.add_argument("--small", action="store_true", help="smoke test: the figures mean nothing")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: results/amd.json, as the CPU is"
    )
    options = parser.parse_args()
    output = options.output or (None if options.small else results.default_file())
    commands, started = options.commands or SUITE, time.monotonic()
    failed: dict[str, str] = {}
    for number, command in enumerate(commands, 1):
        print(f"\n── {number} of {len(commands)}, {clock(started)}: {command} ──\n", flush=True)
        try:
            result = run(command, small=options.small)
        except subprocess.SubprocessError as error:
            failed[command] = str(error)
            print(error, flush=True)
            continue
        if output is not None:
            results.save(output, {**results.load(output), command: result})
    print(f"\n{len(commands) - len(failed)} of {len(commands)} benchmarks in {clock(started)}")
    for command, reason in failed.items():
        print(f"failed: {command}: {reason}")
    return bool(failed)


def run(command: str, *, small: bool = False) -> Result:
    """Run one benchmark, and return its result. Raises :class:`subprocess.SubprocessError` if it fails."""
    name, *arguments = shlex.split(command)
    load, started = results.load_average(), time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="kvtier-bench-") as file:
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, *["--small"] * small],
            cwd=results.FOLDER.parents[1],
            env={**os.environ, results.TABLES: file.name},
            timeout=LIMIT_SECONDS,
            check=True,
        )
        tables = results.recorded(Path(file.name))
    return {
        "date": results.today(),
        "commit": results.commit(),
        "machine": results.describe_machine(),
        "load": [load, results.load_average()],
        "seconds": round(time.monotonic() - started),
        "tables": tables,
    }


def clock(started: float) -> str:
    """Return the time since then as minutes and seconds."""
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02} min"


if __name__ == "__main__":
    sys.exit(main())
