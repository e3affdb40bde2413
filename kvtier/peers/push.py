"""Pushing chunks into the first tier of one connected peer: room there, the bytes, and its word for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum

import anyio

from kvtier.backends.base import Outcome
from kvtier.backends.sealer import Sealer
from kvtier.errors import PeerError, ProtocolError
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import ChunkKey, join_keys
from kvtier.peers.conversation import answer_of
from kvtier.peers.dialling import printable
from kvtier.peers.promises import Promise, usable_seconds
from kvtier.peers.protocol import (
    NO_GRANT,
    Announce,
    Announced,
    Commit,
    Committed,
    Reserve,
    Reserved,
    Withdraw,
    Withdrawn,
)
from kvtier.peers.source import BIGGEST_NUMBER, Source, expect_length
from kvtier.tier import ChunkBytes

ATTEMPTS = 2
"""How often a chunk is written whose first push came to nothing."""
FULL_SECONDS = 2.0
"""For so long room is asked for again where there is none."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.25
"""Between two such questions."""

Sealed = tuple[ChunkHeader, bytes]
"""A chunk's header, and the checksum of its payload."""


class Pushed(Enum):
    """What became of one chunk that was to be pushed."""

    OK = "ok"
    """It was written, verified there, and is served there."""
    HELD = "held"
    """The peer had it already."""
    FULL = "full"
    """The peer has no room for it."""
    FAILED = "failed"
    """It did not arrive whole, in time, or at all; or the peer takes nothing of this model."""
    ABSENT = "absent"
    """It was not in the first tier here when it was to be sent."""

    @property
    def there(self) -> bool:
        """Whether the peer has it."""
        return self in (Pushed.OK, Pushed.HELD)


class Room:
    """What a peer has said to one :class:`Reserve`, by the positions of the chunks."""

    def __init__(self, promises: Mapping[int, Promise], reserved: Reserved) -> None:
        self.promises = promises
        self.held = reserved.held
        self.coming = reserved.coming
        self.refusal = printable(reserved.refusal)


class Target:
    """One connected peer that chunks are pushed to. Everything raises :class:`kvtier.errors.ChannelError`
    where the connection ends, and may be cancelled at any time: then what was reserved goes back.
    """

    def __init__(self, source: Source, sealer: Sealer) -> None:
        """``sealer``: of the memory that is pushed from."""
        self.source = source
        self._sealer = sealer
        self.trouble = ""
        """Why it takes nothing, in its own words; empty where it does."""

    async def announce(self, number: int, keys: Sequence[ChunkKey]) -> bool:
        """Have its look-ups wait for these; whether they do."""
        joined = join_keys(keys)
        return await answer_of(
            self.source.conversation.ask(
                lambda ticket: Announce(ticket, number, joined), Announced, lambda said, _wanted: said.noted
            )
        )

    def withdraw(self, number: int) -> None:
        """Nothing more of an announcement will come; nobody waits for the answer. Raises nothing."""
        with suppress(PeerError):
            self.source.conversation.ask(
                lambda ticket: Withdraw(ticket, number), Withdrawn, lambda _said, _wanted: True
            )

    async def push(self, chunks: Sequence[ChunkBytes], seconds: float) -> list[Pushed]:
        """Push chunk objects of one model, whose leases stay the caller's; what became of each, in order.

        In ``seconds`` or not at all. At most :data:`~kvtier.peers.protocol.MOST_RESERVED` at once.
        """
        return await _Push(self, chunks).run(seconds)

    async def seal(self, chunks: Sequence[ChunkBytes]) -> list[Sealed | None]:
        """The headers and checksums; ``None`` for what is corrupt or empty."""
        items = [(chunk.key, chunk.lease.view) for chunk in chunks]
        try:
            seals = await self._sealer.checksums(items)
            return [
                (seal.header, seal.checksum)
                if seal is not None and seal.checksum is not None and seal.header.payload_bytes
                else None
                for seal in seals
            ]
        finally:
            items.clear()  # Else the traceback of a cancelled call would keep the arena mapped.

    async def reserve(self, headers: Sequence[ChunkHeader], *, staging: int = 0, ranks: int = 1) -> Room:
        """Ask for room. All are of one namespace.

        With ``staging``, in the buffers of that number, for each rank's slice of the payloads.
        """
        asked_at = time.monotonic()

        def settle(reserved: Reserved, wanted: bool) -> Room:
            room = Room(_promises(reserved, headers, asked_at, ranks), reserved)
            if not wanted:
                self.source.release(room.promises.values())
            return room

        def ask(ticket: int) -> Reserve:
            return Reserve(
                ticket,
                headers[0].namespace,
                join_keys([header.key for header in headers]),
                join_keys([header.parent for header in headers]),
                [header.payload_bytes for header in headers],
                staging,
            )

        return await answer_of(self.source.conversation.ask(ask, Reserved, settle))

    async def commit(self, promises: Sequence[Promise], checksums: Sequence[bytes]) -> list[bool]:
        """They are written; which of them the peer serves now. They must be of one grant."""

        def settle(committed: Committed, _wanted: bool) -> list[bool]:
            expect_length(committed.whole, len(promises))
            return committed.whole

        numbers = [promise.number for promise in promises]
        return await answer_of(
            self.source.conversation.ask(
                lambda ticket: Commit(ticket, promises[0].grant, numbers, b"".join(checksums)),
                Committed,
                settle,
            )
        )


