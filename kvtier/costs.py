"""What reading from a medium costs, learnt from the reads that it has answered.

A read of so many bytes takes a latency and a time for each byte. Both come from one straight line through
the latest reads, the newest weighing most. Reads grow old, too: a medium that was slow once is not used while
another is cheaper, so nothing new is learnt of it, and after some minutes what is known no longer counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.units import MIB

NEWEST_SHARE = 0.25
"""How much of what is known the newest read makes up."""
HALF_LIFE_SECONDS = 60.0
"""After which a read counts half as much, whether others follow it or not."""
FAINT = 1 / 32
"""What weighs less is not known any more: one read after three half-lives, many after five."""
LEAST_SPREAD = 0.01
"""Variance of the lengths read, by their squared mean, below which latency and bandwidth look the same."""
LEAST_SUCCESS = 1 / 16
"""However often a medium has failed, it is not made dearer than by the inverse of this."""


class ReadCost:
    """What one medium's reads have cost of late. Constant in size and in time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faded_at = clock()
        self._failures = 0.0
        # Weighted sums over the reads: of one, of bytes, seconds, squared bytes, and bytes times seconds.
        self._weight = self._bytes = self._seconds = self._squares = self._products = 0.0

    def succeeded(self, length: int, seconds: float) -> None:
        """A batch brought ``length`` bytes, which took ``seconds``. One that brought none tells nothing."""
        if not length:
            return
        self._make_way()
        self._weight += NEWEST_SHARE
        self._bytes += NEWEST_SHARE * length
        self._seconds += NEWEST_SHARE * seconds
        self._squares += NEWEST_SHARE * length * length
        self._products += NEWEST_SHARE * length * seconds

    def failed(self) -> None:
        """A batch failed. How soon it did says nothing of what reading costs."""
        self._make_way()
        self._failures += NEWEST_SHARE

    def expected(self, length: int) -> float | None:
        """Seconds to read ``length`` bytes, failures included as attempts in vain; ``None`` if not known."""
        line = self._line()
        if line is None:
            return None
        latency, slope = line
        return (latency + slope * length) / max(self._success, LEAST_SUCCESS)

    def status(self) -> dict[str, object]:
        """For people and tests; ``None`` where nothing is known."""
        latency, slope = self._line() or (None, None)
        return {
            "latency_seconds": latency,
            "seconds_a_mib": None if slope is None else slope * MIB,
            "failed_share": None if latency is None else 1 - self._success,
        }

    @property
    def _success(self) -> float:
        """The share of the batches that did not fail, of those that still count."""
        return self._weight / (self._weight + self._failures)

    def _line(self) -> tuple[float, float] | None:
        """Seconds for a read of any length, and for each byte of it besides; ``None`` if not known."""
        self._fade(1.0)
        if self._weight < FAINT:
            return None
        slope = self._seconds / self._bytes
        spread = self._weight * self._squares - self._bytes**2
        if spread > LEAST_SPREAD * self._bytes**2:
            straight = (self._weight * self._products - self._bytes * self._seconds) / spread
            slope = min(max(straight, 0.0), slope)
        # Of the smallest numbers rounding may take more than there is.
        return max(self._seconds - slope * self._bytes, 0.0) / self._weight, slope

    def _make_way(self) -> None:
        self._fade(1.0 - NEWEST_SHARE)

    def _fade(self, factor: float) -> None:
        now = self._clock()
        factor *= 0.5 ** ((now - self._faded_at) / HALF_LIFE_SECONDS)
        self._faded_at = now
        self._failures *= factor
        self._weight *= factor
        self._bytes *= factor
        self._seconds *= factor
        self._squares *= factor
        self._products *= factor
