"""InfiniStore backend: chunks in the memory of a server, over TCP or RDMA."""

from __future__ import annotations

import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from typing import ClassVar, NamedTuple, TypeVar

import anyio

from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    SupportsCheck,
    SupportsPrefix,
    SupportsRegistration,
)
from kvtier.backends.infinistore.protocol import MAX_VALUE_BYTES, Drain, InfiniStoreConnection
from kvtier.backends.infinistore.rdma import InfiniStoreRDMA
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.concurrency.sockets.pool import ConnectionPool, Dialer
from kvtier.concurrency.threads import in_thread, spread
from kvtier.errors import TierError
from kvtier.logs import RateLimitedLog
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings

logger = logging.getLogger("kvtier")

NAMES_PER_REQUEST = 10_000
NONCE_BYTES = 16
MAX_ORPHANS = 10_000
ORPHANS_PER_PUT = 16
"""Maximum orphans to remove before each chunk is written."""
CLOSE_SECONDS = 5.0
"""Maximum time that :meth:`InfiniStoreBackend.close` waits."""
ROOM_SECONDS = 0.1
"""Maximum time for a server to reject a value. Only decides between ``FULL`` and ``FAILED``."""

_POINTER = struct.Struct(f"<{NONCE_BYTES}sQ")

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


class Pointer(NamedTuple):
    """The value under a chunk's own name: the location and the length of the chunk."""

    nonce: bytes
    length: int

    def name(self, base: bytes) -> bytes:
        """Return the name of the chunk's value."""
        return base + b":" + self.nonce

    def pack(self) -> bytes:
        """Serialize the pointer."""
        return _POINTER.pack(*self)


