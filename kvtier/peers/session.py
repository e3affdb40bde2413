"""The serving end of one control connection: what a peer asks, and what it was promised.

Questions are answered in order, but for ``Await``, which is a task of its own. Everything that was promised
over a connection ends with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.memory.slices import Lease
from kvtier.peers.grants import Grant, GrantBook
from kvtier.peers.holdings import PART_BYTES, PART_CHUNKS, Holdings
from kvtier.peers.protocol import (
    NO_GRANT,
    Announce,
    Announced,
    Await,
    Commit,
    Committed,
    Contained,
    Contains,
    FromClient,
    Granted,
    Hello,
    Lookup,
    Ping,
    Pong,
    Readable,
    Release,
    Released,
    Reserve,
    Stage,
    Withdraw,
    Withdrawn,
    decode_from_client,
)
from kvtier.peers.reservations import Reservations
from kvtier.pipeline.found import FoundChunk
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import FrameReader, Message, encode

IDLE_TIMEOUT_SECONDS = 60.0
"""A peer that says nothing for so long, or takes nothing in, is gone. Clients ping far sooner."""
MAX_AWAITS = 256
"""That may be unanswered on one connection; what goes beyond is told that it is not readable."""
MAX_COMMITS = 64
"""That may be unanswered on one connection. Nothing else is asked before one of them is answered."""
MAX_GRANTS = 16_384
"""That one connection may have; beyond, nothing more is granted."""


class Session:
    """Answers one peer. ``counts`` is told what was asked.

    ``cut_off`` makes sure that the peer writes no longer what it was granted, where the transport needs that.
    """

    def __init__(
        self,
        channel: Channel,
        holdings: Holdings,
        grants: GrantBook,
        reservations: Reservations,
        counts: Counter[str],
        cut_off: Callable[[], Awaitable[None]],
    ) -> None:
        self._channel = channel
        self._holdings = holdings
        self._grants = grants
        self._reservations = reservations
        self._cut_off = cut_off
        self._commits = anyio.Semaphore(MAX_COMMITS)
        self._counts = counts
        self._awaits = 0
        self._arrivals: dict[int, Arrival] = {}
        self._tasks: TaskGroup
        self._lost: str | None = None

    async def serve(self) -> None:
        """Answer until the peer leaves. Raises ``ChannelClosed``; ``ProtocolError`` for what may not be."""
        try:
            async with anyio.create_task_group() as self._tasks:
                with CancelScope() as scope:
                    self._scope = scope
                    try:
                        await self._converse()
                    except (ChannelClosed, ProtocolError) as error:
                        failure: ChannelClosed | ProtocolError = error
                    else:
                        failure = ChannelClosed("the other side has closed")
                if scope.cancelled_caught:
                    failure = ChannelClosed(self._lost or "the other side is gone")
                self._tasks.cancel_scope.cancel()
        finally:
            self._reservations.end(self)
            if self._grants.may_still_write(self):
                with CancelScope(shield=True):
                    await self._cut_off()
            self._grants.end(self)
            with CancelScope(shield=True):
                await self._reservations.cut_off(self)
        raise failure

    async def _converse(self) -> None:
        reader = FrameReader()
        while True:
            with anyio.move_on_after(IDLE_TIMEOUT_SECONDS) as timeout:
                data = await self._channel.receive()
            if timeout.cancelled_caught:
                raise ChannelClosed(f"the other side has said nothing for {IDLE_TIMEOUT_SECONDS:g} s")
            for body in reader.feed(data):
                # One message after another may have come at once, and nobody else would get a turn.
                await anyio.lowlevel.checkpoint()
                await self._respond(decode_from_client(body))

    async def _respond(self, message: FromClient) -> None:
        self._counts[type(message).__name__] += 1
        match message:
            case Lookup():
                await self._look_up(message)
            case Await():
                await self._accept_await(message)
            case Release():
                self._check_numbers(message.grant, message.chunks)
                self._reservations.release(self, message.grant, message.chunks)
                stood = self._grants.release(self, message.grant, message.chunks)
                await self._say(Released(message.ticket, stood))
            case Contains():
                held = await self._holdings.held(_split(message.keys))
                await self._say(Contained(message.ticket, held))
            case Announce():
                await self._say(Announced(message.ticket, self._reservations.announce(self, message)))
            case Withdraw():
                self._reservations.withdraw(self, message.number)
                await self._say(Withdrawn(message.ticket))
            case Reserve():
                if self._grants.count(self) >= MAX_GRANTS:
                    raise ProtocolError(f"it has {MAX_GRANTS} grants, which is the limit, and wants more")
                await self._say(self._reservations.reserve(self, message))
            case Commit():
                self._check_numbers(message.grant, message.chunks)
                self._reservations.check(message)
                await self._commits.acquire()
                self._tasks.start_soon(self._commit, message)
            case Stage():
                await self._say(self._reservations.stage(message))
            case Ping():
                await self._say(Pong(message.ticket))
            case Hello():
                raise ProtocolError("it says Hello twice")

    async def _commit(self, question: Commit) -> None:
        try:
            whole = await self._reservations.commit(self, question)
            await self._say(Committed(question.ticket, whole))
        except ChannelClosed as error:
            self._lost = str(error)
            self._scope.cancel()
        finally:
            self._commits.release()

    async def _look_up(self, question: Lookup) -> None:
        keys = _split(question.keys)
        if self._grants.count(self) >= MAX_GRANTS:
            keys = []
        positions, chunks = await self._holdings.find(
            keys, prefix=question.prefix, max_bytes=self._grants.limit
        )
        grant = self._grants.grant(self, [chunk.lease for chunk in chunks])
        count = 0 if grant is None else len(grant.leases)
        for chunk in chunks[count:]:
            chunk.lease.release()
        if grant is None:
            await self._say(Granted(question.ticket, NO_GRANT, [], [], [], 0))
            return
        del chunks[count:], positions[count:]
        late = self._holdings.late(chunks)
        offsets = [chunk.lease.offset for chunk in chunks]
        lengths = [chunk.lease.length for chunk in chunks]
        if late:
            self._expect(grant, {index: chunks[index] for index in late})
        ready = late[0] if late else count
        await self._say(Granted(question.ticket, grant.number, positions, offsets, lengths, ready))

    def _expect(self, grant: Grant, late: dict[int, FoundChunk]) -> None:
        arrival = self._arrivals[grant.number] = Arrival(self._holdings, grant, late)

        def end() -> None:
            self._arrivals.pop(grant.number, None)
            arrival.end()

        grant.on_end = end
        self._tasks.start_soon(arrival.run)

    async def _accept_await(self, question: Await) -> None:
        self._check_numbers(question.grant, question.chunks)
        if self._awaits >= MAX_AWAITS:
            await self._say(Readable(question.ticket, [False] * len(question.chunks)))
            return
        self._awaits += 1
        self._tasks.start_soon(self._answer_await, question)

    async def _answer_await(self, question: Await) -> None:
        try:
            arrival = self._arrivals.get(question.grant)
            if arrival is not None:
                await arrival.wait(question.chunks)
            grant = self._grants.find(self, question.grant)
            readable = [grant is not None and _is_readable(grant, index) for index in question.chunks]
            await self._say(Readable(question.ticket, readable))
        except (ChannelClosed, ProtocolError) as error:
            self._lost = str(error)
            self._scope.cancel()
        finally:
            self._awaits -= 1

    def _check_numbers(self, number: int, chunks: Sequence[int]) -> None:
        grant = self._grants.find(self, number)
        if grant is not None and len(chunks) > len(grant.leases):
            raise ProtocolError("it names more chunks than it was granted")

    async def _say(self, message: Message) -> None:
        """Raises :class:`ChannelClosed` where it is not taken in."""
        with anyio.move_on_after(IDLE_TIMEOUT_SECONDS) as timeout:
            await self._channel.send(encode(message))
        if timeout.cancelled_caught:
            raise ChannelClosed(f"the other side has taken nothing in for {IDLE_TIMEOUT_SECONDS:g} s")


class Arrival:
    """Those chunks of a grant that could not be read when it was given, until they can be."""

    def __init__(self, holdings: Holdings, grant: Grant, late: dict[int, FoundChunk]) -> None:
        self._holdings = holdings
        self._grant = grant
        self._late = late
        """Neither readable yet nor given up. Emptied as they come."""
        self._progress = anyio.Event()
        self._scope = CancelScope()
        grant.unready.update(late)

    async def run(self) -> None:
        """Until all have come, or the grant is over."""
        with self._scope:
            # What only wants a checksum waits for nothing that is still on its way.
            await self._seal([index for index, chunk in self._late.items() if chunk.arrived])
            while self._late:
                first = next(iter(self._late.values()))
                if first.flight is not None:
                    await first.flight.done.wait()
                landed = [
                    index
                    for index, chunk in self._late.items()
                    if chunk.flight is None or chunk.flight.done.is_set()
                ]
                await self._seal(landed)

    async def wait(self, chunks: Sequence[int]) -> None:
        """Until each of these has come, is given up, or is granted no longer."""
        waiting = self._late.keys() & set(chunks)
        while waiting:
            await self._progress.wait()
            waiting &= self._late.keys()

    def end(self) -> None:
        """The grant is over. Nobody need wait."""
        self._late.clear()
        self._scope.cancel()
        self._tell()

    async def _seal(self, indexes: Sequence[int]) -> None:
        for part in self._parts(indexes):
            # Some may have been given back meanwhile, and their memory may be another's.
            chunks = {
                index: (self._late[index].key, lease)
                for index in part
                if index in self._late and (lease := self._grant.leases[index]) is not None
            }
            arrived = [index for index in chunks if self._late[index].arrived]
            whole = await self._holdings.seal([chunks[index] for index in arrived])
            self._grant.unready.difference_update(
                index for index, good in zip(arrived, whole, strict=True) if good
            )
            for index in part:
                self._late.pop(index, None)
            self._tell()

    def _parts(self, indexes: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        length = 0
        for index in indexes:
            if not parts or (length >= PART_BYTES and len(parts[-1]) >= PART_CHUNKS):
                parts.append([])
                length = 0
            parts[-1].append(index)
            length += self._late[index].lease.length
        return parts

    def _tell(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()


def _is_readable(grant: Grant, index: int) -> bool:
    if not 0 <= index < len(grant.leases) or index in grant.unready:
        return False
    lease: Lease | None = grant.leases[index]
    return lease is not None


def _split(keys: bytes) -> list[ChunkKey]:
    try:
        return split_keys(keys)
    except ValueError as error:
        raise ProtocolError(f"it asks for what are no keys: {error}") from error
