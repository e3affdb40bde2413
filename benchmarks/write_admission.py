"""Compare what a disk tier is written and what it hits, by the setting ``admit``, on traces.

::

    python -m benchmarks.write_admission TRACE...

A trace is what ``kvtier simulate`` reads. The caches have memory and a disk with ``write: through``, and
capacities in percent of a trace's distinct chunks. Figures are exact: they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import parse, show
from kvtier.lab.simulation.replay import CHUNK_TOKENS, Model, Outcome, capacity_of, replay
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.whatif.simulated_cache import configured
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.units import format_size

ADMIT = ("first_use", "second_use", "expected")
MEMORY, DISKS = "2%", "5%,10%,20%,40%"
PROCESSES = 2


class Task(NamedTuple):
    """One row of a table, which one process computes."""

    path: Path
    memory: str
    disk: str
    admit: str
    policy: str
    limit: int | None


class Result(NamedTuple):
    """The figures of a row."""

    trace: str
    memory: float
    """Percent of the trace's distinct chunks, as ``disk``."""
    disk: float
    outcome: Outcome

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk."""
        return self.outcome.tiers[1].written_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare writes and hit rates by the setting `admit`.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--memory", default=MEMORY, help="one capacity; default: %(default)s")
    parser.add_argument("--disk", default=DISKS, help="default: %(default)s")
    parser.add_argument("--policy", default="lru", help="of both tiers; default: %(default)s")
    parser.add_argument("--limit", type=int, help="read at most this many requests of each trace")
    given = parse(parser, memory="50%", disk="100%")
    tasks = [
        Task(path, given.memory, disk, admit, given.policy, given.limit)
        for path in given.traces
        for disk in given.disk.split(",")
        for admit in ADMIT
    ]
    with ProcessPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(compute, tasks))
    size = len(tasks) // len(given.traces)
    for start in range(0, len(tasks), size):
        report(results[start : start + size])


def compute(task: Task) -> Result:
    plugins, model = Plugins.load([]), Model()
    trace = Trace.read(task.path, CHUNK_TOKENS, task.limit)
    memory, disk = (capacity_of(text, trace, model) for text in (task.memory, task.disk))
    full = {"eviction": task.policy, "high_watermark": 1.0, "low_watermark": 1.0}
    settings = Settings(
        tiers=[
            {"name": "ram", "type": "cpu", "capacity": memory, **full},
            {"name": "ssd", "type": "disk", "path": "/", "capacity": disk, "admit": task.admit, **full},
        ]
    )
    outcome = replay(trace, plugins, configured(plugins, settings, None, {}), model)
    print(f"{task.path.name}: {task.admit}", file=sys.stderr)
    whole = trace.unique * model.chunk_bytes(trace)
    return Result(f"{trace.name}: {len(trace):,} requests", 100 * memory / whole, 100 * disk / whole, outcome)


def report(results: Sequence[Result]) -> None:
    """Show the table of one trace."""
    first = results[0]
    rows = [
        (
            f"{result.disk:.3g} %",
            admit,
            result.outcome.hit_rate,
            format_size(result.written_bytes),
            format_size(round(result.written_bytes / max(1, result.outcome.saved_tokens))),
        )
        for result, admit in zip(results, cycle(ADMIT), strict=False)
    ]
    title = f"writes by admission, {first.trace}, memory of {first.memory:.3g} %"
    show(title, ("disk", "admit", "hit rate", "written to disk", "per saved token"), rows)


if __name__ == "__main__":
    main()
