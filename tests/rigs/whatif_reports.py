"""A report made by hand: more memory helps, the disk is too large."""

from __future__ import annotations

from kvtier.observability.whatif.report import Change, Point, Report, TierCurve
from kvtier.units import GIB

__all__ = ["GIB", "RAM", "REPORT", "SSD"]


def _curve(tier: str, capacity: int, useful: int, points: dict[int, float]) -> TierCurve:
    """Return a curve; all sizes are in GiB. Of all chunks, 20 % are hits in lower tiers."""
    made = [Point(size * GIB, rate, rate - 0.2) for size, rate in points.items()]
    return TierCurve(tier, "lru", capacity * GIB, 0.6, useful * GIB, made)


RAM = _curve("ram", 100, 95, {25: 0.3, 50: 0.45, 100: 0.6, 150: 0.67, 200: 0.7, 400: 0.71})
SSD = _curve("ssd", 1000, 250, {125: 0.55, 250: 0.599, 500: 0.6, 2000: 0.6})
REPORT = Report(
    seconds=8000.0,
    chunks=1_240_000,
    looked_up=1_240_000,
    sampled=12_300,
    sampling=0.01,
    cpu_share=0.003,
    dropped=0,
    measured_hit_rate=0.612,
    prefill_tokens_per_second=21_000.0,
    tiers=[RAM, SSD],
    changes=[
        Change("ram", 150 * GIB, None, 0.67, 0.07, 1860.0),
        Change("ram", None, "arc", 0.63, 0.03, 797.0),
        Change("ssd", 2000 * GIB, None, 0.6, 0.0, 0.0),
    ],
)
