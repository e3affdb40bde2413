"""Deduplicated warnings, rate-limited messages, and text from other processes made safe for logs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import WARNING, Logger, getLogger

from kvtier.bounded import remember

logger = getLogger("kvtier")

MAX_REMEMBERED = 256
MAX_CHANGES = 8
"""Maximum number of :class:`ChangedWarnings` per minute, of all peers together."""
MAX_CHARACTERS = 300
SHOWN_SECONDS = 3600.0


class ChangedWarnings:
    """Warns about a peer's error once, and again when the error changes. One rate limit for all peers."""

    def __init__(self, message: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``message`` has two ``%s``: the peer and the error."""
        self._message = message
        self._last: dict[str, str] = {}
        self._warn = RateLimitedLog(logger, burst=MAX_CHANGES, clock=clock)

    def note(self, peer: str, error: str) -> None:
        """Record the result of an operation: an error, or an empty string for success."""
        before = self._last.get(peer, "")
        if error and error != before and not self._warn(self._message, peer, error):
            error = before  # So that it is logged later if it lasts.
        remember(self._last, peer, error, MAX_REMEMBERED)


class RateLimitedLog:
    """Logs at most ``burst`` messages per ``interval`` seconds and counts the suppressed ones.

    Callable from any thread. Two concurrent calls may both log.
    """

    def __init__(
        self,
        logger: Logger,
        *,
        level: int = WARNING,
        interval: float = 60.0,
        burst: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval = interval
        self._burst = burst
        self._left = 0
        self._clock = clock
        self._suppressed_until = float("-inf")
        self._suppressed = 0

    def __call__(self, message: str, *args: object) -> bool:
        """Log the message, or count it as suppressed. Return whether it was logged."""
        now = self._clock()
        if now >= self._suppressed_until:
            self._suppressed_until = now + self._interval
            self._left = self._burst
        if not self._left:
            self._suppressed += 1
            return False
        self._left -= 1
        suppressed, self._suppressed = self._suppressed, 0
        more = f" (and {suppressed} more since the last such message)" if suppressed else ""
        self._logger.log(self._level, message + more, *args)
        return True


@dataclass(frozen=True, slots=True)
class Finding:
    """What keeps a cache from being of use, and what to type."""

    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}: {self.remedy}"


class Findings:
    """What a process has found while it runs, the latest of each kind. Each is logged once an hour."""

    def __init__(self, logger: Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._found: OrderedDict[str, tuple[Finding, float]] = OrderedDict()
        """With the time at which it was logged."""

    def note(self, kind: str, found: str, remedy: str) -> None:
        """Record what was found. ``kind``: what is logged once. Few are remembered."""
        finding, now = Finding(found, remedy), self._clock()
        logged_at = self._found[kind][1] if kind in self._found else now - SHOWN_SECONDS
        if now - logged_at >= SHOWN_SECONDS:
            self._logger.warning("%s", finding)
            logged_at = now
        self._found[kind] = finding, logged_at
        if len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def latest(self) -> list[Finding]:
        """Return what was found in the last hour or two."""
        oldest = self._clock() - 2 * SHOWN_SECONDS
        return [finding for finding, logged_at in self._found.values() if logged_at > oldest]


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


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from or while handling, the root last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
