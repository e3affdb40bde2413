"""Push chunks into the first tier of a connected peer: reserve, write, commit."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import ClassVar, NamedTuple

import anyio

from kvtier.backends.base import Outcome, PutItem
from kvtier.concurrency.breaker import Backoff
from kvtier.errors import ChannelError, PeerError, ProtocolError
from kvtier.logs import printable
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.observability.traces.spans import current
from kvtier.peers.protocol import (
    Announce,
    Announced,
    Commit,
    Committed,
    Reserve,
    Reserved,
    Withdraw,
)
from kvtier.peers.remote_leases import RemoteLease, leases_of, usable_seconds
from kvtier.peers.source import Source, expect_length
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.sealer import SealedHeader, Sealer

ATTEMPTS = 2
"""Maximum writes per chunk."""
FULL_SECONDS = 2.0
"""How long to retry a reservation while the peer is full."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.005, 0.25
"""Back-off between these retries."""


class PushOutcome(Enum):
    """Outcome of pushing one chunk."""

    OK = "ok"
    """Written and verified; the peer serves it."""
    HELD = "held"
    """The peer already held it."""
    FULL = "full"
    """The peer has no room."""
    FAILED = "failed"
    """Not transferred intact in time, or the peer rejects this namespace."""
    ABSENT = "absent"
    """Not in the first tier here when it was to be sent."""

    @property
    def at_peer(self) -> bool:
        """Whether the peer holds the chunk."""
        return self in (PushOutcome.OK, PushOutcome.HELD)


class RemoteRoom(NamedTuple):
    """A peer's response to one :class:`Reserve`, by the positions of the chunks."""

    leases: dict[int, RemoteLease]
    held: list[int]
    pending: list[int]
    refusal: str


class Pusher:
    """A connected peer to push chunks to.

    All methods raise :class:`kvtier.errors.ChannelError` if the connection ends. They may be cancelled at any
    time, which releases what was reserved.
    """

    def __init__(self, source: Source, sealer: Sealer) -> None:
        """``sealer``: the sealer of the memory that is pushed from."""
        self.source = source
        self.sealer = sealer
        self.last_error = ""
        """Why the peer rejects the chunks, in its own words; empty if it does not."""

    def announce(self, number: int, keys: Sequence[ChunkKey], settle: Callable[[Announced], None]) -> None:
        """Announce chunks, so that the peer's lookups wait for them. ``settle`` gets the response."""
        request = partial(Announce, number=number, keys=join_keys(keys))
        self.source.endpoint.call(request, Announced, settle)

    def withdraw(self, number: int) -> None:
        """End an announcement. Raises nothing."""
        with suppress(ChannelError):
            self.source.endpoint.send(Withdraw(number))

    async def push(
        self, chunks: Sequence[ChunkBytes], seconds: float, rooms: Mapping[int, RemoteLease] | None = None
    ) -> list[PushOutcome]:
        """Push chunk objects within ``seconds``, and return their outcomes in order.

        ``rooms``: the room that is reserved already, by the index of its chunk. The leases of the chunks stay
        with the caller. At most :data:`~kvtier.peers.protocol.MAX_RESERVED` at once.
        """
        return await _Push(self, chunks).run(seconds, rooms or {})

    async def reserve(
        self, headers: Sequence[ChunkHeader], *, staging: int = 0, shares: int = 1, ahead: bool = False
    ) -> RemoteRoom:
        """Reserve room for chunks of one namespace; with ``ahead``, only room that the peer has to spare.

        With ``staging``, in the staging buffers of that number: each rank has one of ``shares`` equal parts
        of the payloads.
        """
        sent_at = time.monotonic()

        request = partial(
            Reserve,
            namespace=headers[0].namespace,
            keys=join_keys([header.key for header in headers]),
            parents=join_keys([header.parent for header in headers]),
            payload_lengths=[header.payload_bytes for header in headers],
            block_hashes=[header.block_hashes for header in headers],
            tokens=[header.tokens for header in headers],
            staging=staging,
            ahead=ahead,
        )
        return await self.source.endpoint.call(
            request,
            Reserved,
            lambda reserved: _room_of(reserved, headers, sent_at, shares),
            give_back=lambda room: self.source.release(room.leases.values()),
        ).reply()

    async def commit(self, leases: Sequence[RemoteLease], checksums: Sequence[bytes]) -> list[bool]:
        """Commit written chunks, with one message per grant. Return which of them the peer serves now."""
        checksum_of = dict(zip(leases, checksums, strict=True))
        replies = await self.source.ask_each_grant(
            leases,
            lambda group: partial(
                Commit, checksums=b"".join([checksum_of[lease] for lease in group]), trace=current.get()
            ),
            Committed,
            lambda group, committed: expect_length(committed.valid, len(group)),
        )
        valid = {lease for group, ready in replies for lease, ok in zip(group, ready, strict=True) if ok}
        return [lease in valid for lease in leases]


