"""Deduplicated warnings, rate-limited messages, and text from other processes made safe for logs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from logging import WARNING, Logger, getLogger

logger = getLogger("kvtier")

MAX_REMEMBERED = 256
MAX_CHARACTERS = 300


class ChangedWarnings:
    """Warns about a peer's error once, and again when the error changes."""

    def __init__(self, message: str) -> None:
        """``message`` has two ``%s``: the peer and the error."""
        self._message = message
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, peer: str, error: str) -> None:
        """Record the result of an operation: an error, or an empty string for success."""
        before = self._last.pop(peer, "")
        self._last[peer] = error
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
        if error and error != before:
            logger.warning(self._message, peer, error)


class RateLimitedLog:
    """Logs at most one message per ``interval`` seconds and counts the suppressed ones.

    Callable from any thread. Two concurrent calls may both log.
    """

    def __init__(
        self,
        logger: Logger,
        *,
        level: int = WARNING,
        interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval = interval
        self._clock = clock
        self._suppressed_until = float("-inf")
        self._suppressed = 0

    def __call__(self, message: str, *args: object) -> bool:
        """Log the message, or count it as suppressed. Return whether it was logged."""
        now = self._clock()
        if now < self._suppressed_until:
            self._suppressed += 1
            return False
        self._suppressed_until = now + self._interval
        suppressed, self._suppressed = self._suppressed, 0
        more = f" (and {suppressed} more since the last such message)" if suppressed else ""
        self._logger.log(self._level, message + more, *args)
        return True


class RateLimitedLogs:
    """A :class:`RateLimitedLog` per kind, of which there must be few: none is forgotten."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._kinds: dict[str, RateLimitedLog] = {}

    def __call__(self, kind: str, message: str, *args: object) -> bool:
        """See :meth:`RateLimitedLog.__call__`."""
        return self._kinds.setdefault(kind, RateLimitedLog(self._logger))(message, *args)


def printable(text: str) -> str:
    """Return text from another process made safe for logs: printable, one line, bounded length."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_CHARACTERS])
