"""Circuit breaker and back-off: when to stop calling what fails, and when to try it again. No I/O."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

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


class Breaker:
    """Opens after ``limit`` consecutive failures of one kind. While it is open, only probes are due.

    Something may answer one kind of request and fail another. :meth:`close` therefore does not reset the
    back-off: only success at the kind that failed does.
    """

    def __init__(self, limit: int, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        """``backoff``: seconds from the opening, or a failed probe, until the next probe is due."""
        self.reason: str | None = None
        """Why the breaker is open, as text; ``None`` while it is closed."""
        self.failures: Counter[str] = Counter()
        """Consecutive failures by kind."""
        self.pause = 0.0
        """Seconds from the last opening, or failed probe, until the next probe is due."""
        self._limit = limit
        self._backoff = backoff
        self._clock = clock
        self._opened_at = 0.0

    @property
    def probe_is_due(self) -> bool:
        """Whether the breaker is open and its pause has elapsed."""
        return self.reason is not None and self._clock() >= self._opened_at + self.pause

    def record_failure(self, kind: str) -> bool:
        """Count a failure of this kind, which is also the reason. Return whether it opened the breaker."""
        self.failures[kind] += 1
        if self.reason is not None or self.failures[kind] < self._limit:
            return False
        self.open(kind)
        return True

    def record_success(self, kind: str) -> None:
        """Clear the failures of this kind, and reset the back-off if there were any."""
        if self.failures.pop(kind, 0):
            self._backoff.reset()

    def open(self, reason: str) -> None:
        """Open the breaker, or keep it open after a failed probe, until after the next pause."""
        self.reason = reason
        self.pause = self._backoff.next()
        self._opened_at = self._clock()

    def close(self) -> None:
        """Close the breaker. One more failure of the kind that opened it opens it again."""
        self.reason = None
        for kind in self.failures:
            self.failures[kind] = min(self.failures[kind], self._limit - 1)
