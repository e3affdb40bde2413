"""A way to one peer's arena over NIXL."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio

from kvtier.arena import Arena, address_of
from kvtier.backends.base import Outcome
from kvtier.backends.logs import RareWarning
from kvtier.errors import PeerError
from kvtier.slices import Lease
from kvtier.sockets.connection import Deadline
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Dial, Link, ReadItem, RemoteSpan, WriteItem
from kvtier.transports.nixl.carrier import DONE
from kvtier.transports.nixl.endpoint import MAX_METADATA_BYTES, Endpoint
from kvtier.transports.nixl.process import CarrierProcess, Part, in_thread

logger = logging.getLogger("kvtier")

TRANSFER_BYTES = 64 << 20
"""The most that one transfer moves. What is cancelled still waits for the transfers that have begun."""
TRANSFER_PARTS = 1024
ATTEMPTS = 3
"""So often a call tries to move its bytes, each time over a connection made anew."""
PAUSE_SECONDS = 0.3
"""Before the second attempt, and twice as long before each further one, where the peer has no agent."""

_LENGTH = struct.Struct("<I")
_MAX_ENDPOINT_BYTES = MAX_METADATA_BYTES + 4096


class _Piece(NamedTuple):
    """A part of an item, by the item's number."""

    item: int
    part: Part


