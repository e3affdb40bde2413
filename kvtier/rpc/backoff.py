"""Exponential back-off with jitter."""

from __future__ import annotations

import random


class Backoff:
    """Delays between attempts that fail."""

    def __init__(self, shortest: float = 0.2, longest: float = 10.0) -> None:
        """Both in seconds."""
        self._shortest = shortest
        self._longest = longest
        self._next = shortest

    def next(self) -> float:
        """Return the seconds to wait now, 75 to 100% of the current delay, and double the delay."""
        seconds = self._next
        self._next = min(2 * seconds, self._longest)
        return seconds * random.uniform(0.75, 1.0)  # noqa: S311 - not a secret

    def reset(self) -> None:
        """Start again from the shortest delay."""
        self._next = self._shortest
