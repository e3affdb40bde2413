"""When to stop calling something that fails, and when to try it again. Without I/O, for tiers and peers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvtier.concurrency.backoff import Backoff


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
