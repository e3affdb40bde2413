"""Run all benchmarks in sequence: ``make bench`` or ``python -m benchmarks``. Takes half an hour.

With ``--small``, each is a smoke test that runs as briefly as possible: its figures mean nothing.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    busy,
    catalog,
    cold_loads,
    controller,
    copies,
    disaggregated,
    disk,
    engine,
    load_or_compute,
    look_up,
    memory,
    metrics,
    move,
    peers,
    policies,
    priorities,
    push,
    recording,
    steps,
    transports,
)

SMALL_ARGUMENTS = {
    catalog: ["--entries", "100000"],
    policies: ["--chunks", "10000"],
    controller: ["--quick"],
    look_up: ["--runs", "5"],
    steps: ["--small"],
    memory: ["--small"],
    copies: ["--small"],
    disk: ["--small"],
    cold_loads: ["--small"],
    load_or_compute: ["--small"],
    priorities: ["--rounds", "1", "--load", "4", "--queue", "8"],
    metrics: ["--runs", "5", "--chunks", "10000"],
    recording: ["--seconds", "1", "--turns", "1"],
    transports: ["--quick"],
    peers: ["--transport", "tcp", "--quick"],
    move: ["--transport", "tcp", "--quick"],
    push: ["--transport", "tcp", "--quick"],
    engine: ["--rounds", "1"],
    disaggregated: ["--quick"],
    busy: ["--small"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run all benchmarks.")
    parser.add_argument("--small", action="store_true", help="run each briefly, as a smoke test")
    small = parser.parse_args().small
    for benchmark, arguments in SMALL_ARGUMENTS.items():
        print(f"\n── {benchmark.__name__.removeprefix('benchmarks.')} ──\n", flush=True)
        benchmark.main(arguments if small else [])


if __name__ == "__main__":
    main()
