"""Exponential back-off."""

from __future__ import annotations

import random

MIN_PAUSE, MAX_PAUSE = 0.2, 10.0
"""Seconds between attempts to reach another process."""


class Backoff:
    """Exponential back-off with jitter."""

    def __init__(
        self, shortest: float = MIN_PAUSE, longest: float = MAX_PAUSE, *, jitter: float = 0.25
    ) -> None:
        """``jitter``: maximum fraction by which a delay is shortened, so that waiters do not coincide."""
        self._shortest = shortest
        self._longest = longest
        self._jitter = jitter
        self._next = shortest

    def next(self) -> float:
        """Return the seconds to wait now, and double the delay."""
        seconds = self._next
        self._next = min(2 * seconds, self._longest)
        return seconds * random.uniform(1.0 - self._jitter, 1.0)  # noqa: S311 - not a secret

    def reset(self) -> None:
        """Start again from the shortest delay."""
        self._next = self._shortest