class _Push:
    """One batch on its way."""

    def __init__(self, target: Target, chunks: Sequence[ChunkBytes]) -> None:
        self._target = target
        self._chunks = chunks
        self._outcomes = [Pushed.FAILED] * len(chunks)
        self._sealed: dict[int, Sealed] = {}
        """Of those that are not settled yet, by their numbers."""
        self._attempts = [0] * len(chunks)

    async def run(self, seconds: float) -> list[Pushed]:
        """See :meth:`Target.push`."""
        with anyio.move_on_after(seconds):
            sealed = await self._target.seal(self._chunks)
            space = next((one[0].namespace for one in sealed if one is not None), b"")
            self._sealed = {
                index: one
                for index, one in enumerate(sealed)
                if one is not None and one[0].namespace == space
            }
            pause, full_since = FIRST_PAUSE_SECONDS, anyio.current_time()
            while self._sealed:
                before = len(self._sealed)
                room = await self._reserve()
                if room.promises or room.coming or len(self._sealed) < before:
                    full_since = anyio.current_time()
                if len(self._sealed) < before:
                    pause = FIRST_PAUSE_SECONDS
                    continue
                if anyio.current_time() - full_since > FULL_SECONDS:
                    break
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return self._outcomes

    async def _reserve(self) -> Room:
        """Ask for room for what is left, and fill what there is."""
        left = list(self._sealed)
        room = await self._target.reserve([self._sealed[index][0] for index in left])
        if room.refusal:
            self._target.trouble = room.refusal
            self._settle(left, Pushed.FAILED)
            return room
        self._settle([left[at] for at in room.held], Pushed.HELD)
        if room.promises:
            await self._fill({left[at]: promise for at, promise in room.promises.items()})
        elif not room.held:
            for index in self._sealed:
                self._outcomes[index] = Pushed.FULL
        return room

    async def _fill(self, promises: Mapping[int, Promise]) -> None:
        source = self._target.source
        unused = dict(promises)
        try:
            views = [self._payload(index) for index in promises]
            try:
                outcomes = await source.write(list(zip(promises.values(), views, strict=True)))
            except OSError as error:
                raise PeerError(f"no way for its bytes: {error}") from error
            finally:
                views.clear()  # Else the traceback of a cancelled call would keep the arena mapped.
            written = [
                index for index, outcome in zip(promises, outcomes, strict=True) if outcome is Outcome.OK
            ]
            whole: list[bool] = []
            if written:
                ready = [unused.pop(index) for index in written]
                whole = await self._target.commit(ready, [self._sealed[index][1] for index in written])
        finally:
            source.release(unused.values())
        self._settle([index for index, good in zip(written, whole, strict=True) if good], Pushed.OK)
        tried = [index for index in promises if index in self._sealed]
        if source.silent:
            return  # Whether it is there at all is seen by the next question.
        for index in tried:
            self._attempts[index] += 1
        self._settle([index for index in tried if self._attempts[index] == ATTEMPTS], Pushed.FAILED)

    def _payload(self, index: int) -> memoryview:
        view = self._chunks[index].lease.view
        return view[HEADER_BYTES : HEADER_BYTES + self._sealed[index][0].payload_bytes]

    def _settle(self, indexes: Sequence[int], outcome: Pushed) -> None:
        for index in indexes:
            self._outcomes[index] = outcome
            del self._sealed[index]


def _promises(
    reserved: Reserved, headers: Sequence[ChunkHeader], asked_at: float, ranks: int
) -> dict[int, Promise]:
    """Raises :class:`kvtier.errors.ProtocolError` where it answers what was not asked, or nonsense."""
    count = len(reserved.positions)
    expect_length(reserved.offsets, count)
    named = [*reserved.positions, *reserved.held, *reserved.coming]
    if len(set(named)) < len(named) or any(not 0 <= at < len(headers) for at in named):
        raise ProtocolError("it has room for what was not asked for")
    if count and not (NO_GRANT < reserved.grant <= BIGGEST_NUMBER and 0 < reserved.seconds < float("inf")):
        raise ProtocolError("its room does not fit together")
    ends = asked_at + usable_seconds(reserved.seconds)
    promises = {}
    for number, (at, offset) in enumerate(zip(reserved.positions, reserved.offsets, strict=True)):
        length = headers[at].payload_bytes // ranks
        if offset < 0 or offset + length > BIGGEST_NUMBER:
            raise ProtocolError("it has room that cannot be")
        promises[at] = Promise(headers[at].key, reserved.grant, number, offset, length, ready=True, ends=ends)
    return promises
