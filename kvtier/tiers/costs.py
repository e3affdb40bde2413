"""Read cost estimate of a medium, learned from its recent reads.

The model is a latency plus a time per byte, from a linear regression over recent reads with exponentially
decreasing weights. Weights also decay with time: a medium that was slow once is not read while another one is
cheaper, so after some minutes its estimate expires and it is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.units import MIB

NEWEST_WEIGHT = 0.25
"""Weight of the newest read; all earlier ones together have the rest."""
HALF_LIFE_SECONDS = 60.0
"""Time after which the weight of a read halves."""
MIN_WEIGHT = 1 / 32
"""Total weight below which the estimate expires: one read after three half-lives, many after five."""
MIN_SPREAD = 0.01
"""Relative variance of read lengths below which latency and bandwidth cannot be separated."""
MIN_SUCCESS = 1 / 16
"""Lower bound of the success rate, which limits the penalty for failures."""


class ReadCost:
    """The recent read cost of one medium. Constant memory and time per update."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decayed_at = clock()
        self._failures = 0.0
        # Weighted sums over the reads: 1, bytes, seconds, bytes squared, and bytes times seconds.
        self._weight = self._bytes = self._seconds = self._squares = self._products = 0.0

    def succeeded(self, length: int, seconds: float) -> None:
        """Record a batch that read ``length`` bytes in ``seconds``. Ignored if it read none."""
        if not length:
            return
        self._age()
        self._weight += NEWEST_WEIGHT
        self._bytes += NEWEST_WEIGHT * length
        self._seconds += NEWEST_WEIGHT * seconds
        self._squares += NEWEST_WEIGHT * length * length
        self._products += NEWEST_WEIGHT * length * seconds

    def failed(self) -> None:
        """Record a failed batch. Its duration is not used."""
        self._age()
        self._failures += NEWEST_WEIGHT

    def expected(self, length: int) -> float | None:
        """Return the expected seconds to read ``length`` bytes, including retries; ``None`` if unknown."""
        line = self._line()
        if line is None:
            return None
        latency, slope = line
        return (latency + slope * length) / max(self._success, MIN_SUCCESS)

    def status(self) -> dict[str, object]:
        """Return the estimate for display and tests; values are ``None`` if unknown."""
        latency, slope = self._line() or (None, None)
        return {
            "latency_seconds": latency,
            "seconds_per_mib": None if slope is None else slope * MIB,
            "failure_ratio": None if latency is None else 1 - self._success,
        }

    @property
    def _success(self) -> float:
        """The weighted fraction of batches that succeeded."""
        return self._weight / (self._weight + self._failures)

    def _line(self) -> tuple[float, float] | None:
        """Return latency in seconds and seconds per byte; ``None`` if unknown."""
        self._decay(1.0)
        if self._weight < MIN_WEIGHT:
            return None
        slope = self._seconds / self._bytes
        spread = self._weight * self._squares - self._bytes**2
        if spread > MIN_SPREAD * self._bytes**2:
            fitted = (self._weight * self._products - self._bytes * self._seconds) / spread
            # Noise must make neither the time per byte nor the latency negative.
            slope = min(max(fitted, 0.0), slope)
        # Rounding may make the difference negative.
        return max(self._seconds - slope * self._bytes, 0.0) / self._weight, slope

    def _age(self) -> None:
        self._decay(1.0 - NEWEST_WEIGHT)

    def _decay(self, factor: float) -> None:
        now = self._clock()
        factor *= 0.5 ** ((now - self._decayed_at) / HALF_LIFE_SECONDS)
        self._decayed_at = now
        self._failures *= factor
        self._weight *= factor
        self._bytes *= factor
        self._seconds *= factor
        self._squares *= factor
        self._products *= factor
