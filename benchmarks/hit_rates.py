"""Compare the hit rates of all built-in eviction policies on traces, with Belady's optimum.

::

    python -m benchmarks.hit_rates TRACE...

A trace is what ``kvtier simulate`` reads: JSON lines of Mooncake or Bailian, or a recording. Capacities are
percentages of a trace's distinct chunks. Figures are exact: they do not depend on the machine.

The second table of each trace is the second half of its time alone. What the policies assume was chosen by
the first halves, so that is where it has to prove itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import parse, show
from kvtier.lab.simulation.replay import CHUNK_TOKENS, Model, capacity_of
from kvtier.lab.simulation.study import Study, study
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.whatif.simulated_cache import one_tier
from kvtier.plugins import Plugins

CAPACITIES = "1%,2%,5%,10%,20%,40%"
OPTIMUM = "Belady's optimum"
PROCESSES = 2
HALVES = 2


class Task(NamedTuple):
    """One column of a table, which one process computes."""

    path: Path
    capacity: str
    policies: Sequence[str]
    limit: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the hit rates of eviction policies on traces.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--capacity", default=CAPACITIES, help="default: %(default)s")
    parser.add_argument("--policy", help="default: all that are built in")
    parser.add_argument("--limit", type=int, help="read at most this many requests of each trace")
    given = parse(parser, capacity="50%,100%")
    policies = given.policy.split(",") if given.policy else built_in()
    capacities = given.capacity.split(",")
    tasks = [Task(path, capacity, policies, given.limit) for path in given.traces for capacity in capacities]
    with ProcessPoolExecutor(PROCESSES) as pool:
        columns = list(pool.map(compute, tasks))
    for start in range(0, len(columns), len(capacities)):
        report(columns[start : start + len(capacities)], policies)


def built_in() -> list[str]:
    """Return the names of all policies without plugins."""
    return Plugins.load([]).names("kvtier_eviction_policies")


def compute(task: Task) -> Study:
    plugins, model = Plugins.load([]), Model()
    trace = Trace.read(task.path, CHUNK_TOKENS, task.limit)
    capacity = capacity_of(task.capacity, trace, model)
    caches = [one_tier(plugins, policy, capacity, {}) for policy in task.policies]
    result = study(trace, plugins, caches, model, windows=HALVES)
    print(f"{task.path.name}: {share(result):.3g} %", file=sys.stderr)
    return result


def report(columns: Sequence[Study], policies: Sequence[str]) -> None:
    """Show the tables of one trace: all of it, and its second half. Each column is a capacity."""
    first = columns[0]
    named = f"{first.name}: {first.requests:,} requests, {first.chunks:,} chunks, {first.unique:,} distinct"
    heads = ("", *(f"{share(column):.3g} %" for column in columns))
    bounds = (OPTIMUM, *(column.rows[0].bound or 0.0 for column in columns))
    outcomes = [(policy, [of.rows[at].outcome for of in columns]) for at, policy in enumerate(policies)]
    whole = [(policy, *(out.hit_rate for out in of)) for policy, of in outcomes]
    second = [(policy, *(out.windows[1] or 0.0 for out in of)) for policy, of in outcomes]
    show(f"hit rates, {named}", heads, [*whole, bounds])
    show(f"hit rates in the second half of {first.name}", heads, second)


def share(column: Study) -> float:
    """Return the capacity of a column in percent of the trace's distinct bytes."""
    return 100 * (column.rows[0].outcome.capacity or 0) / column.unique_bytes


if __name__ == "__main__":
    main()