class PushSource(ABC):
    """Memory that chunks of one KV transfer are pushed from: the first tier, or staging buffers.

    Owns their leases. Chunks in staging buffers are in the first tier as well.
    """

    retried: ClassVar[bool]
    """Whether a chunk that cannot be pushed from here is then pushed from the first tier."""

    @abstractmethod
    def lease(self, key: ChunkKey, *, always: bool = False) -> int:
        """Lease a chunk, unless that is done. Return its length; 0 if it is gone, or is not leased yet.

        ``always``: even at the limit of leases, because it is pushed next.
        """

    @abstractmethod
    def release(self, key: ChunkKey) -> int:
        """Release a leased chunk, and return its length."""


class _Push:
    """The push of one batch."""

    def __init__(self, target: Pusher, chunks: Sequence[ChunkBytes]) -> None:
        self._target = target
        self._chunks = chunks
        self._outcomes = [PushOutcome.FAILED] * len(chunks)
        self._sealed: dict[int, SealedHeader] = {}
        """Chunks without a final outcome, by index."""
        self._attempts = [0] * len(chunks)

    async def run(self, seconds: float, rooms: Mapping[int, RemoteLease]) -> list[PushOutcome]:
        """See :meth:`Pusher.push`."""
        with anyio.move_on_after(seconds):
            seals = enumerate(self._target.sealer.known([self._item(at) for at in range(len(self._chunks))]))
            # Corrupt and empty chunks are not pushed.
            self._sealed = {at: seal for at, seal in seals if seal is not None and seal.header.payload_bytes}
            backoff, full_since = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS), anyio.current_time()
            while self._sealed or rooms:
                before = len(self._sealed)
                room = await self._reserve(rooms)
                rooms = {}
                if room.leases or room.pending or len(self._sealed) < before:
                    full_since = anyio.current_time()
                if len(self._sealed) < before:
                    backoff.reset()
                    continue
                if anyio.current_time() - full_since > FULL_SECONDS:
                    break
                await anyio.sleep(backoff.next())
        return self._outcomes

    async def _reserve(self, reserved: Mapping[int, RemoteLease]) -> RemoteRoom:
        """Reserve room for those of one namespace that have none, and write as many as fit."""
        room, rest = RemoteRoom({}, [], [], ""), [index for index in self._sealed if index not in reserved]
        headers = {index: self._sealed[index].header for index in rest}
        left = [index for index in rest if headers[index].namespace == headers[rest[0]].namespace]
        leases, unused = dict[int, RemoteLease](), dict(reserved)
        try:
            if left:
                room = await self._target.reserve([headers[index] for index in left])
            for index in reserved if not room.refusal else ():
                seal = self._sealed.get(index)
                if seal is not None and seal.header.payload_bytes == reserved[index].length:
                    leases[index] = unused.pop(index)
        finally:
            self._target.source.release(unused.values())
        if room.refusal:
            self._target.last_error = room.refusal
            self._settle(left, PushOutcome.FAILED)
            return room
        leases.update((left[at], lease) for at, lease in room.leases.items())
        self._settle([left[at] for at in room.held], PushOutcome.HELD)
        if leases:
            await self._fill(leases)
        elif not room.held:
            # The outcome unless there is room before FULL_SECONDS have passed.
            for index in left:
                self._outcomes[index] = PushOutcome.FULL
        return room

    async def _fill(self, leases: Mapping[int, RemoteLease]) -> None:
        source = self._target.source
        unused = dict(leases)
        try:
            views = [self._payload(index) for index in leases]
            try:
                writes = list(zip(leases.values(), views, strict=True))
                outcomes, hashed = await source.write_hashed(writes)
            except OSError as error:
                raise PeerError(f"cannot open a data link: {error}") from error
            finally:
                views.clear()  # Otherwise the traceback of a cancelled call keeps the arena mapped.
                writes = []
            results = zip(leases, outcomes, hashed, strict=True)
            done = {index: checksum for index, outcome, checksum in results if outcome is Outcome.OK}
            await self._add_checksums(done)
            checksums = {
                index: found for index in done if (found := self._sealed[index].checksum) is not None
            }
            written, valid = list(checksums), list[bool]()
            if written:
                ready = [unused.pop(index) for index in written]
                valid = await self._target.commit(ready, list(checksums.values()))
        finally:
            source.release(unused.values())
        self._settle([index for index, ok in zip(written, valid, strict=True) if ok], PushOutcome.OK)
        tried = [index for index in leases if index in self._sealed]
        if source.unresponsive:
            return  # The next request finds out whether the peer is alive.
        for index in tried:
            self._attempts[index] += 1
        self._settle([index for index in tried if self._attempts[index] == ATTEMPTS], PushOutcome.FAILED)

    async def _add_checksums(self, hashed: Mapping[int, bytes | None]) -> None:
        """Add the checksums of payloads, also to their headers, except those of corrupt chunks.

        ``hashed``: those that are known, because their payload was hashed while it was sent.
        """
        sealer, unknown = self._target.sealer, list[int]()
        for index, checksum in hashed.items():
            if self._sealed[index].checksum is not None:
                continue
            if checksum is None:
                unknown.append(index)
            elif sealer.adopt(self._item(index), checksum):
                self._sealed[index] = self._sealed[index]._replace(checksum=checksum)
        items = [self._item(index) for index in unknown]
        try:
            for index, seal in zip(unknown, await sealer.checksums(items) if items else (), strict=True):
                if seal is not None:
                    self._sealed[index] = self._sealed[index]._replace(checksum=seal.checksum)
        finally:
            items.clear()  # Otherwise the traceback of a cancelled call keeps the arena mapped.

    def _item(self, index: int) -> PutItem:
        return self._chunks[index].key, self._chunks[index].lease.view

    def _payload(self, index: int) -> memoryview:
        view = self._chunks[index].lease.view
        return view[HEADER_BYTES : HEADER_BYTES + self._sealed[index].header.payload_bytes]

    def _settle(self, indexes: Sequence[int], outcome: PushOutcome) -> None:
        for index in indexes:
            self._outcomes[index] = outcome
            del self._sealed[index]


def _room_of(reserved: Reserved, headers: Sequence[ChunkHeader], sent_at: float, shares: int) -> RemoteRoom:
    """Validate a response. Raises :class:`kvtier.errors.ProtocolError`."""
    count = len(reserved.positions)
    expect_length(reserved.offsets, count)
    listed = [*reserved.positions, *reserved.held, *reserved.pending]
    if len(set(listed)) < len(listed) or any(not 0 <= at < len(headers) for at in listed):
        raise ProtocolError("the peer's reservation lists chunks that were not requested")
    # Also refuses NaN, which is neither greater nor less.
    if count and not 0 < reserved.seconds < float("inf"):
        raise ProtocolError("the peer's reservation has an invalid lifetime")
    granted = [headers[at] for at in reserved.positions]
    leases = leases_of(
        reserved.grant,
        [header.key for header in granted],
        reserved.offsets,
        [header.payload_bytes // shares for header in granted],
        sent_at + usable_seconds(reserved.seconds),
    )
    by_position = dict(zip(reserved.positions, leases, strict=True))
    return RemoteRoom(by_position, reserved.held, reserved.pending, printable(reserved.refusal))
