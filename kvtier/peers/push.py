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

from kvtier.backends.base import Outcome
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
from kvtier.tiers.sealer import Sealer

ATTEMPTS = 2
"""Maximum writes per chunk."""
FULL_SECONDS = 2.0
"""How long to retry a reservation while the peer is full."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.005, 0.25
"""Back-off between these retries."""

Sealed = tuple[ChunkHeader, bytes | None]
"""A chunk's header, and the checksum of its payload if it is known."""


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
        self._sealer = sealer
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

    def headers(self, chunks: Sequence[ChunkBytes]) -> list[Sealed | None]:
        """Return the headers, and known checksums; ``None`` for corrupt or empty chunks."""
        seals = self._sealer.known([(chunk.key, chunk.lease.view) for chunk in chunks])
        return [seal if seal is not None and seal.header.payload_bytes else None for seal in seals]

    async def checksums(
        self, chunks: Sequence[ChunkBytes], hashed: Sequence[bytes | None]
    ) -> list[bytes | None]:
        """Return the checksums of payloads, also in their headers; ``None`` for corrupt chunks.

        ``hashed``: those that are known, because their payload was hashed while it was sent.
        """
        checksums = [
            checksum if checksum and self._sealer.adopt((chunk.key, chunk.lease.view), checksum) else None
            for chunk, checksum in zip(chunks, hashed, strict=True)
        ]
        unknown = [at for at, checksum in enumerate(hashed) if checksum is None]
        rest = [(chunks[at].key, chunks[at].lease.view) for at in unknown]
        try:
            for at, seal in zip(unknown, await self._sealer.checksums(rest) if rest else (), strict=True):
                checksums[at] = None if seal is None else seal.checksum
        finally:
            rest.clear()  # Otherwise the traceback of a cancelled call keeps the arena mapped.
        return checksums

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
        self._sealed: dict[int, Sealed] = {}
        """Chunks without a final outcome, by index."""
        self._attempts = [0] * len(chunks)

    async def run(self, seconds: float, rooms: Mapping[int, RemoteLease]) -> list[PushOutcome]:
        """See :meth:`Pusher.push`."""
        with anyio.move_on_after(seconds):
            sealed = self._target.headers(self._chunks)
            self._sealed = {index: chunk for index, chunk in enumerate(sealed) if chunk is not None}
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
        left = [at for at in rest if self._sealed[at][0].namespace == self._sealed[rest[0]][0].namespace]
        leases, unused = dict[int, RemoteLease](), dict(reserved)
        try:
            if left:
                room = await self._target.reserve([self._sealed[index][0] for index in left])
            for index in reserved if not room.refusal else ():
                chunk = self._sealed.get(index)
                if chunk is not None and chunk[0].payload_bytes == reserved[index].length:
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
            done = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            indexes = list(leases)
            unsealed = [at for at in done if self._sealed[indexes[at]][1] is None]
            chunks = [self._chunks[indexes[at]] for at in unsealed]
            checksums = await self._target.checksums(chunks, [hashed[at] for at in unsealed])
            for at, checksum in zip(unsealed, checksums, strict=True):
                self._sealed[indexes[at]] = self._sealed[indexes[at]][0], checksum
            written = [index for at in done if self._sealed[index := indexes[at]][1] is not None]
            valid: list[bool] = []
            if written:
                ready = [unused.pop(index) for index in written]
                valid = await self._target.commit(ready, [self._sealed[index][1] or b"" for index in written])
        finally:
            source.release(unused.values())
        self._settle([index for index, ok in zip(written, valid, strict=True) if ok], PushOutcome.OK)
        tried = [index for index in leases if index in self._sealed]
        if source.unresponsive:
            return  # The next request finds out whether the peer is alive.
        for index in tried:
            self._attempts[index] += 1
        self._settle([index for index in tried if self._attempts[index] == ATTEMPTS], PushOutcome.FAILED)

    def _payload(self, index: int) -> memoryview:
        view = self._chunks[index].lease.view
        return view[HEADER_BYTES : HEADER_BYTES + self._sealed[index][0].payload_bytes]

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
