"""The hit rate of an instance: tokens hit, of the tokens looked up, in the last five minutes.

Instances report counters, which start at zero with the process: of each connection, only differences count.
So the hit rate of an instance that has restarted is that since then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.fleet.member.protocol import Heartbeat

WINDOW_SECONDS = 300.0
STEP_SECONDS = 1.0
"""Heartbeats that follow each other more closely replace the one before."""


class Hits(NamedTuple):
    """What was looked up and hit in the window, in tokens."""

    looked_up: int = 0
    by_tier: Sequence[int] = ()

    @property
    def rate(self) -> float | None:
        """The hit rate; ``None`` without a lookup."""
        return self.share(sum(self.by_tier))

    def share(self, tokens: int) -> float | None:
        """Return which part of the tokens looked up these are."""
        return min(1.0, tokens / self.looked_up) if self.looked_up else None


class HitWindow:
    """The counters of one connection. Times are those of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, Hits]] = deque()
        """The latest counters, after those of the beginning of the window."""

    def add(self, heartbeat: Heartbeat, now: float) -> None:
        """Add the counters of a heartbeat."""
        counters = Hits(heartbeat.looked_up_tokens, [tier.hit_tokens for tier in heartbeat.tiers])
        if len(self._reports) > 1 and now - self._reports[-2][0] < STEP_SECONDS:
            self._reports.pop()
        self._reports.append((now, counters))
        while len(self._reports) > 1 and self._reports[1][0] <= now - WINDOW_SECONDS:
            self._reports.popleft()

    def hits(self) -> Hits:
        """Return the hits between the first and the last heartbeat of the window."""
        if not self._reports:
            return Hits()
        (_, first), (_, last) = self._reports[0], self._reports[-1]
        by_tier = [max(0, after - before) for before, after in zip(first.by_tier, last.by_tier, strict=True)]
        return Hits(max(0, last.looked_up - first.looked_up), by_tier)
