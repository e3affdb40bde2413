"""Compare the estimate of other capacities and policies with what they really hit, and measure its cost.

::

    python -m benchmarks.whatif TRACE...

A trace is what ``kvtier simulate`` reads. A cache serves it with one capacity, a percentage of the distinct
chunks of the trace, and one policy. The lookups are observed as in a cache process. Then the trace is
replayed in full with each change that the estimate has answered. Hit rates do not depend on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import parse, show
from kvtier.events import PromptLookup
from kvtier.lab.simulation.replay import CHUNK_TOKENS, Model, replay
from kvtier.lab.simulation.trace import Trace, chunk_keys
from kvtier.observability.whatif.answers import report_of
from kvtier.observability.whatif.estimate import Estimate
from kvtier.observability.whatif.report import Report, point_at
from kvtier.observability.whatif.simulated_cache import SimulatedTiers, configured
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings
from kvtier.settings.observability import WhatIfSettings

FACTORS = (0.5, 1.0, 2.0, 4.0)
PROCESSES = 2
FOREVER = 1e8
"""Half-life of a lookup: the real hit rates are those of the whole trace."""


class Task(NamedTuple):
    """A cache that is observed."""

    path: Path
    limit: int | None
    policy: str
    percent: float
    sample_chunks: int


class Row(NamedTuple):
    """One change of the settings."""

    task: Task
    change: str
    predicted: float
    actual: float
    cpu: float
    """Share of a core at the rate of the trace."""
    microseconds: float
    """CPU time for each chunk that was looked up."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare estimates of hit rates with the real ones.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--percent", type=float, default=5.0, help="capacity; default: %(default)s")
    parser.add_argument("--policy", default="lru,adaptive", help="of the cache; default: %(default)s")
    parser.add_argument("--sample-chunks", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="read at most this many requests of each trace")
    given = parse(parser, policy="lru", percent=50.0)
    tasks = [
        Task(path, given.limit, policy, given.percent, given.sample_chunks)
        for path in given.traces
        for policy in given.policy.split(",")
    ]
    with ProcessPoolExecutor(PROCESSES) as pool:
        for rows in pool.map(compute, tasks):
            report(rows)


def compute(task: Task) -> list[Row]:
    """Observe a trace, and replay it with each change."""
    plugins, model = Plugins.load([]), Model()
    trace = Trace.read(task.path, CHUNK_TOKENS, task.limit)
    chunk_bytes = model.chunk_bytes(trace)
    capacity = round(task.percent / 100 * trace.unique) * chunk_bytes
    tiers = tiers_of(plugins, task, task.policy, capacity)
    report, cpu = observe(trace, plugins, tiers, chunk_bytes)
    seconds = trace.times[trace.order[-1]] - trace.times[trace.order[0]]
    return [
        Row(
            task,
            change,
            predicted,
            replay(trace, plugins, tiers_of(plugins, task, policy, size), model).hit_rate,
            cpu / seconds,
            cpu / len(trace.chunks) * 1e6,
        )
        for change, policy, size, predicted in changes(report, task.policy, capacity)
    ]


def tiers_of(plugins: Plugins, task: Task, policy: str, capacity: int) -> SimulatedTiers:
    """Return one tier with the watermarks of the defaults."""
    settings = Settings(
        tiers=[{"name": "ram", "type": "cpu", "capacity": capacity, "eviction": policy}],
        whatif=WhatIfSettings(sample_chunks=task.sample_chunks, half_life=FOREVER),
    )
    return configured(plugins, settings, None, {})


def observe(trace: Trace, plugins: Plugins, tiers: SimulatedTiers, chunk_bytes: int) -> tuple[Report, float]:
    """Return the estimate, and the CPU seconds that it took."""
    local = [tier for tier in tiers.settings if isinstance(tier, LocalTierSettings)]
    estimate, cpu = Estimate(plugins, tiers.cache, local), 0.0
    for request in trace.order:
        start, stop = trace.span(request)
        keys = chunk_keys(trace.chunks[start:stop])
        seen = PromptLookup(
            trace.times[request], keys, chunk_bytes, trace.chunk_tokens, 0, hints=trace.hints.get(request)
        )
        before = time.thread_time()
        estimate.observe(seen)
        cpu += time.thread_time() - before
    return report_of(estimate, trace.times[trace.order[-1]], 0.0, 0), cpu


def changes(report: Report, policy: str, capacity: int) -> Iterator[tuple[str, str, int, float]]:
    """Yield each change, its policy, its capacity and the estimated hit rate."""
    [curve] = report.tiers
    for factor in FACTORS:
        size = round(factor * capacity)
        point = point_at(curve, size)
        assert point is not None
        yield f"{policy} x {factor:g}", policy, size, point.hit_rate
    for change in report.changes:
        if change.policy is not None:
            yield change.policy, change.policy, capacity, change.hit_rate


def report(rows: Sequence[Row]) -> None:
    """Show a table for the cache that was observed."""
    first = rows[0]
    title = (
        f"estimates, {first.task.path.name}, {first.task.policy}, {first.task.percent:g} % of the chunks: "
        f"{100 * first.cpu:.2f} % of a core, {first.microseconds:.2f} µs for each chunk of a lookup"
    )
    points = [(row.change, row.predicted, row.actual, 100 * (row.predicted - row.actual)) for row in rows]
    show(title, ("settings", "estimated", "real", "error, points"), points)


if __name__ == "__main__":
    main()
