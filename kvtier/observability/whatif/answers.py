"""The results of an estimate: the hit rate curve of each tier, and the gain of changes of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from kvtier.concurrency.threads import let_others_run
from kvtier.observability.whatif.distances import HitRates
from kvtier.observability.whatif.estimate import Estimate
from kvtier.observability.whatif.miniature import Miniature, evicted_to
from kvtier.observability.whatif.report import Change, Point, Report, TierCurve
from kvtier.plugins import IDENTITY, LOSSLESS
from kvtier.settings import LocalTierSettings
from kvtier.tiers.lossless import LosslessCodec

POINTS = [2.0 ** (half / 2) for half in range(-8, 5)]
"""The capacities of a curve from reuse distances, as multiples of today's: 1/16 to 4."""
CHANGES = (0.5, 1.5, 2.0)
"""The capacities that are suggested."""
QUARTERS = (0.125, 0.375, 0.625, 0.875)
"""How far a tier has filled up since the last eviction."""
ALMOST = 0.005
"""Hit rates that differ by less are almost the same."""
DAY = 86_400.0
SEARCHES = 16

Rates = Callable[[float], tuple[float, float]]
"""The hit rates for a multiple of a tier's capacity: of the cache, and of this tier with the faster ones."""


def report_of(estimate: Estimate, now: float, cpu_share: float, dropped: int) -> Report:
    """Return the answers. Takes a millisecond for each two tiers."""
    totals = estimate.totals
    curves, changes = _curves_and_changes(estimate, now)
    return Report(
        seconds=now - estimate.began if estimate.began else 0.0,
        chunks=estimate.chunks,
        sampled=estimate.sampled,
        sampling=estimate.distances.rate,
        cpu_share=cpu_share,
        dropped=dropped,
        measured_hit_rate=totals.found / totals.asked if totals.asked else None,
        prefill_tokens_per_second=estimate.prefill_tokens_per_second,
        tiers=curves,
        changes=changes,
    )


def _curves_and_changes(estimate: Estimate, now: float) -> tuple[list[TierCurve], list[Change]]:
    """Return the curve of each tier, and the changes, the most useful first."""
    curves: list[TierCurve] = []
    changes: list[Change] = []
    hit_rates = estimate.curve.hit_rates()
    for at, tier in enumerate(estimate.tiers):
        let_others_run()
        if estimate.by_distance:
            rates, factors = by_distance(hit_rates, estimate.tiers, at), POINTS
        else:
            rates, factors = _by_miniatures(estimate, at)
        today = rates(1.0)[0]
        useful = _useful(rates, factors[0])
        points = [Point(round(factor * tier.capacity), *rates(factor)) for factor in factors]
        curves.append(
            TierCurve(
                tier=tier.name,
                policy=tier.eviction["type"],
                capacity_bytes=tier.capacity,
                hit_rate=today,
                useful_bytes=round(useful * tier.capacity),
                points=points,
            )
        )
        for factor in CHANGES:
            rate = rates(factor)[0]
            changes.append(Change(tier.name, round(factor * tier.capacity), None, rate, rate - today, None))
        if at > 0 and tier.codec["type"] == IDENTITY:
            rate = rates(LosslessCodec.usual_ratio)[0]
            changes.append(Change(tier.name, None, None, rate, rate - today, None, LOSSLESS))
        for policy, gained in _policies(estimate, at):
            rate = min(1.0, max(0.0, today + gained))
            changes.append(Change(tier.name, None, policy, rate, rate - today, None))
    day = _gpu_seconds_a_day(estimate, estimate.seconds(now))
    if day is not None:
        changes = [replace(change, gpu_seconds_a_day=change.gained * day) for change in changes]
    changes.sort(key=lambda change: -change.gained)
    return curves, changes


def by_distance(hit_rates: HitRates, tiers: Sequence[LocalTierSettings], at: int) -> Rates:
    """Return the rates from reuse distances. Lower tiers hold what faster ones hold.

    A tier is filled up to its high watermark, and evicts some. So a chunk between both is a hit with a chance
    that is linear in its distance.
    """
    tier, nothing = tiers[at], [0.0] * len(QUARTERS)
    filled = [_filled(other, other.capacity) for other in tiers]
    faster = [max(parts) for parts in zip(nothing, *filled[:at], strict=True)]
    slower = [max(parts) for parts in zip(nothing, *filled[at + 1 :], strict=True)]

    def rates(factor: float) -> tuple[float, float]:
        fast = list(map(max, faster, _filled(tier, tier.capacity * factor)))
        whole = list(map(max, fast, slower))
        return fmean(map(hit_rates.at, whole)), fmean(map(hit_rates.at, fast))

    return rates


def _filled(tier: LocalTierSettings, capacity: float) -> list[float]:
    """Return the bytes in a tier of some capacity, which has filled up for a while since an eviction."""
    low = evicted_to(tier, capacity)
    return [capacity * (low + part * (tier.high_watermark - low)) for part in QUARTERS]


def _by_miniatures(estimate: Estimate, at: int) -> tuple[Rates, list[float]]:
    """Return the rates from miniature caches, linear between their capacities, and these."""
    compared = max(1.0, estimate.compared)
    known: list[tuple[float | None, Miniature | None]] = [(1.0, estimate.base)]
    known += [(trial.factor, cache) for trial, cache in estimate.trials.items() if trial.tier == at]
    points = sorted(
        (factor, cache.hits[-1] / compared, cache.hits[at] / compared)
        for factor, cache in known
        if factor is not None and cache is not None
    ) or [(1.0, 0.0, 0.0)]

    def rates(factor: float) -> tuple[float, float]:
        below = max((point for point in points if point[0] <= factor), default=points[0])
        above = min((point for point in points if point[0] >= factor), default=points[-1])
        part = (factor - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        whole, fast = (
            min(1.0, max(0.0, lower + part * (upper - lower)))
            for lower, upper in zip(below[1:], above[1:], strict=True)
        )
        return whole, fast

    return rates, [factor for factor, *_ in points]


def _policies(estimate: Estimate, at: int) -> list[tuple[str, float]]:
    """Return what other policies of a tier would gain."""
    base, compared = estimate.base, max(1.0, estimate.compared)
    if base is None:
        return []
    return [
        (trial.policy, (cache.hits[-1] - base.hits[-1]) / compared)
        for trial, cache in estimate.trials.items()
        if trial.tier == at and trial.policy is not None
    ]


def _useful(rates: Rates, least: float) -> float:
    """Return the least multiple of a capacity, from ``least`` on, with almost the hits of today."""
    whole, fast = rates(1.0)
    low, high = least, 1.0
    for _ in range(SEARCHES):
        middle = (low + high) / 2
        found = rates(middle)
        if found[0] >= whole - ALMOST and found[1] >= fast - ALMOST:
            high = middle
        else:
            low = middle
    return high


def _gpu_seconds_a_day(estimate: Estimate, seconds: float) -> float | None:
    """Return the prefill of a day if nothing was found; ``None`` if it is not known how fast it is."""
    speed = estimate.prefill_tokens_per_second
    return estimate.totals.tokens / seconds * DAY / speed if speed and seconds > 0 else None
