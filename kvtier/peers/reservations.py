"""Room in the first tier that peers reserve, fill and commit: what they push, until it is served.

Nothing of it is visible before it is whole: a chunk that is reserved is PENDING in the catalog, and becomes
READY once nobody can write to it any longer and its payload has the checksum that the pusher has told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from kvtier.cache import TieredCache
from kvtier.catalog import State
from kvtier.errors import ProtocolError
from kvtier.header import HEADER_BYTES, ChunkHeader, checksum_of, object_bytes
from kvtier.keys import KEY_BYTES, ChunkKey, split_keys
from kvtier.peers.grants import Grant, GrantBook
from kvtier.peers.protocol import (
    CHECKSUM_BYTES,
    MOST_IN_ONE,
    MOST_RESERVED,
    NO_GRANT,
    Announce,
    Commit,
    Reserve,
    Reserved,
)
from kvtier.pipeline.store import Reservation
from kvtier.router import FIRST
from kvtier.threads import WorkerThreads, spread
from kvtier.transports.base import Access

MOST_ANNOUNCEMENTS = 1024
MOST_ANNOUNCED = 131_072
"""Of one peer, and the chunks of all of them. What is announced beyond is not waited for."""
MOST_ANNOUNCED_BY_ALL = 524_288
"""Some 80 MB of Python's memory."""
BIGGEST_PAYLOAD = 1 << 48
VERIFIED_AT_ONCE = 2
"""Threads that compute checksums, for all peers together."""
STRAGGLER_SECONDS = 5.0
"""How long a connection that was cut may still hold memory that was written again over another."""
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.1


class _Room(NamedTuple):
    """One grant, and what was reserved for it."""

    owner: Hashable
    grant: Grant
    unfilled: dict[int, Reservation]
    """By their numbers in the grant."""


