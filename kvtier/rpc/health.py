"""Detects an unresponsive server, for a client that must not wait for it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvtier.logs import RateLimitedLog

UNRESPONSIVE_SECONDS = 1.0
"""Default of :attr:`Health.limit`. On a saturated machine a healthy process may wait 0.1 s for a CPU."""


class Health:
    """The state of one connection: answering, late or unresponsive.

    *Late* begins when a wait ends without an answer, *unresponsive* when nothing has arrived for
    :attr:`limit` seconds. Any message ends both.
    """

    def __init__(
        self, logger: logging.Logger, server: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._server = server
        self._clock = clock
        self._warn = RateLimitedLog(logger)
        self._warned = False
        self.limit = UNRESPONSIVE_SECONDS
        """Seconds without any message, while an answer is outstanding, until the server is unresponsive."""
        self.idle_since = 0.0
        """When the last message arrived or the first open request was sent, whichever is later."""
        self.late = False
        """Whether the last wait ended without an answer: waiting again is pointless."""
        self.unresponsive = False
        """Whether no request should be sent."""

    @property
    def idle_seconds(self) -> float:
        """The time since :attr:`idle_since`."""
        return self._clock() - self.idle_since

    def request_sent(self, *, first: bool) -> None:
        """Record that a request was sent; ``first``: no other one is open."""
        if first:
            self.idle_since = self._clock()

    def missed(self) -> None:
        """Record that a wait has ended without an answer."""
        self.late = True

    def message_received(self) -> None:
        """Record that a message has arrived."""
        if self.unresponsive and self._warned:
            self._logger.info("%s answers again, after %.1f s", self._server, self.idle_seconds)
        self.reset()

    def check(self, outstanding: Iterable[str]) -> None:
        """Update the state by the clock; ``outstanding``: names of the open requests. Receive first."""
        if self.unresponsive or self.idle_seconds < self.limit:
            return
        if open_questions := Counter(outstanding):
            self.late = self.unresponsive = True
            self._warned = self._warn(
                "%s has not answered for %.2f s (open: %s): continuing without it until it does",
                self._server,
                self.idle_seconds,
                ", ".join(f"{count} {what}" for what, count in open_questions.items()),
            )

    def reset(self) -> None:
        """Reset the state: a message has arrived, or a new connection is established."""
        self.idle_since = self._clock()
        self.late = self.unresponsive = self._warned = False
