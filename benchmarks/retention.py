"""Measure the aims of the default policy: near the optimum with hints, and never far behind the classics.

::

    python -m benchmarks.retention TRACE...      # five minutes for two traces

*With hints*: requests get the hint ``resume`` with the time after which the prompt comes back, if it does.
Figures are shares of the distance from the better of ``lru`` and ``arc`` to Belady's optimum. *By tenths*:
the hit rate of ``adaptive`` less that of the better of both, in points, in each tenth of the trace's time.
Figures are exact: they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import parse, show
from kvtier.catalog.hints import ChunkHints
from kvtier.lab.simulation.replay import CHUNK_TOKENS, Model, replay
from kvtier.lab.simulation.study import study
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.whatif.simulated_cache import one_tier
from kvtier.plugins import Plugins

CLASSICS = ("lru", "arc")
TENTHS = 10
CAPACITIES = "1,2,5,10,20,40"
HINTED_CAPACITIES = "5,10"
PROCESSES = 2


class Hinted(NamedTuple):
    """How many requests have a hint, and how wrong it is."""

    share: float
    error: float

    def __str__(self) -> str:
        if not self.share:
            return "no hints"
        right = f"right within {self.error:.0%}" if self.error else "exact"
        return f"in {self.share:.0%} of the requests, {right}"


KINDS = (
    Hinted(0, 0),
    Hinted(1, 0),
    Hinted(1, 0.3),
    Hinted(1, 0.5),
    Hinted(0.9, 0.3),
    Hinted(0.8, 0.3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure hit rates with hints, and by tenths of a trace.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--percent", default=CAPACITIES, help="capacities by tenths; default: %(default)s")
    parser.add_argument(
        "--hinted-percent", default=HINTED_CAPACITIES, help="capacities with hints; default: %(default)s"
    )
    given = parse(parser, percent="10,100", hinted_percent="10")
    hinted, tenths = _numbers(given.hinted_percent), _numbers(given.percent)
    with ProcessPoolExecutor(PROCESSES) as pool:
        for path in given.traces:
            covered = list(pool.map(partial(covered_shares, path), hinted))
            show(
                f"share of the distance to the optimum with the hint resume, {path.name}",
                ("", *(f"{percent:g} %" for percent in hinted)),
                [(str(kind), *(of[kind] for of in covered)) for kind in KINDS],
            )
            leads = list(pool.map(partial(leads_by_tenths, path), tenths))
            show(
                f"lead of adaptive by tenths, points, {path.name}",
                ("tenth", *(f"{percent:g} %" for percent in tenths)),
                [(str(at + 1), *(of[at] for of in leads)) for at in range(TENTHS)],
            )


def covered_shares(path: Path, percent: float) -> dict[Hinted, float]:
    """Return how much of the distance to the optimum ``resume`` covers with each kind of hints."""
    trace, plugins, model = Trace.read(path, CHUNK_TOKENS), Plugins.load([]), Model()
    capacity = _capacity(trace, percent)
    classics = study(trace, plugins, [one_tier(plugins, name, capacity, {}) for name in CLASSICS], model)
    best = max(row.outcome.hit_rate for row in classics.rows)
    bound, gaps = classics.rows[0].bound, gaps_of(trace)
    assert bound is not None
    shares = {}
    for kind in KINDS:
        trace.hints = hints_of(gaps, kind)
        rate = replay(trace, plugins, one_tier(plugins, "resume", capacity, {}), model).hit_rate
        shares[kind] = (rate - best) / (bound - best) if bound > best else 1.0
    return shares


def gaps_of(trace: Trace) -> dict[int, float]:
    """Return after how many seconds the prompt of each request comes back, of those that do.

    The last chunk may not be full yet, so the one before it is what a later request would repeat.
    """
    next_use: dict[int, float] = {}
    gaps = {}
    for request in reversed(trace.order):
        start, stop = trace.span(request)
        end = max(start, stop - 2)
        if end < stop and trace.chunks[end] in next_use:
            gaps[request] = next_use[trace.chunks[end]] - trace.times[request]
        next_use.update(dict.fromkeys(trace.chunks[start:stop], trace.times[request]))
    return gaps


def hints_of(gaps: dict[int, float], kind: Hinted) -> dict[int, ChunkHints]:
    """Return the hints of the requests, wrong by up to the error of ``kind``, which is chosen at random."""
    chance = random.Random(0)
    return {
        request: ChunkHints(resume=gap * chance.uniform(1 - kind.error, 1 + kind.error))
        for request, gap in gaps.items()
        if chance.random() < kind.share
    }


def leads_by_tenths(path: Path, percent: float) -> list[float]:
    """Return by how many points ``adaptive`` is above the better of the classics in each tenth."""
    trace, plugins = Trace.read(path, CHUNK_TOKENS), Plugins.load([])

    def replayed(policy: str) -> list[float]:
        tier = one_tier(plugins, policy, _capacity(trace, percent), {})
        return [rate or 0.0 for rate in replay(trace, plugins, tier, Model(), windows=TENTHS).windows]

    rates = zip(*(replayed(policy) for policy in ("adaptive", *CLASSICS)), strict=True)
    return [100 * (adaptive - max(classics)) for adaptive, *classics in rates]


def _capacity(trace: Trace, percent: float) -> int:
    return int(trace.unique * percent / 100) * Model().chunk_bytes(trace)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
