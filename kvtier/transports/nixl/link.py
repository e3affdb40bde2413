"""Reads and writes of one peer's arena with NIXL, and the endpoint that the peer has sent for them."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import PeerError
from kvtier.logs import RateLimitedLog
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.rows import copy_all
from kvtier.memory.slices import Lease
from kvtier.transports.base import Dial, Link, ReadItem, RemoteSpan, WriteItem
from kvtier.transports.nixl.process import NixlProcess, Part
from kvtier.transports.nixl.protocol import DONE

logger = logging.getLogger("kvtier")

ENDPOINT_VERSION = 1
ARENA_BYTES = 16
MAX_METADATA_BYTES = 1 << 20
TRANSFER_BYTES = 64 << 20
"""Maximum size of one transfer. A cancelled call still waits for its running transfers."""
TRANSFER_PARTS = 1024
ATTEMPTS = 3
"""Maximum number of attempts of a call, each over a new connection."""
PAUSE_SECONDS = 0.3
"""Back-off before the second attempt if the peer has no agent; doubled for each further one."""

_MAGIC = "kvtier-nixl"
_MAX_NAME_CHARACTERS = 64
_MAX_ADDRESS = 1 << 63
_LENGTH = struct.Struct("<I")
_MAX_ENDPOINT_BYTES = MAX_METADATA_BYTES + 4096


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """A host's NIXL agent, and the address of its arena in that agent's process."""

    magic: str
    version: int
    arena: bytes
    """A random id of the arena, so that grants of a former arena are not used for this one."""
    name: str
    address: int
    length: int
    metadata: bytes

    @classmethod
    def of(cls, arena: bytes, serving: NixlProcess) -> Endpoint:
        """Return the endpoint of an arena that a NIXL process has registered."""
        opened, length = serving.opened, serving.capacity
        return cls(_MAGIC, ENDPOINT_VERSION, arena, serving.name, opened.address, length, opened.metadata)

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Decode and validate another host's endpoint. Raises :class:`PeerError` if it is invalid."""
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise PeerError(f"the peer's endpoint is not one of the `nixl` transport: {error}") from error
        if (endpoint.magic, endpoint.version) != (_MAGIC, ENDPOINT_VERSION):
            raise PeerError(
                "the peer's `nixl` transport has another version: install the same kvtier on both sides"
            )
        if not (
            len(endpoint.arena) == ARENA_BYTES
            and endpoint.name.isascii()
            and 0 < len(endpoint.name) <= _MAX_NAME_CHARACTERS
            and endpoint.address > 0
            and endpoint.length > 0
            and endpoint.address + endpoint.length <= _MAX_ADDRESS
            and 0 < len(endpoint.metadata) <= MAX_METADATA_BYTES
        ):
            raise PeerError("the peer's endpoint has an invalid name, metadata or memory range")
        return endpoint


class _Piece(NamedTuple):
    """A part of an item, with the item's index."""

    item: int
    part: Part


