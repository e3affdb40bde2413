"""Warnings about things that may happen thousands of times a second, said once, or once in a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from logging import Logger, getLogger

logger = getLogger("kvtier")

REMEMBERED_TROUBLES = 256


class Troubles:
    """Says once what is wrong with a peer, and again when it is something else."""

    def __init__(self, message: str) -> None:
        """``message`` has two ``%s``, for the peer and the trouble."""
        self._message = message
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, to: str, trouble: str) -> None:
        """What came of something; nothing where all was well."""
        before = self._last.pop(to, "")
        self._last[to] = trouble
        if len(self._last) > REMEMBERED_TROUBLES:
            self._last.popitem(last=False)
        if trouble and trouble != before:
            logger.warning(self._message, to, trouble)


class RareWarning:
    """Logs at most one warning in each ``interval`` seconds and counts the others.

    Callable from any thread; two at the same moment may both speak.
    """

    def __init__(
        self, logger: Logger, *, interval: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._silent_until = float("-inf")
        self._unsaid = 0

    def __call__(self, message: str, *args: object) -> bool:
        """Warn, or count what was not logged; whether it was logged."""
        now = self._clock()
        if now < self._silent_until:
            self._unsaid += 1
            return False
        self._silent_until = now + self._interval
        unsaid, self._unsaid = self._unsaid, 0
        more = f" (and {unsaid} more since the last such message)" if unsaid else ""
        self._logger.warning(message + more, *args)
        return True