class InfiniStoreBackend(Backend, SupportsRegistration, SupportsPrefix, SupportsCheck):
    """Chunks as values of an InfiniStore, each under a unique name that a small pointer refers to.

    The server (0.2.35) exposes values that are still being written, and crashes if a client reads one.
    Therefore a value's name is published only once it is complete: the chunk's own name holds a *pointer* of
    a few bytes, written last and atomically. Readers on all hosts get one writer's complete value or none,
    and detect a chunk of a different length before fetching it. The cost is one more round trip per chunk.

    Over TCP, worker threads transfer bytes between the socket and the caller's memory, over ``connections``,
    each paired with another one for pointers. Over RDMA the server reads and writes the memory itself.
    Connects lazily and reconnects after a loss. A batch takes at most ``deadline``, over RDMA that long per
    distinct chunk length. A reply that arrives later is read and discarded
    (:mod:`~kvtier.backends.infinistore.protocol`); nothing protects the server from a host that dies in the
    middle of a value.
    """

    settings_type: ClassVar[type[TierSettings]] = InfiniStoreSettings

    def __init__(self, settings: InfiniStoreSettings) -> None:
        self._settings = settings
        self._drain = Drain()
        self._dialer = Dialer(
            settings.host, settings.port, lambda family: InfiniStoreConnection(family, self._drain)
        )
        self._values = ConnectionPool(settings.connections, self._dialer.connect)
        self._pointers = ConnectionPool(settings.connections, self._dialer.connect)
        self._lookups = ConnectionPool(1, self._dialer.connect)
        self._rdma = InfiniStoreRDMA(settings) if settings.connection == "rdma" else None
        self._orphans: deque[bytes] = deque(maxlen=MAX_ORPHANS)
        """Names of values that were only partly written: the server never evicts these by itself."""
        self._warn = RateLimitedLog(logger)

    async def open(self) -> None:
        """Load the RDMA library, if needed. Does not connect. Raises :class:`TierError`."""
        if self._rdma is not None:
            try:
                await anyio.to_thread.run_sync(self._rdma.load)
            except TierError as error:
                raise TierError(f"tier {self._settings.name!r}: {error}") from error

    async def close(self) -> None:
        """Close every connection. Waits up to ``CLOSE_SECONDS`` for replies that are still arriving."""
        for pool in (self._values, self._pointers, self._lookups):
            pool.close()
        # Shielded: a connection that is closed in the middle of a reply crashes the server.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._drain.close, CLOSE_SECONDS)
        if self._rdma is not None:
            await self._rdma.close()

    async def register(self, arena: Arena) -> None:
        """Use RDMA for memory in the arena. All other memory goes over TCP."""
        if self._rdma is not None:
            self._rdma.register(arena)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held. Raises ``OSError`` if the server is unreachable."""
        names = [self._name(key) for key in keys]
        answers = await self._query(lambda connection, part: list(connection.exist(part)), _slices(names))
        return [held for part in answers for held in part]

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading keys that are held. Raises ``OSError`` if the server is unreachable.

        The server's binary search returns an upper bound in one round trip. It is not exact, because a full
        server evicts the first chunks of a prompt before the others. So query the keys up to the first miss.
        """
        names = [self._name(key) for key in keys]
        return sum(await self._query(_held_prefix, [names] if names else []))

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return how long each chunk is, by its pointer. Raises ``OSError`` if the server is unreachable."""
        pointers = await self._query(read_pointer, [self._name(key) for key in keys])
        return [0 if pointer is None else pointer.length for pointer in pointers]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store each view. ``FULL`` if the server has no room even after evicting others."""
        if self._rdma is not None and self._rdma.reaches(view for _, view in items):
            return await self._put_by_rdma(self._rdma, items)
        return await self._transfer_all(self._put_one, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view."""
        if self._rdma is not None and self._rdma.reaches(view for _, view in items):
            return await self._get_by_rdma(self._rdma, items)
        return await self._transfer_all(self._get_one, items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key. Raises ``OSError`` if the server is unreachable."""
        await self._query(self._delete, [list(keys)] if keys else [])

    async def check(self) -> str:
        """Send a query to the server. See :class:`~kvtier.backends.base.SupportsCheck`."""
        settings = self._settings
        try:
            await self.contains([ChunkKey(secrets.token_bytes(32))])
            if self._rdma is not None:
                await self._rdma.read([])
        except OSError as error:
            raise TierError(
                f"{settings.host}:{settings.port} does not answer like an InfiniStore "
                f"({_describe_error(error)})",
                "check that the server is running, and that `url` has its service port",
            ) from error
        except Exception as error:
            raise TierError(
                f"no RDMA connection to {settings.host} ({error})",
                "check `device`, `link_type` and `gid_index`, or set connection: tcp",
            ) from error
        return f"InfiniStore at {settings.host}:{settings.port} over {settings.connection}"

    # TCP, in worker threads.

    async def _transfer_all(
        self, transfer_one: Callable[[Deadline, ItemT], Outcome], items: Sequence[ItemT]
    ) -> Sequence[Outcome]:
        deadline = Deadline(self._settings.deadline)
        try:
            await self._dialer.find(deadline)
        except OSError as error:
            return [self._failed(error)] * len(items)
        return await spread(
            partial(transfer_one, deadline),
            items,
            parts=self._values.size,
            executor=self._values.executor.threads,
        )

    def _put_one(self, deadline: Deadline, item: PutItem) -> Outcome:
        key, view = item
        if len(view) > MAX_VALUE_BYTES:
            self._warn("%s: a chunk of %d bytes is too large for InfiniStore", self._settings.name, len(view))
            return Outcome.FAILED
        base, pointer = self._name(key), _new_pointer(len(view))
        name = pointer.name(base)
        try:
            with self._pair(deadline) as (pointers, values):
                # First, as they take the room that this value may need.
                self._remove_orphans(pointers)
                former = read_pointer(pointers, base)
                try:
                    values.put(name, view)
                except OSError:
                    self._orphans.append(name)
                    raise
                _publish(pointers, base, pointer, former)
        except OSError as error:
            if isinstance(error, ConnectionError) and self._lacks_room(len(view)):
                self._warn(
                    "%s: the server is full: start it with a larger --prealloc-size", self._settings.name
                )
                return Outcome.FULL
            return self._failed(error)
        return Outcome.OK

    def _lacks_room(self, length: int) -> bool:
        """Return whether the server closed the connection during a value because it is full."""
        name = _new_pointer(length).name(b"kvtier-room")
        with suppress(OSError), self._pointers.checkout(Deadline(ROOM_SECONDS)) as connection:
            # The value is announced and never sent: nothing else can follow on this connection.
            connection.in_sync = False
            self._orphans.append(name)
            return connection.lacks_room(name, length)
        return False

    def _get_one(self, deadline: Deadline, item: GetItem) -> Outcome:
        key, view = item
        base = self._name(key)
        try:
            with self._pair(deadline) as (pointers, values):
                pointer = read_pointer(pointers, base)
                if pointer is None or pointer.length != len(view):
                    return Outcome.MISS
                if values.get(pointer.name(base), view):
                    return Outcome.OK
                # The value was evicted, but its pointer was not.
                if read_pointer(pointers, base) == pointer:
                    pointers.delete([base])
                return Outcome.MISS
        except OSError as error:
            return self._failed(error)

    @contextmanager
    def _pair(self, deadline: Deadline) -> Iterator[tuple[InfiniStoreConnection, InfiniStoreConnection]]:
        """Yield a connection for pointers and one for values. Use the pointer connection first.

        The client may receive the last bytes of a value before the server has marked the request as done.
        The server then takes the next request on that connection for a repetition of the same one, and sends
        without end. Once it has answered a later request on another connection, the mark is set.
        """
        with self._values.checkout(deadline) as values, self._pointers.checkout(deadline) as pointers:
            yield pointers, values

    def _delete(self, connection: InfiniStoreConnection, keys: Sequence[ChunkKey]) -> None:
        bases = [self._name(key) for key in keys]
        pointers = [(base, read_pointer(connection, base)) for base in bases]
        values = [pointer.name(base) for base, pointer in pointers if pointer is not None]
        for part in _slices([*bases, *values]):
            connection.delete(part)

    def _remove_orphans(self, connection: InfiniStoreConnection) -> None:
        """Remove some partly written values. Completes each first, or the server would crash."""
        for _ in range(ORPHANS_PER_PUT):
            try:
                name = self._orphans.popleft()
            except IndexError:
                return
            try:
                connection.put(name, bytes(1))
                connection.delete([name])
            except OSError:
                self._orphans.appendleft(name)
                raise

    # RDMA: the library transfers the values; pointers go over TCP.

    async def _put_by_rdma(self, rdma: InfiniStoreRDMA, items: Sequence[PutItem]) -> Sequence[Outcome]:
        pointers = [_new_pointer(len(view)) for _, view in items]
        named = [
            (pointer.name(self._name(key)).decode(), view)
            for (key, view), pointer in zip(items, pointers, strict=True)
        ]
        try:
            outcomes = await rdma.write(named)
            stored = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.OK]

            def publish(connection: InfiniStoreConnection, index: int) -> None:
                base = self._name(items[index][0])
                _publish(connection, base, pointers[index], read_pointer(connection, base))

            await self._query(publish, stored)
        except Exception as error:
            return [self._failed(error)] * len(items)
        return outcomes

    async def _get_by_rdma(self, rdma: InfiniStoreRDMA, items: Sequence[GetItem]) -> Sequence[Outcome]:
        outcomes = [Outcome.MISS] * len(items)
        try:
            bases = [self._name(key) for key, _ in items]
            pointers = await self._query(read_pointer, bases)
            found = {
                index: pointer
                for index, pointer in enumerate(pointers)
                if pointer is not None and pointer.length == len(items[index][1])
            }
            named = [
                (pointer.name(bases[index]).decode(), items[index][1]) for index, pointer in found.items()
            ]
            for index, outcome in zip(found, await rdma.read(named), strict=True):
                outcomes[index] = outcome
        except Exception as error:
            return [self._failed(error)] * len(items)
        return outcomes

    # Connections.

    async def _query(
        self, query: Callable[[InfiniStoreConnection, ItemT], AnswerT], items: Sequence[ItemT]
    ) -> list[AnswerT]:
        """Run ``query`` for each item on the connection reserved for lookups. Raises ``OSError``."""
        if not items:
            return []
        deadline = Deadline(self._settings.deadline)
        await self._dialer.find(deadline)

        def query_all() -> list[AnswerT]:
            with self._lookups.checkout(deadline) as connection:
                return [query(connection, item) for item in items]

        return await in_thread(query_all, self._lookups.executor.threads)

    def _name(self, key: ChunkKey) -> bytes:
        return (self._settings.prefix + key.hex()).encode()

    def _failed(self, error: Exception) -> Outcome:
        settings = self._settings
        self._warn("%s: %s:%d: %s", settings.name, settings.host, settings.port, _describe_error(error))
        return Outcome.FAILED


