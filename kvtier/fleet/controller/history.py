"""History of each instance over the last hour: the fill of its tiers and its hit rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.fleet.controller.member import Member

SAMPLE_SECONDS = 10.0
RETENTION_SECONDS = 3600.0
MAX_INSTANCES = 1024
"""Instances with a history, connected or not. Beyond this, the least recently sampled one is dropped."""


class TierSample(NamedTuple):
    """One tier of an instance at one point in time."""

    used: int
    """Bytes."""


class Sample(NamedTuple):
    """One instance at one point in time. Without connection there is none."""

    time: float
    hit_rate: float | None
    """Of the last five minutes; ``None`` without a lookup."""
    tiers: Sequence[TierSample]


class History:
    """Samples by instance id. An instance that reconnects keeps its samples."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}
        self._tiers: dict[str, Sequence[str]] = {}

    def of(self, instance: str) -> Sequence[Sample]:
        """Return the samples of the last hour, oldest first."""
        return tuple(self._samples.get(instance, ()))

    def sample(self, members: Iterable[Member], now: float) -> None:
        """Sample these instances and drop old samples. ``now`` is a :func:`time.time`."""
        for member in members:
            if member.heartbeat is not None:
                tiers = [tier.name for tier in member.hello.tiers]
                samples = self._samples.pop(member.id, None)
                if samples is None or self._tiers[member.id] != tiers:
                    samples = deque(maxlen=int(RETENTION_SECONDS / SAMPLE_SECONDS))
                self._samples[member.id], self._tiers[member.id] = samples, tiers
                samples.append(_sample(member, now))
                while samples[0].time <= now - RETENTION_SECONDS:
                    samples.popleft()
        self._expire(now)

    def _expire(self, now: float) -> None:
        """Drop stale histories. The dictionary is ordered by the time of the last sample."""
        for instance, samples in list(self._samples.items()):
            if len(self._samples) <= MAX_INSTANCES and samples[-1].time > now - RETENTION_SECONDS:
                break
            del self._samples[instance], self._tiers[instance]


def _sample(member: Member, now: float) -> Sample:
    heartbeat = member.heartbeat
    assert heartbeat is not None
    tiers = tuple(TierSample(tier.used) for tier in heartbeat.tiers)
    return Sample(now, member.hit_window.hits().rate, tiers)
