"""Circuit breaker and outage logging for a peer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from logging import Logger

from kvtier.concurrency.backoff import Backoff

FAILURES_IN_A_ROW = 3


class Breaker:
    """Circuit breaker for a connected peer. Opens after consecutive failures of one kind.

    A peer may answer one kind of request and fail another. An answered ping therefore closes the breaker
    without resetting the back-off: only success at the kind that failed resets it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        """Why the breaker is open, as text; ``None`` while it is closed."""
        self._clock = clock
        self._failures: Counter[str] = Counter()
        self._backoff = Backoff()
        self._until = 0.0

    @property
    def probe_is_due(self) -> bool:
        """Whether the breaker is open and its pause has elapsed."""
        return self.reason is not None and self._clock() >= self._until

    def record_failure(self, kind: str) -> bool:
        """Count a failure of this kind, which is also the reason. Return whether it opened the breaker."""
        if self.reason is not None:
            return False
        self._failures[kind] += 1
        return self._failures[kind] >= FAILURES_IN_A_ROW and self.open(kind)

    def record_success(self, kind: str) -> None:
        """Clear the failures of this kind, and reset the back-off if there were any."""
        if self._failures.pop(kind, 0):
            self._backoff.reset()

    def open(self, reason: str) -> bool:
        """Open the breaker for the next pause. Return whether it was closed."""
        was_closed = self.reason is None
        self.reason = self.reason or reason
        self._until = self._clock() + self._backoff.next()
        return was_closed

    def close(self) -> bool:
        """Close the breaker; one more failure reopens it. Return whether it was open."""
        was_open = self.reason is not None
        self.reason = None
        for kind in self._failures:
            self._failures[kind] = min(self._failures[kind], FAILURES_IN_A_ROW - 1)
        return was_open


class Outage:
    """Logs once that a peer is unavailable, and once that it is back."""

    def __init__(self, logger: Logger, name: str, *, quiet: bool = False) -> None:
        """``quiet``: log at debug level only."""
        self._logger = logger
        self._name = name
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._reported = ""

    def begin(self, kind: str, reason: str) -> None:
        """Log that the peer is unavailable, unless this kind of outage is already reported."""
        if kind != self._reported:
            self._reported = kind
            self._logger.log(self._levels[0], "peer %s: %s; continuing without it", self._name, reason)

    def end(self) -> None:
        """Log that the peer is available again, if an outage was reported."""
        if self._reported:
            self._reported = ""
            self._logger.log(self._levels[1], "peer %s: answers again", self._name)