class NixlLink(Link):
    """Reads and writes a peer's arena from a process of its own, which is started anew where it is lost.

    Views outside this host's arena are copied by way of it, and ``FAILED`` where it has no room.
    """

    def __init__(
        self,
        arena: Arena,
        deadline: float,
        hop: WorkerThreads,
        start: Callable[[], Awaitable[CarrierProcess]],
        endpoint: Endpoint,
        dial: Dial,
    ) -> None:
        self._arena = arena
        self._base = address_of(arena.view(0, 1))
        self._deadline = deadline
        self._hop = hop
        self._start = start
        self._endpoint = endpoint
        self._dial = dial
        self._carrier: CarrierProcess | None = None
        self._lost: CarrierProcess | None = None
        """The last one, where it was of no use any longer."""
        self._connecting: asyncio.Task[CarrierProcess] | None = None
        self._is_replaced = False
        """Whether another instance answers where the peer was: nothing comes of this link any longer."""
        self._warn = RareWarning(logger)

    async def connect(self) -> None:
        """Make the first connection. Raises :class:`PeerError`."""
        try:
            await self._reach_peer()
        except PeerError as error:
            # The endpoint may be that of an agent which has ended since; the second time it is asked for.
            try:
                await self._reach_peer()
            except OSError:
                raise error from None

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """See :class:`~kvtier.transports.base.Link`."""
        return await self._move([(view, span) for span, view in items], write=False)

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """See :class:`~kvtier.transports.base.Link`."""
        return await self._move(items, write=True)

    async def close(self) -> None:
        """End the process. What was registered for this link ends with it."""
        with anyio.CancelScope(shield=True):
            if self._connecting is not None:
                self._connecting.cancel()
                with suppress(asyncio.CancelledError, PeerError, OSError):
                    await self._connecting
            for carrier in (self._carrier, self._lost):
                if carrier is not None:
                    await carrier.end()
            self._carrier = self._lost = None

    async def _move(self, items: Sequence[WriteItem], *, write: bool) -> list[Outcome]:
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
                unmoved = {piece.item for piece in await self._carry_all(pieces, write=write)}
                for index in {piece.item for piece in pieces} - unmoved:
                    outcomes[index] = Outcome.OK
            if not write:
                arrived = [index for index in staged if outcomes[index] is Outcome.OK]
                await self._copy([(items[index][0], staged[index].view) for index in arrived])
        finally:
            for lease in staged.values():
                lease.release()
        return outcomes

    def _is_inside(self, span: RemoteSpan) -> bool:
        """Whether it lies in the peer's arena."""
        return span.offset >= 0 and span.length >= 0 and span.offset + span.length <= self._endpoint.length

    def _offset_for(self, view: memoryview, index: int, staged: dict[int, Lease]) -> int | None:
        """Where in this host's arena the view's bytes are, or are to be until they are copied."""
        if not view.nbytes:
            return 0
        offset = self._offset_of(view)
        if offset is None and (lease := self._arena.allocate(view.nbytes)) is not None:
            staged[index] = lease
            offset = lease.offset
        return offset

    def _offset_of(self, view: memoryview) -> int | None:
        """Where the view begins in the arena; ``None`` for other memory."""
        if view.readonly or not view.c_contiguous:
            return None
        offset = address_of(view) - self._base
        return offset if 0 <= offset <= self._arena.capacity - view.nbytes else None

    async def _copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        if not copies:
            return

        def copy() -> None:
            for target, source in copies:
                target[:] = source

        await in_thread(self._hop, copy)

    async def _carry_all(self, pieces: list[_Piece], *, write: bool) -> list[_Piece]:
        """Move the pieces, again where a connection is lost; those that were not moved."""
        for attempt in range(ATTEMPTS):
            if not pieces:
                break
            try:
                carrier = await self._reach_peer()
            except (PeerError, OSError) as error:
                if isinstance(error, PeerError) and not self._is_replaced and attempt + 1 < ATTEMPTS:
                    # Its agent may have ended a moment ago: another one is on its way.
                    await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
                    continue
                self._warn("NIXL moves nothing from or to a peer: %s", error)
                break
            transfers = _transfers(pieces)
            batch = carrier.carry(
                self._endpoint.name,
                [[piece.part for piece in transfer] for transfer in transfers],
                write=write,
            )
            await carrier.until_ended(batch)
            pieces = [
                piece
                for transfer, result in zip(transfers, batch.results, strict=True)
                if result != DONE
                for piece in transfer
            ]
            if pieces and self._carrier is carrier:
                self._carrier, self._lost = None, carrier
        return pieces

    async def _reach_peer(self) -> CarrierProcess:
        """The carrier, made if need be, once for all who ask. Raises :class:`PeerError` or ``OSError``."""
        if self._carrier is not None and not self._carrier.gone.is_set():
            return self._carrier
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._note_connected)
        return await asyncio.shield(self._connecting)

    def _note_connected(self, connecting: asyncio.Task[CarrierProcess]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # Those who waited for it may all have been cancelled.

    async def _connect(self) -> CarrierProcess:
        if (lost := self._lost or self._carrier) is not None:
            await lost.end()
            self._lost = self._carrier = None
            # The peer's agent may have ended and another one may be there by now.
            self._endpoint = await self._ask_endpoint()
        carrier = await self._start()
        try:
            await carrier.reach(self._endpoint.name, self._endpoint.address, self._endpoint.metadata)
        except BaseException:
            await carrier.end()
            self._lost = carrier
            raise
        self._carrier = carrier
        return carrier

    async def _ask_endpoint(self) -> Endpoint:
        answers: list[bytes] = []
        deadline = Deadline(self._deadline)

        def ask() -> None:
            connection = self._dial(deadline)
            try:
                with deadline.bounds(connection):
                    head = bytearray(_LENGTH.size)
                    connection.take(memoryview(head))
                    (length,) = _LENGTH.unpack(head)
                    if length > _MAX_ENDPOINT_BYTES:
                        raise PeerError(f"an endpoint of {length} bytes is none")
                    body = bytearray(length)
                    connection.take(memoryview(body))
                    answers.append(bytes(body))
            finally:
                connection.close()

        await in_thread(self._hop, ask)
        endpoint = Endpoint.decode(answers[0])
        if (endpoint.arena, endpoint.length) != (self._endpoint.arena, self._endpoint.length):
            self._is_replaced = True
            raise PeerError("the peer was started anew, and what it had granted is gone")
        return endpoint


def encode_endpoint(endpoint: bytes) -> bytes:
    """What a link that has lost its peer's agent is told over a connection of its own."""
    return _LENGTH.pack(len(endpoint)) + endpoint


def _pieces(item: int, ours: int, span: RemoteSpan) -> list[_Piece]:
    """The span in so many pieces as it takes; one of no length where it has none."""
    return [
        _Piece(item, Part(ours + at, span.offset + at, min(TRANSFER_BYTES, span.length - at)))
        for at in range(0, max(span.length, 1), TRANSFER_BYTES)
    ]


def _transfers(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """The pieces, in their order, so many together as one transfer moves."""
    transfers: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        # NIXL knows no empty parts.
        if not piece.part.length:
            continue
        if not transfers or piece.part.length > room or len(transfers[-1]) == TRANSFER_PARTS:
            transfers.append([])
            room = TRANSFER_BYTES
        transfers[-1].append(piece)
        room -= piece.part.length
    return transfers
