"""How full each instance's tiers were and what was found in them, over the last hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.controller.member import Member

SAMPLE_SECONDS = 10.0
KEPT_SECONDS = 3600.0
MOST_INSTANCES = 1024
"""That have a history, whether connected or not. Beyond, the one goes that was sampled the longest ago."""


class TierSample(NamedTuple):
    """One tier of an instance at one time."""

    used: int
    """Bytes."""
    found: int
    """Chunks that look-ups have found in it since the instance began."""


class Sample(NamedTuple):
    """One instance at one time.

    Counts are since the instance began: what happened between two samples is their difference, and where
    that is negative the instance was restarted.
    """

    time: float
    looked_up: int
    tiers: Sequence[TierSample]


class History:
    """Samples by the instance's id, so that an instance that comes back has its own again."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}
        self._tiers: dict[str, Sequence[str]] = {}

    def of(self, instance: str) -> Sequence[Sample]:
        """The samples of the last hour, the oldest first."""
        return tuple(self._samples.get(instance, ()))

    def sample(self, members: Iterable[Member], now: float) -> None:
        """Note how these are at a time of :func:`time.time`, and forget what is too old."""
        for member in members:
            if member.heartbeat is not None:
                tiers = [tier.name for tier in member.hello.tiers]
                samples = self._samples.pop(member.id, None)
                if samples is None or self._tiers[member.id] != tiers:
                    samples = deque(maxlen=int(KEPT_SECONDS / SAMPLE_SECONDS))
                self._samples[member.id], self._tiers[member.id] = samples, tiers
                samples.append(_sample(member, now))
                while samples[0].time <= now - KEPT_SECONDS:
                    samples.popleft()
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Those at the front were sampled the longest ago."""
        for instance, samples in list(self._samples.items()):
            if len(self._samples) <= MOST_INSTANCES and samples[-1].time > now - KEPT_SECONDS:
                break
            del self._samples[instance], self._tiers[instance]


def _sample(member: Member, now: float) -> Sample:
    heartbeat = member.heartbeat
    assert heartbeat is not None
    tiers = tuple(TierSample(tier.used, tier.found) for tier in heartbeat.tiers)
    return Sample(now, heartbeat.looked_up, tiers)
