"""Chunks that a peer has granted to this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.errors import ProtocolError
from kvtier.memory.header import OBJECT_ALIGNMENT
from kvtier.memory.keys import ChunkKey
from kvtier.peers.protocol import NO_GRANT
from kvtier.transports.base import RemoteSpan

MAX_NUMBER = (1 << 63) - 1
MAX_LEASES = 65_536
"""Per peer; about 15 MB."""
LAST_SECONDS = 0.5
"""A lease is not used in the last seconds of its lease."""


@dataclass(slots=True, eq=False)
class RemoteLease:
    """One chunk that a peer has granted."""

    key: ChunkKey
    grant: int
    number: int
    """Its index in the grant."""
    offset: int
    length: int
    ready: bool
    """Whether it may be read now; otherwise the peer is still promoting it to memory."""
    ends: float
    """When it stops being usable, on the clock of :func:`time.monotonic`."""
    encoded: RemoteSpan | None = None
    """Where it is encoded in the peer's memory, instead of there."""

    @property
    def span(self) -> RemoteSpan:
        """Where its bytes are in the peer's memory."""
        return self.encoded or RemoteSpan(self.grant, self.offset, self.length)

    def note_encoded(self, offset: int, length: int) -> None:
        """Record where it is encoded. Raises :class:`ProtocolError` if it cannot be there."""
        is_object = 0 < length < self.length and length % OBJECT_ALIGNMENT == 0
        if not is_object or not 0 <= offset <= MAX_NUMBER - length:
            raise ProtocolError("the peer's encoded chunk has an invalid offset or length")
        self.encoded = RemoteSpan(self.grant, offset, length)


class RemoteLeases:
    """The newest lease of one peer for each chunk, in bounded number. Synchronous.

    All leases last equally long, so the oldest expires first. ``release`` is called for leases that are
    dropped before they expire.
    """

    def __init__(
        self,
        release: Callable[[Iterable[RemoteLease]], None],
        *,
        limit: int = MAX_LEASES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release = release
        self._limit = limit
        self._clock = clock
        self._by_key: dict[ChunkKey, RemoteLease] = {}

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._by_key)

    def add(self, leases: Iterable[RemoteLease]) -> None:
        """Add these, replacing earlier leases of the same chunks."""
        self._drop_expired()
        replaced = []
        for lease in leases:
            previous = self._by_key.pop(lease.key, None)
            if previous is not None:
                replaced.append(previous)
            self._by_key[lease.key] = lease
        while len(self._by_key) > self._limit:
            replaced.append(self._by_key.pop(next(iter(self._by_key))))
        if replaced:
            self._release(replaced)

    def find(self, key: ChunkKey) -> RemoteLease | None:
        """Return the lease of a chunk if it is still usable."""
        lease = self._by_key.get(key)
        return lease if lease is not None and lease.ends > self._clock() else None

    def take(self, key: ChunkKey) -> RemoteLease | None:
        """Remove and return the lease of a chunk if usable; the caller must release it."""
        lease = self.find(key)
        if lease is not None:
            del self._by_key[key]
        return lease

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Release the leases of these chunks."""
        dropped = [lease for key in keys if (lease := self.take(key)) is not None]
        if dropped:
            self._release(dropped)

    def clear(self) -> None:
        """Drop all leases without releasing them; the connection loss ended them at the peer."""
        self._by_key.clear()

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._by_key:
            oldest = next(iter(self._by_key))
            if self._by_key[oldest].ends > now:
                return
            del self._by_key[oldest]


def leases_of(
    grant: int,
    keys: Sequence[ChunkKey],
    offsets: Sequence[int],
    lengths: Sequence[int],
    ends: float,
    *,
    ready: int | None = None,
) -> list[RemoteLease]:
    """Return the leases of a grant in a peer's response.

    ``ready``: how many leading ones may be read now; default all. Raises :class:`ProtocolError` for numbers
    that no grant has.
    """
    if keys and not NO_GRANT < grant <= MAX_NUMBER:
        raise ProtocolError("the peer's grant has an invalid number")
    leases = []
    for number, (key, offset, length) in enumerate(zip(keys, offsets, lengths, strict=True)):
        if offset < 0 or length <= 0 or offset + length > MAX_NUMBER:
            raise ProtocolError("the peer's grant has an invalid offset or length")
        leases.append(RemoteLease(key, grant, number, offset, length, ready is None or number < ready, ends))
    return leases


def usable_seconds(lease: float) -> float:
    """Return how long after the request a lease is usable whose grant lasts ``lease`` seconds."""
    return lease - min(LAST_SECONDS, lease / 2)