class NixlLink(Link):
    """A link to a peer's arena with its own NIXL process, which is restarted when it exits.

    Views outside this host's arena are staged in it, and are ``FAILED`` if it is full.
    """

    def __init__(
        self,
        arena: Arena,
        deadline: float,
        executor: WorkerThreads,
        start: Callable[[], Awaitable[NixlProcess]],
        endpoint: Endpoint,
        dial: Dial,
    ) -> None:
        self._arena = arena
        self._base = address_of(arena.view(0, 1))
        self._deadline = deadline
        self._executor = executor
        self._requests = WorkerThreads(1)
        """Waits until the peer has an agent. ``executor`` starts that of this host, so it must not wait."""
        self._start = start
        self._endpoint = endpoint
        self._dial = dial
        self._nixl_process: NixlProcess | None = None
        self._lost: NixlProcess | None = None
        """The previous process, after a failure."""
        self._connecting: asyncio.Task[NixlProcess] | None = None
        self._is_replaced = False
        """Whether another instance has replaced the peer: this link is useless."""
        self._warn = RateLimitedLog(logger)

    async def connect(self) -> None:
        """Connect for the first time. Raises :class:`PeerError`."""
        try:
            await self._connected_process()
        except PeerError as error:
            # The endpoint may be that of an agent that has exited; the second attempt requests a new one.
            try:
                await self._connected_process()
            except OSError:
                raise error from None

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :class:`~kvtier.transports.base.Link`."""
        return await self._transfer([(view, span) for span, view in items], write=False)

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :class:`~kvtier.transports.base.Link`."""
        return await self._transfer(items, write=True)

    async def close(self) -> None:
        """Kill the process, which also ends its memory registration."""
        with anyio.CancelScope(shield=True):
            if self._connecting is not None:
                self._connecting.cancel()
                with suppress(asyncio.CancelledError, PeerError, OSError):
                    await self._connecting
            for nixl_process in (self._nixl_process, self._lost):
                if nixl_process is not None:
                    await nixl_process.end()
            self._nixl_process = self._lost = None
        self._requests.close()

    async def _transfer(self, items: Sequence[WriteItem], *, write: bool) -> list[Outcome]:
        outcomes = [Outcome.MISS] * len(items)
        staged: dict[int, Lease] = {}
        pieces: list[_Piece] = []
        try:
            for index, (view, span) in enumerate(items):
                if self._is_inside(span):
                    outcomes[index] = Outcome.FAILED
                    if (offset := self._offset_for(view, index, staged)) is not None:
                        pieces += _pieces(index, offset, span)
            if write:
                await self._copy([(staged[index].view, items[index][0]) for index in staged])
            with anyio.move_on_after(self._deadline):
                failed = {piece.item for piece in await self._transfer_pieces(pieces, write=write)}
                for index in {piece.item for piece in pieces} - failed:
                    outcomes[index] = Outcome.OK
            if not write:
                arrived = [index for index in staged if outcomes[index] is Outcome.OK]
                await self._copy([(items[index][0], staged[index].view) for index in arrived])
        finally:
            for lease in staged.values():
                lease.release()
        return outcomes

    def _is_inside(self, span: RemoteSpan) -> bool:
        """Return whether a span is within the peer's arena."""
        return span.offset >= 0 and span.length >= 0 and span.offset + span.length <= self._endpoint.length

    def _offset_for(self, view: memoryview, index: int, staged: dict[int, Lease]) -> int | None:
        """Return the arena offset of a view, or of the staging memory allocated for it."""
        if not view.nbytes:
            return 0
        offset = self._offset_of(view)
        if offset is None and (lease := self._arena.allocate(view.nbytes)) is not None:
            staged[index] = lease
            offset = lease.offset
        return offset

    def _offset_of(self, view: memoryview) -> int | None:
        """Return the arena offset of a view; ``None`` if it is not in the arena."""
        if view.readonly or not view.c_contiguous:
            return None
        offset = address_of(view) - self._base
        return offset if 0 <= offset <= self._arena.capacity - view.nbytes else None

    async def _copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        if copies:
            await in_thread(partial(copy_all, copies), self._executor)

    async def _transfer_pieces(self, pieces: list[_Piece], *, write: bool) -> list[_Piece]:
        """Transfer pieces, with retries after a connection loss. Return those that failed."""
        for attempt in range(ATTEMPTS):
            if not pieces:
                break
            try:
                nixl_process = await self._connected_process()
            except (PeerError, OSError) as error:
                if isinstance(error, PeerError) and not self._is_replaced and attempt + 1 < ATTEMPTS:
                    # The peer's agent may have just exited, and is being restarted.
                    await anyio.sleep(PAUSE_SECONDS * 2**attempt)
                    continue
                self._warn("nixl transport: cannot connect to a peer: %s", error)
                break
            transfers = _transfers(pieces)
            batch = nixl_process.transfer(
                self._endpoint.name,
                [[piece.part for piece in transfer] for transfer in transfers],
                write=write,
            )
            await nixl_process.until_ended(batch)
            pieces = [
                piece
                for transfer, result in zip(transfers, batch.results, strict=True)
                if result != DONE
                for piece in transfer
            ]
            if pieces and self._nixl_process is nixl_process:
                self._nixl_process, self._lost = None, nixl_process
        return pieces

    async def _connected_process(self) -> NixlProcess:
        """Return the NIXL process, connected to the peer. Concurrent callers share one connection attempt.

        Raises :class:`PeerError` or ``OSError``.
        """
        if self._nixl_process is not None and not self._nixl_process.exited.is_set():
            return self._nixl_process
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._note_connected)
        # Cancelling one caller must not end the attempt that the others wait for.
        return await asyncio.shield(self._connecting)

    def _note_connected(self, connecting: asyncio.Task[NixlProcess]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # Mark as retrieved: all waiting callers may have been cancelled.

    async def _connect(self) -> NixlProcess:
        if (lost := self._lost or self._nixl_process) is not None:
            await lost.end()
            self._lost = self._nixl_process = None
            # The peer's agent may have exited and been replaced.
            self._endpoint = await self._request_endpoint()
        nixl_process = await self._start()
        try:
            await nixl_process.add_peer(self._endpoint.name, self._endpoint.address, self._endpoint.metadata)
        except BaseException:
            await nixl_process.end()
            self._lost = nixl_process
            raise
        self._nixl_process = nixl_process
        return nixl_process

    async def _request_endpoint(self) -> Endpoint:
        deadline = Deadline(self._deadline)

        def request() -> bytes:
            with closing(self._dial(deadline)) as connection, deadline.bounds(connection):
                (length,) = _LENGTH.unpack(connection.read(_LENGTH.size))
                if length > _MAX_ENDPOINT_BYTES:
                    raise PeerError(f"the peer's endpoint is too long: {length} bytes")
                return connection.read(length)

        endpoint = Endpoint.decode(await in_thread(request, self._requests, deadline.expire))
        if (endpoint.arena, endpoint.length) != (self._endpoint.arena, self._endpoint.length):
            self._is_replaced = True
            raise PeerError("the peer was restarted, and its grants are invalid")
        return endpoint


def encode_endpoint(endpoint: bytes) -> bytes:
    """Return the message with the current endpoint, for a link that has lost its peer's agent."""
    return _LENGTH.pack(len(endpoint)) + endpoint


def _pieces(item: int, local: int, span: RemoteSpan) -> list[_Piece]:
    """Split a span into pieces of at most ``TRANSFER_BYTES``. An empty span has one empty piece."""
    return [
        _Piece(item, Part(local + at, span.offset + at, min(TRANSFER_BYTES, span.length - at)))
        for at in range(0, max(span.length, 1), TRANSFER_BYTES)
    ]


def _transfers(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Group pieces, in order, into transfers within the limits."""
    transfers: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        # NIXL does not support empty parts.
        if not piece.part.length:
            continue
        if not transfers or piece.part.length > room or len(transfers[-1]) == TRANSFER_PARTS:
            transfers.append([])
            room = TRANSFER_BYTES
        transfers[-1].append(piece)
        room -= piece.part.length
    return transfers
