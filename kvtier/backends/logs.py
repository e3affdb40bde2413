"""Warnings about things that may happen thousands of times a second, said once in a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from logging import Logger


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

    def __call__(self, message: str, *args: object) -> None:
        """Warn, or remember that there was something to warn of."""
        now = self._clock()
        if now < self._silent_until:
            self._unsaid += 1
            return
        self._silent_until = now + self._interval
        unsaid, self._unsaid = self._unsaid, 0
        more = f" (and {unsaid} more since the last such message)" if unsaid else ""
        self._logger.warning(message + more, *args)
