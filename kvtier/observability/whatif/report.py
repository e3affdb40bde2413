"""What the estimate says, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Point(Struct, frozen=True):
    """One capacity of a tier."""

    capacity_bytes: int
    hit_rate: float
    """Of the whole cache, if the tier had this capacity and everything else stayed as it is. From 0 to 1."""
    fast_hit_rate: float | None = None
    """Of these, the hits in this tier and faster ones: what a lower tier has as well is found there later."""


class TierCurve(Struct, frozen=True):
    """How the hit rate of the cache depends on the capacity of one tier."""

    tier: str
    policy: str
    capacity_bytes: int
    hit_rate: float
    """Estimated at the capacity of today, to be compared with :attr:`Report.measured_hit_rate`."""
    useful_bytes: int
    """The least capacity with almost as many hits, also in this tier and faster ones: more brings nothing."""
    points: Sequence[Point]
    """By capacity, the smallest first."""


class Change(Struct, frozen=True):
    """One change of the settings, and what it would bring. Either a capacity or a policy changes."""

    tier: str
    capacity_bytes: int | None
    """The new capacity of the tier."""
    policy: str | None
    """The new eviction policy of the tier."""
    hit_rate: float
    gained: float
    """Hit rate minus that of today, both estimated; may be negative."""
    gpu_seconds_a_day: float | None
    """Prefill that the engines would not do; ``None`` while the speed of prefill is unknown."""


class Report(Struct, frozen=True):
    """The estimate of one host."""

    seconds: float
    """For how long lookups have been observed."""
    chunks: int
    """How many chunks of lookups were observed."""
    sampled: int
    """Of these, those in the sample."""
    sampling: float
    """The part of all keys that the sample has today, up to 1."""
    cpu_share: float
    """What the estimate takes of one core."""
    dropped: int
    """Lookups that were not observed, because the estimate could not keep up."""
    measured_hit_rate: float | None
    """Of the cache itself in the same time; ``None`` before the first lookup."""
    prefill_tokens_per_second: float | None
    """Measured by the engines; ``None`` if none has reported it."""
    tiers: Sequence[TierCurve]
    changes: Sequence[Change]
    """The most useful ones first."""
    stopped: str = ""
    """Why nothing is observed any more; empty while it is."""
    looked_up: int = 0
    """Chunks of all lookups since then: also of those that wait to be observed, and of dropped ones."""
    behind_seconds: float = 0.0
    """For how long the oldest lookup that is not observed yet has been waiting."""
    observed: float = 1.0
    """Which part of these was observed, from 0 to 1."""
