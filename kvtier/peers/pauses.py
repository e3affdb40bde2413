"""How long to leave a peer alone, and what is said of it meanwhile."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from logging import Logger

SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds."""
FAILURES_IN_A_ROW = 3


class GrowingPause:
    """Seconds to wait before the next attempt: twice as many each time, and never those of everybody else."""

    def __init__(self, shortest: float = SHORTEST_PAUSE, longest: float = LONGEST_PAUSE) -> None:
        self._shortest = shortest
        self._longest = longest
        self._next = shortest

    def next(self) -> float:
        """How long to wait now: between three quarters and all of what it has grown to."""
        seconds = self._next
        self._next = min(2 * seconds, self._longest)
        return seconds * random.uniform(0.75, 1.0)  # noqa: S311 - nobody gains by guessing it

    def reset(self) -> None:
        """It worked: the next pause is the shortest again."""
        self._next = self._shortest


class Breaker:
    """Whether a peer that is connected is asked at all: not after several failures of one kind in a row.

    A peer may answer one kind of question and fail at another. So what closes the breaker, an answered ping,
    does not make the next pause short again: only success at what it failed at does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        """Why the peer is not asked, for people; ``None`` while it is."""
        self._clock = clock
        self._failures: Counter[str] = Counter()
        self._pause = GrowingPause()
        self._until = 0.0

    @property
    def probe_is_due(self) -> bool:
        """Whether it is paused and has been for long enough to be tried again."""
        return self.reason is not None and self._clock() >= self._until

    def failed(self, kind: str) -> bool:
        """Something of this kind failed, said as the reason; whether that opened the breaker."""
        if self.reason is not None:
            return False
        self._failures[kind] += 1
        return self._failures[kind] >= FAILURES_IN_A_ROW and self.open(kind)

    def worked(self, kind: str) -> None:
        """Something of this kind came off."""
        if self._failures.pop(kind, 0):
            self._pause.reset()

    def open(self, reason: str) -> bool:
        """Ask the peer no more for a while; whether it was asked before."""
        was_closed = self.reason is None
        self.reason = self.reason or reason
        self._until = self._clock() + self._pause.next()
        return was_closed

    def close(self) -> bool:
        """The peer has answered a probe; whether it had been paused. One more failure pauses it again."""
        was_open = self.reason is not None
        self.reason = None
        for kind in self._failures:
            self._failures[kind] = min(self._failures[kind], FAILURES_IN_A_ROW - 1)
        return was_open


class Outage:
    """Tells that a peer is lost, once, and that it is back, once."""

    def __init__(self, logger: Logger, name: str, *, quiet: bool = False) -> None:
        """With ``quiet`` it is told to those alone who want to know everything."""
        self._logger = logger
        self._name = name
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._told = ""

    def begins(self, kind: str, reason: str) -> None:
        """It cannot be used. Said where it was well before, or where the trouble is of another kind now."""
        if kind != self._told:
            self._told = kind
            self._logger.log(self._levels[0], "peer %s: %s; going on without it", self._name, reason)

    def ends(self) -> None:
        """It is well."""
        if self._told:
            self._told = ""
            self._logger.log(self._levels[1], "peer %s: answers again", self._name)
