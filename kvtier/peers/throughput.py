"""Throughput of each peer, and the choice of the fastest peer for a read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from math import inf

from kvtier.tiers.throughput import Throughput

SAMPLE_BYTES = 32 << 20
"""Bytes of one of the latest samples, of which the estimate is the mean."""
MEASURED_BYTES = 1 << 20
"""Minimum sample size: below it the throughput is unknown."""
REMEMBERED_SECONDS = 30.0
"""A measurement expires after this long without reads, because the peer may be faster by now."""
SLOWER = 1.25
"""Maximum growth of the round-trip estimate per ping, to damp outliers."""
DEFAULT_SECONDS_PER_BYTE = 1e-9
EQUAL_FACTOR, EQUAL_SECONDS = 1.25, 0.001
"""Peers are equal if their expected time is within this factor plus seconds of the best."""

_turns = itertools.count(1)


class PeerThroughput(Throughput):
    """One peer's throughput while reads are in flight, its bytes that are assigned, and its round trip."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # A new peer is compared with others from its first read on, and its estimate expires as a whole.
        super().__init__(SAMPLE_BYTES, least=MEASURED_BYTES, min_samples=1, max_age=inf, clock=clock)
        self.in_flight = 0
        """Bytes assigned to this peer and not read yet."""
        self.bytes_read = 0
        self.round_trip: float | None = None
        """Seconds."""
        self.turn = 0
        """Sequence number of the last assignment; the largest was assigned last."""

    @property
    def seconds_per_byte(self) -> float | None:
        """Measured seconds per byte; ``None`` if unknown."""
        if not self._pending and self._clock() - self._began > REMEMBERED_SECONDS:
            return None
        known = self.seconds_per_unit(MEASURED_BYTES)
        if known is None and self._done >= MEASURED_BYTES:
            # Its first sample: until the peer is known to be slow, it gets as many reads as the fastest.
            return self._busy_seconds / self._done
        return known

    def assign(self, length: int) -> None:
        """Count ``length`` bytes that will be read from this peer."""
        self.in_flight += length
        self.turn = next(_turns)

    def release(self, length: int) -> None:
        """Undo :meth:`assign`, once the bytes are read or given up."""
        self.in_flight -= length

    def end(self, amount: int, done: int) -> None:
        """Record the end of reads, as :meth:`Throughput.end`."""
        super().end(amount, done)
        self.bytes_read += done

    def note_round_trip(self, seconds: float) -> None:
        """Record a ping's round trip. Growth is limited, as a busy moment may have delayed the pong."""
        self.round_trip = seconds if self.round_trip is None else min(seconds, SLOWER * self.round_trip)


def fastest(peers: Sequence[PeerThroughput], length: int) -> int:
    """Return the index of the peer that would deliver ``length`` bytes first; round-robin if equal.

    A peer without measurements is assumed to be as fast as the fastest measured one.
    """
    if len(peers) == 1:
        return 0
    known = [seconds for peer in peers if (seconds := peer.seconds_per_byte) is not None]
    default = min(known, default=DEFAULT_SECONDS_PER_BYTE)
    expected = [
        (peer.in_flight + length) * (peer.seconds_per_byte or default) + (peer.round_trip or 0.0)
        for peer in peers
    ]
    limit = EQUAL_FACTOR * min(expected) + EQUAL_SECONDS
    return min(
        (index for index, seconds in enumerate(expected) if seconds <= limit), key=lambda i: peers[i].turn
    )
