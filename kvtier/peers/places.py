"""Where peers may reserve room for what they push: the first tier's arena, or an engine's staging buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.cache import TieredCache
from kvtier.catalog import State
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.keys import ChunkKey
from kvtier.peers.grants import GrantBook
from kvtier.pipeline.store import Reservation
from kvtier.router import FIRST
from kvtier.threads import WorkerThreads, spread

VERIFIED_AT_ONCE = 2
"""Threads that compute checksums, for all peers together."""

Told = tuple[Reservation, bytes]
"""What is filled, and the checksum of the payload that its pusher has told."""


class Place(ABC):
    """Memory in which room is reserved, and what is visible of it. Synchronous but for :meth:`verify`."""

    def __init__(self, grants: GrantBook, limit: int) -> None:
        """``limit``: bytes that may be reserved at once."""
        self.grants = grants
        self.limit = min(limit, grants.limit)
        self.reserved_bytes = 0
        """Of chunks that are not committed yet. Counted by whoever reserves."""

    @property
    def room(self) -> int:
        """Bytes that may be reserved now."""
        return min(self.limit - self.reserved_bytes, self.grants.limit - self.grants.promised)

    @abstractmethod
    def length_of(self, header: ChunkHeader) -> int:
        """The bytes that a chunk takes."""

    @abstractmethod
    def state(self, key: ChunkKey) -> State:
        """Whether a chunk is there for those who would find it here, or on its way."""

    @abstractmethod
    def reserve(self, header: ChunkHeader) -> Reservation | None:
        """Room for a chunk that is ABSENT; ``None`` where there is none."""

    @abstractmethod
    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """The chunks will not be filled."""

    @abstractmethod
    def commit(self, reservations: Sequence[Reservation]) -> None:
        """The chunks are whole: serve them."""

    @abstractmethod
    def offset_of(self, reservation: Reservation) -> int:
        """Where the payload begins, as the transport counts."""

    @abstractmethod
    async def verify(self, told: Sequence[Told]) -> Sequence[bool]:
        """Which of these are what their pusher says. Nobody writes to them any longer."""


class ArenaPlace(Place):
    """The first tier. What is there is found by everybody."""

    def __init__(self, cache: TieredCache, grants: GrantBook, limit: int) -> None:
        super().__init__(grants, limit)
        self._cache = cache
        self._hop = WorkerThreads(VERIFIED_AT_ONCE)

    def length_of(self, header: ChunkHeader) -> int:
        """Of its chunk object."""
        return object_bytes(header.payload_bytes)

    def state(self, key: ChunkKey) -> State:
        """As the catalog has it."""
        return self._cache.hierarchy.catalog.state(key, FIRST)

    def reserve(self, header: ChunkHeader) -> Reservation | None:
        """See :meth:`~kvtier.cache.TieredCache.reserve`."""
        return self._cache.reserve(header)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """See :meth:`~kvtier.cache.TieredCache.abandon`."""
        self._cache.abandon(reservations)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """See :meth:`~kvtier.cache.TieredCache.commit`."""
        self._cache.commit(reservations)

    def offset_of(self, reservation: Reservation) -> int:
        """Behind the header, which is this host's to write."""
        return reservation.lease.offset + HEADER_BYTES

    async def verify(self, told: Sequence[Told]) -> Sequence[bool]:
        """Those whose payload has the checksum that was told."""
        items = [(reservation.header, reservation.lease.view, checksum) for reservation, checksum in told]
        try:
            return await spread(_is_whole, items, parts=1, hop=self._hop)
        finally:
            items.clear()  # Else the traceback of a cancelled call would keep the arena mapped.


def _is_whole(item: tuple[ChunkHeader, memoryview, bytes]) -> bool:
    """In a worker thread: write the header that belongs there, whatever the pusher has written over it.

    The chunk is PENDING, so nobody reads its header before this has ended.
    """
    header, chunk, told = item
    checksum = header.checksum(chunk)
    chunk[:HEADER_BYTES] = header.packed(checksum)
    return checksum == told
