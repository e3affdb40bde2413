"""An InfiniStore server: chunks in its memory, over TCP or RDMA."""

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

from kvtier.arena import Arena
from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    SupportsCheck,
    SupportsPrefix,
    SupportsRegistration,
)
from kvtier.backends.infinistore.drain import Drain
from kvtier.backends.infinistore.protocol import LONGEST_VALUE, InfiniStoreConnection
from kvtier.backends.infinistore.rdma import InfiniStoreRDMA
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.backends.logs import RareWarning
from kvtier.errors import TierError
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.sockets.connection import Deadline
from kvtier.sockets.lanes import Dialer, Lane
from kvtier.threads import spread

logger = logging.getLogger("kvtier")

NAMES_A_REQUEST = 10_000
NONCE_BYTES = 16
MOST_ORPHANS = 10_000
ORPHANS_AT_ONCE = 16
"""As many are removed before a chunk is written."""
LAST_SECONDS = 5.0
"""How long :meth:`InfiniStoreBackend.close` waits at most."""
ROOM_SECONDS = 0.1
"""How long a server may take to refuse a value. Nothing but the name of the failure depends on it."""

_POINTER = struct.Struct(f"<{NONCE_BYTES}sQ")

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


class Pointer(NamedTuple):
    """What is stored under a chunk's own name: where the chunk is, and how long it is."""

    nonce: bytes
    length: int

    def name(self, base: bytes) -> bytes:
        """The name of the value."""
        return base + b":" + self.nonce

    def pack(self) -> bytes:
        """As it is stored."""
        return _POINTER.pack(*self)