class Reservations:
    """What all peers of this host have reserved and announced. Belongs to one event loop."""

    def __init__(
        self,
        cache: TieredCache,
        grants: GrantBook,
        buffer: int | None = None,
        refusal: Callable[[bytes], str] | None = None,
    ) -> None:
        """``buffer``: bytes that may be reserved at once; the limit of all grants where it is left out.

        ``refusal`` says why nothing of a namespace is taken; nothing where it is.
        """
        self.limit = grants.limit if buffer is None else min(buffer, grants.limit)
        self.reserved_bytes = 0
        """Of chunks that are not committed yet."""
        self._cache = cache
        self._refusal = refusal
        self._grants = grants
        self._rooms: dict[int, _Room] = {}
        self._announced: dict[Hashable, dict[int, list[ChunkKey]]] = {}
        self._announced_by_all = 0
        """Chunks."""
        self._counts: Counter[str] = Counter()
        self._hop = WorkerThreads(VERIFIED_AT_ONCE)

    def status(self) -> dict[str, object]:
        """For people and tests."""
        return {
            "reserved_bytes": self.reserved_bytes,
            "reservations": sum(len(room.unfilled) for room in self._rooms.values()),
            "announcements": sum(map(len, self._announced.values())),
            "counts": dict(self._counts),
        }

    # Announcing.

    def announce(self, owner: Hashable, announcement: Announce) -> bool:
        """Have look-ups wait for these; whether they do. Raises :class:`ProtocolError`."""
        keys = _split(announcement.keys)
        if len(keys) > MOST_IN_ONE:
            raise ProtocolError(f"it announces more than {MOST_IN_ONE} chunks at once")
        mine = self._announced.setdefault(owner, {})
        if announcement.number in mine:
            raise ProtocolError("it announces twice under one number")
        mine_in_all = sum(map(len, mine.values())) + len(keys)
        if (
            len(mine) >= MOST_ANNOUNCEMENTS
            or mine_in_all > MOST_ANNOUNCED
            or self._announced_by_all + len(keys) > MOST_ANNOUNCED_BY_ALL
        ):
            return False
        mine[announcement.number] = keys
        self._announced_by_all += len(keys)
        self._cache.expecting.announce(keys)
        return True

    def withdraw(self, owner: Hashable, number: int) -> None:
        """Nothing more of an announcement will come."""
        keys = self._announced.get(owner, {}).pop(number, [])
        self._announced_by_all -= len(keys)
        self._cache.expecting.withdraw(keys)

    # Reserving.

    def reserve(self, owner: Hashable, question: Reserve) -> Reserved:
        """Take room for as many as there is room for, in their order. Raises :class:`ProtocolError`."""
        headers = _headers(question)
        held: list[int] = []
        coming: list[int] = []
        reserved: dict[int, Reservation] = {}
        if why := self._why_not(question.namespace):
            return Reserved(question.ticket, NO_GRANT, [], [], 0.0, [], [], why)
        left = min(self.limit - self.reserved_bytes, self._grants.limit - self._grants.promised)
        for at, header in enumerate(headers):
            state = self._cache.hierarchy.catalog.state(header.key, FIRST)
            if state is not State.ABSENT:
                (held if state is State.READY else coming).append(at)
                continue
            left -= object_bytes(header.payload_bytes)
            reservation = self._cache.reserve(header) if left >= 0 else None
            if reservation is None:
                self._counts["no_room"] += 1
                break
            reserved[at] = reservation
        self._cache.hierarchy.catalog.touch([headers[at].key for at in held])
        room = self._grant(owner, list(reserved.values()))
        if room is None:
            return Reserved(question.ticket, NO_GRANT, [], [], 0.0, held, coming, "")
        offsets = [reservation.lease.offset + HEADER_BYTES for reservation in room.unfilled.values()]
        return Reserved(
            question.ticket,
            room.grant.number,
            list(reserved)[: len(offsets)],
            offsets,
            self._grants.seconds[Access.WRITE],
            held,
            coming,
            "",
        )

    def _why_not(self, namespace: bytes) -> str:
        if not self._cache.hierarchy.distrusted.isdisjoint((namespace, None)):
            return "this model was reset here, so what other hosts hold of it is not trusted"
        return "" if self._refusal is None else self._refusal(namespace)

    def _grant(self, owner: Hashable, reservations: Sequence[Reservation]) -> _Room | None:
        """Grant the first of these; the others are given up."""
        leases = [reservation.lease.share() for reservation in reservations]
        grant = self._grants.grant(owner, leases, Access.WRITE)
        count = 0 if grant is None else grant.left
        for lease, reservation in zip(leases[count:], reservations[count:], strict=True):
            lease.release()
            self._cache.abandon(reservation)
        if grant is None:
            return None
        room = self._rooms[grant.number] = _Room(owner, grant, dict(enumerate(reservations[:count])))
        self.reserved_bytes += sum(reservation.lease.length for reservation in room.unfilled.values())
        self._cache.expecting.announce([reservation.header.key for reservation in room.unfilled.values()])
        self._counts["reserved"] += count
        grant.on_end = partial(self._give_up, room)
        return room

    def release(self, owner: Hashable, number: int, chunks: Iterable[int]) -> None:
        """These will not be filled. Their memory is still granted."""
        room = self._rooms.get(number)
        if room is not None and room.owner is owner:
            self._abandon([room.unfilled.pop(index) for index in chunks if index in room.unfilled])

    def end(self, owner: Hashable) -> None:
        """The peer is gone: nothing of what it has announced will come. Harmless when repeated."""
        for room in [room for room in self._rooms.values() if room.owner is owner]:
            self._give_up(room)
        for number in list(self._announced.get(owner, ())):
            self.withdraw(owner, number)
        self._announced.pop(owner, None)

    def _give_up(self, room: _Room) -> None:
        """The grant is over, or its owner is gone."""
        self._rooms.pop(room.grant.number, None)
        unfilled = list(room.unfilled.values())
        room.unfilled.clear()
        self._counts["given_up"] += len(unfilled)
        self._abandon(unfilled)

    # Committing.

    async def commit(self, owner: Hashable, question: Commit) -> list[bool]:
        """Serve those that are whole; which these are. There is a checksum for each.

        From here on nobody may begin to write there; those that still do are waited for.
        """
        room = self._rooms.get(question.grant)
        if room is None or room.owner is not owner:
            # Too late; but that nothing writes there any longer holds all the same.
            self._grants.release(owner, question.grant, question.chunks, Access.WRITE)
            return [False] * len(question.chunks)
        filled = {index: room.unfilled.pop(index) for index in question.chunks if index in room.unfilled}
        if len(filled) < len(question.chunks):
            self._counts["refused"] += len(question.chunks) - len(filled)
        whole: set[int] = set()
        try:
            self._grants.release(owner, question.grant, list(filled))
            whole = await self._whole(filled, question)
        finally:
            self._cache.commit([filled[index] for index in whole])
            self._settled([filled[index] for index in whole])
            self._abandon([reservation for index, reservation in filled.items() if index not in whole])
        self._counts["committed"] += len(whole)
        self._counts["refused"] += len(filled) - len(whole)
        return [index in whole for index in question.chunks]

    async def _whole(self, filled: dict[int, Reservation], question: Commit) -> set[int]:
        """Those of the reservations whose payload is what the pusher says, and stays so."""
        pause = SHORTEST_PAUSE_SECONDS
        with anyio.move_on_after(STRAGGLER_SECONDS):
            while not all(reservation.lease.sole for reservation in filled.values()):
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        checksums = {
            index: question.checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]
            for at, index in enumerate(question.chunks)
        }
        indexes = [index for index, reservation in filled.items() if reservation.lease.sole]
        items = [(filled[index].header, filled[index].lease.view, checksums[index]) for index in indexes]
        try:
            good = await spread(_is_whole, items, parts=1, hop=self._hop)
        finally:
            items.clear()  # Else the traceback of a cancelled call would keep the arena mapped.
        return {index for index, fine in zip(indexes, good, strict=True) if fine}

    def _abandon(self, reservations: Sequence[Reservation]) -> None:
        for reservation in reservations:
            self._cache.abandon(reservation)
        self._settled(reservations)

    def _settled(self, reservations: Sequence[Reservation]) -> None:
        self.reserved_bytes -= sum(reservation.lease.length for reservation in reservations)
        self._cache.expecting.withdraw([reservation.header.key for reservation in reservations])


