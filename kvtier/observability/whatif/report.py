"""The report of an estimate, ready for JSON, and reading its curves between their points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

MAX_COUNT = 1 << 62
"""The sum of two counts still fits into 64 bits."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A number of bytes, chunks or tokens."""
Amount = Annotated[float, Meta(ge=0, le=MAX_COUNT)]
"""A duration, or a rate."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""


class _Documented:
    # The controller's HTTP API describes the fields by their docstrings. None of them is ever missing.
    __pydantic_config__: ClassVar = {
        "use_attribute_docstrings": True,
        "json_schema_serialization_defaults_required": True,
    }


@dataclass(frozen=True)
class Point(_Documented):
    """One capacity of a tier."""

    capacity_bytes: Count
    hit_rate: Share
    """Of the whole cache, if the tier had this capacity and everything else stayed as it is. From 0 to 1."""
    fast_hit_rate: Share | None = None
    """Of these, the hits in this tier and faster ones: what a lower tier has as well is found there later."""


@dataclass(frozen=True)
class TierCurve(_Documented):
    """How the hit rate of the cache depends on the capacity of one tier."""

    tier: str
    policy: str
    """Its eviction policy."""
    capacity_bytes: Count
    hit_rate: Share
    """Estimated at the capacity of today, to be compared with the measured one."""
    useful_bytes: Count
    """The least capacity with almost as many hits, also in this tier and faster ones: more brings nothing."""
    points: Sequence[Point]
    """By capacity, the smallest first."""


@dataclass(frozen=True)
class Change(_Documented):
    """One change of the settings, and what it would bring: a capacity, a policy or a codec changes."""

    tier: str
    capacity_bytes: Count | None
    """The new capacity of the tier."""
    policy: str | None
    """The new eviction policy of the tier."""
    hit_rate: Share
    gained: Annotated[float, Meta(ge=-1, le=1)]
    """Hit rate minus that of today, both estimated; may be negative."""
    gpu_seconds_a_day: Annotated[float, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] | None
    """Prefill that the engines would not do; unknown as long as the speed of prefill is."""
    codec: str | None = None
    """The codec of the tier, if it had one that makes KV of bfloat16 as small as it usually does."""


@dataclass(frozen=True)
class Report(_Documented):
    """The estimate of one host."""

    seconds: Amount
    """For how long lookups have been observed."""
    chunks: Count
    """How many chunks of lookups were observed."""
    sampled: Count
    """Of these, those in the sample."""
    sampling: Share
    """The part of all keys that the sample has today, up to 1."""
    cpu_share: Amount
    """What the estimate takes of one core."""
    dropped: Count
    """Lookups that were not observed, because the estimate could not keep up."""
    measured_hit_rate: Share | None
    """Of the cache itself in the same time; unknown before the first lookup."""
    prefill_tokens_per_second: Amount | None
    """Measured by the engines; unknown if none has reported it."""
    tiers: Sequence[TierCurve]
    changes: Sequence[Change]
    """The most useful ones first."""
    stopped: str = ""
    """Why nothing is observed any more; empty while it is."""
    looked_up: Count = 0
    """Chunks of all lookups in this time, also of those that wait to be observed or were dropped."""
    behind_seconds: Amount = 0.0
    """For how long the oldest lookup that is not observed yet has been waiting."""
    observed: Share = 1.0
    """Which part of the chunks looked up was observed, from 0 to 1."""


def point_at(curve: TierCurve, capacity_bytes: int) -> Point | None:
    """Return the hit rates at a capacity, between two points by a straight line.

    ``None`` outside of the curve, where nothing is known.
    """
    points = known_points(curve)
    at = bisect_left([point.capacity_bytes for point in points], capacity_bytes)
    if at < len(points) and points[at].capacity_bytes == capacity_bytes:
        return points[at]
    if at in (0, len(points)):
        return None
    below, above = points[at - 1], points[at]
    part = (capacity_bytes - below.capacity_bytes) / (above.capacity_bytes - below.capacity_bytes)
    rate = below.hit_rate + part * (above.hit_rate - below.hit_rate)
    slow, fast = below.fast_hit_rate, above.fast_hit_rate
    between = None if slow is None or fast is None else slow + part * (fast - slow)
    return Point(capacity_bytes, rate, between)


def known_points(curve: TierCurve) -> list[Point]:
    """Return the points of a curve, including that of today, by capacity."""
    points = list(curve.points)
    if all(point.capacity_bytes != curve.capacity_bytes for point in points):
        points.append(Point(curve.capacity_bytes, curve.hit_rate))
    return sorted(points, key=lambda point: point.capacity_bytes)


def change_to(report: Report, curve: TierCurve, capacity_bytes: int) -> Change | None:
    """Return what another capacity of a tier would bring; ``None`` outside of its curve."""
    point = point_at(curve, capacity_bytes)
    if point is None:
        return None
    gained = point.hit_rate - curve.hit_rate
    seconds = _gpu_seconds_a_day(report)
    saved = None if seconds is None else gained * seconds
    return Change(curve.tier, capacity_bytes, None, point.hit_rate, gained, saved)


def gained_fast(curve: TierCurve, capacity_bytes: int) -> float | None:
    """Return what another capacity would add to the hits in this tier and faster ones; ``None`` if unknown.

    If a lower tier has the same chunks, that is all it changes: they are found earlier, not more often.
    """
    today, then = (point_at(curve, capacity) for capacity in (curve.capacity_bytes, capacity_bytes))
    if today is None or then is None or today.fast_hit_rate is None or then.fast_hit_rate is None:
        return None
    return then.fast_hit_rate - today.fast_hit_rate


def _gpu_seconds_a_day(report: Report) -> float | None:
    """Return the prefill that a hit rate of 1 would save a day, to which what is gained is in proportion.

    Taken from the largest change that is known, whose ratio is the most exact; ``None`` without one.
    """
    known = (change for change in report.changes if change.gpu_seconds_a_day is not None and change.gained)
    largest = max(known, key=lambda change: abs(change.gained), default=None)
    return None if largest is None else (largest.gpu_seconds_a_day or 0.0) / largest.gained