class InfiniStoreBackend(Backend, SupportsRegistration, SupportsPrefix, SupportsCheck):
    """Chunks as values of an InfiniStore, each under a name of its own that a small pointer tells.

    The server (0.2.35) shows a value that is still being written, and ends itself where somebody asks for
    one. So nobody learns a value's name before it is whole: under the chunk's name is a *pointer* of a few
    bytes, written last and in one piece. So readers on all hosts get one writer's whole value or none, and a
    chunk of another length is told before it is fetched. It costs one more round trip a chunk.

    Over TCP, bytes move in worker threads between socket and caller's memory, over ``connections``, each with
    another one for the pointers; over RDMA the server fetches and delivers them itself. Connects when first
    asked, and again whenever the connection is lost. A batch lasts ``deadline`` at most, over RDMA that long
    for each length of chunk. What the server sends after that is read and thrown away
    (:mod:`~kvtier.backends.infinistore.drain`); against a host that dies amid a value the server has no help.
    """

    settings_type: ClassVar[type[TierSettings]] = InfiniStoreSettings

    def __init__(self, settings: InfiniStoreSettings) -> None:
        self._settings = settings
        self._drain = Drain()
        self._dialer = Dialer(
            settings.host, settings.port, lambda family: InfiniStoreConnection(family, self._drain)
        )
        self._values = Lane(settings.connections, self._dialer.connect)
        self._pointers = Lane(settings.connections, self._dialer.connect)
        self._questions = Lane(1, self._dialer.connect)
        self._rdma = InfiniStoreRDMA(settings) if settings.connection == "rdma" else None
        self._orphans: deque[bytes] = deque(maxlen=MOST_ORPHANS)
        """Values that were given up while they were written: the server never evicts these by itself."""
        self._warn = RareWarning(logger)

    async def open(self) -> None:
        """Load what is needed to connect. Raises :class:`TierError`; a server that is down is no reason."""
        if self._rdma is not None:
            try:
                await anyio.to_thread.run_sync(self._rdma.load)
            except TierError as error:
                raise TierError(f"tier {self._settings.name!r}: {error}") from error

    async def close(self) -> None:
        """Close every connection. Waits some seconds for what the server is still sending."""
        for lane in (self._values, self._pointers, self._questions):
            lane.close()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._drain.close, LAST_SECONDS)
        if self._rdma is not None:
            await self._rdma.close()

    async def register(self, arena: Arena) -> None:
        """Have RDMA move what lies in the arena. TCP does so with any memory, and does the rest."""
        if self._rdma is not None:
            self._rdma.register(arena)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held. Raises ``OSError`` where it cannot be asked."""
        names = [self._name(key) for key in keys]
        answers = await self._ask(lambda connection, part: list(connection.exist(part)), _slices(names))
        return [held for part in answers for held in part]

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading keys are held. Raises ``OSError`` where it cannot be asked.

        The server's own binary search says the most that it can be, in one round trip. Where it is full, it
        evicts the first chunk of a prompt before the others; so those are asked for up to the first miss.
        """
        names = [self._name(key) for key in keys]
        return sum(await self._ask(_held_prefix, [names] if names else []))

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store each view. ``FULL`` where the server has no room, even after it has evicted others."""
        if self._rdma is not None and self._rdma.reaches(view for _, view in items):
            return await self._put_by_rdma(self._rdma, items)
        return await self._carry(self._put_one, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view."""
        if self._rdma is not None and self._rdma.reaches(view for _, view in items):
            return await self._get_by_rdma(self._rdma, items)
        return await self._carry(self._get_one, items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key. Raises ``OSError`` where the server cannot be asked."""
        await self._ask(self._delete, [list(keys)] if keys else [])

    async def check(self) -> str:
        """Ask the server for something. See :class:`~kvtier.backends.base.SupportsCheck`."""
        settings = self._settings
        try:
            await self.contains([ChunkKey(secrets.token_bytes(32))])
            if self._rdma is not None:
                await self._rdma.read([])
        except OSError as error:
            raise TierError(
                f"{settings.host}:{settings.port} does not answer as an InfiniStore ({_in_words(error)}): "
                "see `url`, which names the service port, and whether the server runs"
            ) from error
        except Exception as error:
            raise TierError(
                f"no RDMA connection to {settings.host} ({error}): see `device`, `link_type` and "
                "`gid_index`, or write connection: tcp"
            ) from error
        return f"InfiniStore at {settings.host}:{settings.port} over {settings.connection}"

    # TCP: in worker threads.

    async def _carry(
        self, carry_one: Callable[[Deadline, ItemT], Outcome], items: Sequence[ItemT]
    ) -> Sequence[Outcome]:
        deadline = Deadline(self._settings.deadline)
        try:
            await self._dialer.find(deadline)
        except OSError as error:
            return [self._failed(error)] * len(items)
        return await spread(
            partial(carry_one, deadline),
            items,
            parts=self._values.size,
            hop=self._values.pump.hop,
        )

    def _put_one(self, deadline: Deadline, item: PutItem) -> Outcome:
        key, view = item
        if len(view) > LONGEST_VALUE:
            self._warn("%s: a chunk of %d bytes is too long for InfiniStore", self._settings.name, len(view))
            return Outcome.FAILED
        base, pointer = self._name(key), _new_pointer(len(view))
        name = pointer.name(base)
        try:
            with self._pair(deadline) as (pointers, values):
                self._bury_orphans(pointers)
                former = read_pointer(pointers, base)
                try:
                    values.put(name, view)
                except OSError:
                    self._orphans.append(name)
                    raise
                _point(pointers, base, pointer, former)
        except OSError as error:
            if isinstance(error, ConnectionError) and self._lacks_room(len(view)):
                self._warn("%s: no room: start the server with more --prealloc-size", self._settings.name)
                return Outcome.FULL
            return self._failed(error)
        return Outcome.OK

    def _lacks_room(self, length: int) -> bool:
        """Whether that is why the server hung up on a value: it does not read on to the end of one."""
        name = _new_pointer(length).name(b"kvtier-room")
        with suppress(OSError), self._pointers.borrow(Deadline(ROOM_SECONDS)) as connection:
            connection.in_step = False
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
                # It was evicted before its pointer.
                if read_pointer(pointers, base) == pointer:
                    pointers.delete([base])
                return Outcome.MISS
        except OSError as error:
            return self._failed(error)

    @contextmanager
    def _pair(self, deadline: Deadline) -> Iterator[tuple[InfiniStoreConnection, InfiniStoreConnection]]:
        """One connection for pointers and one for values. Ask the first for something, then use the second.

        The last piece of a value may have come before the server notes that it is through. What comes over
        that connection then, it takes for the same request again, and sends without end. It has noted it
        when it has answered what was asked over another connection after the value.
        """
        with self._values.borrow(deadline) as values, self._pointers.borrow(deadline) as pointers:
            yield pointers, values

    def _delete(self, connection: InfiniStoreConnection, keys: Sequence[ChunkKey]) -> None:
        bases = [self._name(key) for key in keys]
        pointers = [(base, read_pointer(connection, base)) for base in bases]
        values = [pointer.name(base) for base, pointer in pointers if pointer is not None]
        for part in _slices([*bases, *values]):
            connection.delete(part)

    def _bury_orphans(self, connection: InfiniStoreConnection) -> None:
        """Remove some of what was given up before, each written to its end first."""
        for _ in range(ORPHANS_AT_ONCE):
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

    # RDMA: bytes by the library, pointers over TCP.

    async def _put_by_rdma(self, rdma: InfiniStoreRDMA, items: Sequence[PutItem]) -> Sequence[Outcome]:
        pointers = [_new_pointer(len(view)) for _, view in items]
        named = [
            (pointer.name(self._name(key)).decode(), view)
            for (key, view), pointer in zip(items, pointers, strict=True)
        ]
        try:
            outcomes = await rdma.write(named)
            stored = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.OK]

            def point(connection: InfiniStoreConnection, index: int) -> None:
                base = self._name(items[index][0])
                _point(connection, base, pointers[index], read_pointer(connection, base))

            await self._ask(point, stored)
        except Exception as error:
            return [self._failed(error)] * len(items)
        return outcomes

    async def _get_by_rdma(self, rdma: InfiniStoreRDMA, items: Sequence[GetItem]) -> Sequence[Outcome]:
        outcomes = [Outcome.MISS] * len(items)
        try:
            bases = [self._name(key) for key, _ in items]
            pointers = await self._ask(read_pointer, bases)
            there = [
                index
                for index, pointer in enumerate(pointers)
                if pointer is not None and pointer.length == len(items[index][1])
            ]
            named = [
                (pointer.name(bases[index]).decode(), items[index][1])
                for index in there
                if (pointer := pointers[index]) is not None
            ]
            for index, outcome in zip(there, await rdma.read(named), strict=True):
                outcomes[index] = outcome
        except Exception as error:
            return [self._failed(error)] * len(items)
        return outcomes

    # Connections.

    async def _ask(
        self, ask: Callable[[InfiniStoreConnection, ItemT], AnswerT], questions: Sequence[ItemT]
    ) -> list[AnswerT]:
        """Ask over the connection that is kept for questions. Raises ``OSError``."""
        if not questions:
            return []
        deadline = Deadline(self._settings.deadline)
        await self._dialer.find(deadline)

        def ask_all(all_questions: Sequence[ItemT]) -> list[AnswerT]:
            with self._questions.borrow(deadline) as connection:
                return [ask(connection, question) for question in all_questions]

        (answers,) = await spread(ask_all, [questions], parts=1, hop=self._questions.pump.hop)
        return answers

    def _name(self, key: ChunkKey) -> bytes:
        return (self._settings.prefix + key.hex()).encode()

    def _failed(self, error: Exception) -> Outcome:
        settings = self._settings
        self._warn("%s: %s:%d: %s", settings.name, settings.host, settings.port, _in_words(error))
        return Outcome.FAILED


def read_pointer(connection: InfiniStoreConnection, base: bytes) -> Pointer | None:
    """What is stored under a chunk's own name, if it is held, and a pointer."""
    found = memoryview(bytearray(_POINTER.size))
    if not connection.get(base, found):
        return None
    pointer = Pointer(*_POINTER.unpack(found))
    return pointer if pointer.nonce.isalnum() else None


def _point(connection: InfiniStoreConnection, base: bytes, pointer: Pointer, former: Pointer | None) -> None:
    """Make a new value the chunk, and remove the one that was.

    A pointer that is written over another would be evicted with that one, which stays in the server's queue.
    """
    if former is not None:
        connection.delete([base, former.name(base)])
    connection.put(base, pointer.pack())


def _new_pointer(length: int) -> Pointer:
    return Pointer(secrets.token_hex(NONCE_BYTES // 2).encode(), length)


def _held_prefix(connection: InfiniStoreConnection, names: Sequence[bytes]) -> int:
    held = 0
    for part in _slices(names):
        there = sum(takewhile(bool, connection.exist(part[: connection.matched(part)])))
        held += there
        if there < len(part):
            break
    return held


def _slices(names: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [names[start : start + NAMES_A_REQUEST] for start in range(0, len(names), NAMES_A_REQUEST)]


def _in_words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
