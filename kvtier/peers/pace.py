"""Throughput estimates per peer, and the choice of the fastest peer for a read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

MEASURED_BYTES = 1 << 20
"""Minimum sample size: below it the throughput is unknown."""
REMEMBERED_BYTES = 256 << 20
"""The window: older measurements are halved after this many bytes."""
REMEMBERED_SECONDS = 30.0
"""A measurement expires after this long without reads, because the peer may be faster by now."""
SLOWER = 1.25
"""Maximum growth of the round-trip estimate per ping, to damp outliers."""
DEFAULT_SECONDS_PER_BYTE = 1e-9
EQUAL_FACTOR, EQUAL_SECONDS = 1.25, 0.001
"""Peers are equal if their expected time is within this factor plus seconds of the best."""

_turns = itertools.count(1)


class Pace:
    """One peer's bytes in flight, and its throughput while reads are in flight."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight = 0
        """Bytes assigned to this peer and not read yet."""
        self.bytes_read = 0
        self.round_trip: float | None = None
        """Seconds."""
        self.turn = 0
        """Sequence number of the last assignment; the largest was assigned last."""
        self._clock = clock
        self._reads = 0
        self._since = 0.0
        self._busy_seconds = 0.0
        self._busy_bytes = 0.0

    @property
    def seconds_per_byte(self) -> float | None:
        """Measured seconds per byte; ``None`` if unknown."""
        if self._busy_bytes < MEASURED_BYTES:
            return None
        if not self._reads and self._clock() - self._since > REMEMBERED_SECONDS:
            return None
        return self._busy_seconds / self._busy_bytes

    def assign(self, length: int) -> None:
        """Count ``length`` bytes that will be read from this peer."""
        self.in_flight += length
        self.turn = next(_turns)

    def release(self, length: int) -> None:
        """Undo :meth:`assign`, once the bytes are read or given up."""
        self.in_flight -= length

    def begin(self) -> None:
        """Record the start of a read. Reads may overlap."""
        if not self._reads:
            self._since = self._clock()
        self._reads += 1

    def end(self, length: int) -> None:
        """Record the end of a read that returned ``length`` bytes."""
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
        """Record a ping's round trip. Growth is limited, as a busy moment may have delayed the pong."""
        self.round_trip = seconds if self.round_trip is None else min(seconds, SLOWER * self.round_trip)


def fastest(paces: Sequence[Pace], length: int) -> int:
    """Return the index of the peer that would deliver ``length`` bytes first; round-robin if equal.

    A peer without measurements is assumed to be as fast as the fastest measured one.
    """
    if len(paces) == 1:
        return 0
    known = [seconds for pace in paces if (seconds := pace.seconds_per_byte) is not None]
    default = min(known, default=DEFAULT_SECONDS_PER_BYTE)
    expected = [
        (pace.in_flight + length) * (pace.seconds_per_byte or default) + (pace.round_trip or 0.0)
        for pace in paces
    ]
    limit = EQUAL_FACTOR * min(expected) + EQUAL_SECONDS
    return min(
        (index for index, seconds in enumerate(expected) if seconds <= limit), key=lambda i: paces[i].turn
    )