def read_pointer(connection: InfiniStoreConnection, base: bytes) -> Pointer | None:
    """Read the pointer under a chunk's own name; ``None`` if there is no valid one."""
    value = memoryview(bytearray(_POINTER.size))
    if not connection.get(base, value):
        return None
    pointer = Pointer(*_POINTER.unpack(value))
    return pointer if pointer.nonce.isalnum() else None


def _publish(
    connection: InfiniStoreConnection, base: bytes, pointer: Pointer, former: Pointer | None
) -> None:
    """Write the pointer to a new value, after deleting the former pointer and value.

    Overwriting is not safe: the old entry stays in the server's eviction queue and takes the new one with it.
    """
    if former is not None:
        connection.delete([base, former.name(base)])
    connection.put(base, pointer.pack())


def _new_pointer(length: int) -> Pointer:
    return Pointer(secrets.token_hex(NONCE_BYTES // 2).encode(), length)


def _held_prefix(connection: InfiniStoreConnection, names: Sequence[bytes]) -> int:
    held = 0
    for part in _slices(names):
        held_here = sum(takewhile(bool, connection.exist(part[: connection.matched(part)])))
        held += held_here
        if held_here < len(part):
            break
    return held


def _slices(names: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [names[start : start + NAMES_PER_REQUEST] for start in range(0, len(names), NAMES_PER_REQUEST)]


def _describe_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