def _is_whole(item: tuple[ChunkHeader, memoryview, bytes]) -> bool:
    """In a worker thread: write the header that belongs there, whatever the pusher has written over it."""
    header, chunk, checksum = item
    header.seal(chunk)
    return checksum_of(chunk) == checksum


def _headers(question: Reserve) -> list[ChunkHeader]:
    """Raises :class:`ProtocolError` for what cannot be chunks."""
    keys, parents, lengths = _split(question.keys), _split(question.parents), question.payload_lengths
    if len(keys) > MOST_RESERVED:
        raise ProtocolError(f"it reserves more than {MOST_RESERVED} chunks at once")
    if len(parents) != len(keys) or len(lengths) != len(keys) or len(question.namespace) != KEY_BYTES:
        raise ProtocolError("it reserves what does not fit together")
    if any(not 0 < length <= BIGGEST_PAYLOAD for length in lengths):
        raise ProtocolError("it reserves room for chunks of a length that cannot be")
    return [
        ChunkHeader(key, parent, question.namespace, length)
        for key, parent, length in zip(keys, parents, lengths, strict=True)
    ]


def _split(keys: bytes) -> list[ChunkKey]:
    try:
        return split_keys(keys)
    except ValueError as error:
        raise ProtocolError(f"it names what are no keys: {error}") from error
