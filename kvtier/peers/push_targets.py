"""Memory that peers push to: the first tier's arena, or an engine's staging buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from kvtier.cache import TieredCache
from kvtier.catalog.catalog import State
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.peers.grants import GrantBook
from kvtier.tiers.host_memory import Reservation
from kvtier.tiers.seal import HEADERS_AT_ONCE

VERIFY_THREADS = 2
"""Threads that compute checksums, shared by all peers."""

Written = tuple[Reservation, bytes, bytes | None]
"""A filled reservation, the checksum that the pusher sent, and that of what arrived if it is known."""


class PushTarget(ABC):
    """Memory with reservations and committed chunks. Synchronous except :meth:`verify`."""

    number = 0
    """Identifies staging buffers in requests of peers; 0 for the arena."""

    def __init__(self, grants: GrantBook, limit: int) -> None:
        """``limit``: bytes that may be reserved at once."""
        self.grants = grants
        self.limit = min(limit, grants.limit)
        self.reserved_bytes = 0
        """Bytes of chunks that are not committed yet. Maintained by the caller of :meth:`reserve`."""

    @property
    def room(self) -> int:
        """Bytes available for reservation now."""
        return min(self.limit - self.reserved_bytes, self.grants.limit - self.grants.granted_bytes)

    @abstractmethod
    def length_of(self, header: ChunkHeader) -> int:
        """Return the bytes that a chunk occupies."""

    @abstractmethod
    def state(self, key: ChunkKey) -> State:
        """Return whether a chunk is READY, PENDING or ABSENT for lookups that use this memory."""

    @abstractmethod
    def reserve(self, headers: Sequence[ChunkHeader]) -> Sequence[Reservation | None]:
        """Reserve room for ABSENT chunks; ``None`` for those without room."""

    @abstractmethod
    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give up chunks that will not be filled."""

    @abstractmethod
    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Publish complete chunks."""

    @abstractmethod
    def offset_of(self, reservation: Reservation) -> int:
        """Return the offset of the payload in the transport's address space."""

    @abstractmethod
    async def verify(self, written: Sequence[Written]) -> Sequence[bool]:
        """Return whether each chunk matches its checksum. Writes to them must have ended."""

    @abstractmethod
    async def cut_off(self) -> None:
        """Stop all writes of peers that write without this host's participation."""


class ArenaTarget(PushTarget):
    """The first tier's arena. Its chunks are visible to every lookup."""

    def __init__(
        self,
        cache: TieredCache,
        grants: GrantBook,
        cut_off: Callable[[], Awaitable[None]],
        limit: int | None = None,
    ) -> None:
        """``cut_off``: see :meth:`kvtier.transports.base.Transport.cut_off`.

        ``limit``: bytes that may be reserved at once; default the limit of all grants.
        """
        super().__init__(grants, grants.limit if limit is None else limit)
        self._cache = cache
        self._cut_off = cut_off
        self._executor = WorkerThreads(VERIFY_THREADS)

    @property
    def room_ahead(self) -> int:
        """Bytes available for chunks that may never come: nothing is evicted, and half of the room stays."""
        return min(self.room - self.limit // 2, self._cache.memory.free_bytes)

    def length_of(self, header: ChunkHeader) -> int:
        """Return the length of the chunk object."""
        return object_bytes(header.payload_bytes)

    def state(self, key: ChunkKey) -> State:
        """Return the state in the catalog."""
        return self._cache.memory.state(key)

    def reserve(self, headers: Sequence[ChunkHeader]) -> Sequence[Reservation | None]:
        """See :meth:`~kvtier.cache.TieredCache.reserve_all`."""
        return self._cache.reserve_all(headers)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """See :meth:`~kvtier.cache.TieredCache.abandon`."""
        self._cache.abandon(reservations)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """See :meth:`~kvtier.cache.TieredCache.commit`."""
        self._cache.commit(reservations, pushed=True)

    def offset_of(self, reservation: Reservation) -> int:
        """Return the offset after the header, which only this host writes."""
        return reservation.lease.offset + HEADER_BYTES

    async def verify(self, written: Sequence[Written]) -> Sequence[bool]:
        """Return whether each payload matches its checksum, and write the headers."""
        items = [
            (reservation.header, reservation.lease.view, sent, arrived)
            for reservation, sent, arrived in written
        ]
        try:
            if len(items) <= HEADERS_AT_ONCE and all(arrived is not None for *_, arrived in items):
                return [_verify(item) for item in items]
            return await spread(_verify, items, parts=1, executor=self._executor)
        finally:
            items.clear()  # Otherwise the traceback of a cancelled call keeps the arena mapped.

    async def cut_off(self) -> None:
        """See :meth:`kvtier.transports.base.Transport.cut_off`."""
        await self._cut_off()


def _verify(item: tuple[ChunkHeader, memoryview, bytes, bytes | None]) -> bool:
    """Verify a payload and write its header, over whatever the pusher wrote there.

    Runs in a worker thread, unless the payload was hashed as it arrived.

    The chunk is PENDING, so its header is not read before this returns.
    """
    header, chunk, expected, arrived = item
    checksum = header.checksum(chunk) if arrived is None else arrived
    chunk[:HEADER_BYTES] = header.packed(checksum)
    return checksum == expected
