"""How fast a peer's chunks come, and which of several peers would bring one soonest."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

MEASURED_BYTES = 1 << 20
"""Fewer bytes than these say nothing of how fast others will come."""
REMEMBERED_BYTES = 256 << 20
"""What was measured counts half as soon as so many bytes more have come."""
REMEMBERED_SECONDS = 30.0
"""Of a peer that was not read from for so long nothing is known: it may be better now."""
SLOWER = 1.25
"""By so much at most a round trip is believed to take longer than the one before."""
USUAL_SECONDS_A_BYTE = 1e-9
EQUAL_FACTOR, EQUAL_SECONDS = 1.25, 0.001
"""Peers whose expected times are within this factor of the best, and so many seconds, take turns."""

_turns = itertools.count(1)


class Pace:
    """Of one peer: what is under way from it, and how long a byte has taken while anything was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.under_way = 0
        """Bytes that somebody has decided to read from it and has not got."""
        self.bytes_read = 0
        self.round_trip: float | None = None
        """Seconds."""
        self.turn = 0
        """Greater the later the peer was chosen."""
        self._clock = clock
        self._reads = 0
        self._since = 0.0
        self._busy_seconds = 0.0
        self._busy_bytes = 0.0

    @property
    def seconds_a_byte(self) -> float | None:
        """As far as that is known."""
        if self._busy_bytes < MEASURED_BYTES:
            return None
        if not self._reads and self._clock() - self._since > REMEMBERED_SECONDS:
            return None
        return self._busy_seconds / self._busy_bytes

    def choose(self, length: int) -> None:
        """So many bytes will be read from this peer."""
        self.under_way += length
        self.turn = next(_turns)

    def let_go(self, length: int) -> None:
        """The inverse of :meth:`choose`: they have come, or will not."""
        self.under_way -= length

    def begin(self) -> None:
        """A read begins. Several may be under way."""
        if not self._reads:
            self._since = self._clock()
        self._reads += 1

    def end(self, length: int) -> None:
        """A read has ended and has brought so many bytes."""
        now = self._clock()
        self._reads -= 1
        self._busy_seconds += now - self._since
        self._busy_bytes += length
        self.bytes_read += length
        self._since = now
        if self._busy_bytes > REMEMBERED_BYTES:
            self._busy_seconds /= 2
            self._busy_bytes /= 2

    def note_round_trip(self, seconds: float) -> None:
        """A ping took so long. One that took longer than those before it may have met a busy moment."""
        self.round_trip = seconds if self.round_trip is None else min(seconds, SLOWER * self.round_trip)


def soonest(paces: Sequence[Pace], length: int) -> int:
    """Which of several peers would bring ``length`` bytes first; equal ones take turns.

    One of which nothing is known is taken to be as fast as the fastest that is known.
    """
    if len(paces) == 1:
        return 0
    known = [seconds for pace in paces if (seconds := pace.seconds_a_byte) is not None]
    usual = min(known, default=USUAL_SECONDS_A_BYTE)
    expected = [
        (pace.under_way + length) * (pace.seconds_a_byte or usual) + (pace.round_trip or 0.0)
        for pace in paces
    ]
    limit = EQUAL_FACTOR * min(expected) + EQUAL_SECONDS
    return min(
        (index for index, seconds in enumerate(expected) if seconds <= limit), key=lambda i: paces[i].turn
    )
