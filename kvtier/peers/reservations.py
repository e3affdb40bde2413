"""Room that peers reserve, fill and commit: what they push, until it is served.

Nothing of it is visible before it is whole: a chunk that is reserved is PENDING, and becomes READY once
nobody can write to it any longer and its place has verified it (:mod:`kvtier.peers.places`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import anyio

from kvtier.cache import TieredCache
from kvtier.catalog import State
from kvtier.errors import ProtocolError
from kvtier.header import ChunkHeader
from kvtier.keys import KEY_BYTES, ChunkKey, split_keys
from kvtier.peers.grants import Grant, GrantBook
from kvtier.peers.places import ArenaPlace, Place
from kvtier.peers.protocol import (
    CHECKSUM_BYTES,
    MOST_IN_ONE,
    MOST_RESERVED,
    NO_GRANT,
    Announce,
    Commit,
    Reserve,
    Reserved,
    Stage,
    Staged,
)
from kvtier.peers.staging import Stagings
from kvtier.pipeline.store import Reservation
from kvtier.transports.base import Access

MOST_ANNOUNCEMENTS = 1024
MOST_ANNOUNCED = 131_072
"""Of one peer, and the chunks of all of them. What is announced beyond is not waited for."""
MOST_ANNOUNCED_BY_ALL = 524_288
"""Some 80 MB of Python's memory."""
BIGGEST_PAYLOAD = 1 << 48
STRAGGLER_SECONDS = 5.0
"""How long a connection that was cut may still hold memory that was written again over another."""
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.1


class _Room(NamedTuple):
    """One grant, and what was reserved for it."""

    owner: Hashable
    place: Place
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
        stagings: Stagings | None = None,
    ) -> None:
        """``buffer``: bytes of the arena that may be reserved at once; left out, the limit of all grants.

        ``refusal`` says why nothing of a namespace is taken; nothing where it is. ``stagings``: the engines'
        staging buffers, where they have any.
        """
        self._cache = cache
        self._refusal = refusal
        self._arena = ArenaPlace(cache, grants, grants.limit if buffer is None else buffer)
        self._stagings = stagings
        self._rooms: dict[int, _Room] = {}
        self._announced: dict[Hashable, dict[int, list[ChunkKey]]] = {}
        self._announced_by_all = 0
        """Chunks."""
        self._counts: Counter[str] = Counter()

    @property
    def reserved_bytes(self) -> int:
        """Of chunks that are not committed yet."""
        return sum(place.reserved_bytes for place in self._places())

    def _places(self) -> Iterable[Place]:
        return chain((self._arena,), () if self._stagings is None else self._stagings.open)

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

    def stage(self, question: Stage) -> Staged:
        """Where the staging buffers are of the engine that serves a model, or why there are none."""
        why = self._why_not(question.namespace)
        if not why and self._stagings is None:
            why = "hand_over.device is cpu there"
        elif not why and self._stagings is not None:
            why = self._stagings.refusal(question.namespace)
        staging = None if why or self._stagings is None else self._stagings.find(question.namespace)
        if staging is None:
            return Staged(question.ticket, 0, [], why)
        return Staged(question.ticket, staging.number, staging.endpoints, "")

    def reserve(self, owner: Hashable, question: Reserve) -> Reserved:
        """Take room for as many as there is room for, in their order. Raises :class:`ProtocolError`."""
        headers = _headers(question)
        held: list[int] = []
        coming: list[int] = []
        reserved: dict[int, Reservation] = {}
        if why := self._why_not(question.namespace):
            return Reserved(question.ticket, NO_GRANT, [], [], 0.0, [], [], why)
        place = self._place(question)
        if place is None:
            return Reserved(question.ticket, NO_GRANT, [], [], 0.0, [], [], "")
        left = place.room
        for at, header in enumerate(headers):
            state = self._state(place, header)
            if state is not State.ABSENT:
                (held if state is State.READY else coming).append(at)
                continue
            left -= place.length_of(header)
            reservation = place.reserve(header) if left >= 0 else None
            if reservation is None:
                self._counts["no_room"] += 1
                break
            reserved[at] = reservation
        self._cache.hierarchy.catalog.touch([headers[at].key for at in held])
        room = self._grant(owner, place, list(reserved.values()))
        if room is None:
            return Reserved(question.ticket, NO_GRANT, [], [], 0.0, held, coming, "")
        offsets = [place.offset_of(reservation) for reservation in room.unfilled.values()]
        return Reserved(
            question.ticket,
            room.grant.number,
            list(reserved)[: len(offsets)],
            offsets,
            place.grants.seconds[Access.WRITE],
            held,
            coming,
            "",
        )

    def _state(self, place: Place, header: ChunkHeader) -> State:
        """What is in a staging buffer need not be pushed into the arena."""
        state = place.state(header.key)
        if state is State.ABSENT and place is self._arena and self._stagings is not None:
            staging = self._stagings.find(header.namespace)
            return State.ABSENT if staging is None else staging.state(header.key)
        return state

    def _place(self, question: Reserve) -> Place | None:
        """Where room is wanted; ``None`` where that is gone."""
        if not question.staging:
            return self._arena
        staging = None if self._stagings is None else self._stagings.find(question.namespace)
        return staging if staging is not None and staging.number == question.staging else None

    def _why_not(self, namespace: bytes) -> str:
        if not self._cache.hierarchy.distrusted.isdisjoint((namespace, None)):
            return "this model was reset here, so what other hosts hold of it is not trusted"
        return "" if self._refusal is None else self._refusal(namespace)

    def _grant(self, owner: Hashable, place: Place, reservations: Sequence[Reservation]) -> _Room | None:
        """Grant the first of these; the others are given up."""
        leases = [reservation.lease.share() for reservation in reservations]
        grant = place.grants.grant(owner, leases, Access.WRITE)
        count = 0 if grant is None else grant.left
        for lease in leases[count:]:
            lease.release()
        place.abandon(reservations[count:])
        if grant is None:
            return None
        room = self._rooms[grant.number] = _Room(owner, place, grant, dict(enumerate(reservations[:count])))
        place.reserved_bytes += sum(reservation.lease.length for reservation in room.unfilled.values())
        self._cache.expecting.announce([reservation.header.key for reservation in room.unfilled.values()])
        self._counts["reserved"] += count
        grant.on_end = partial(self._give_up, room)
        return room

    def release(self, owner: Hashable, number: int, chunks: Iterable[int]) -> None:
        """These will not be filled, and nothing writes there any longer. Unknown numbers are passed over."""
        chunks = list(chunks)
        room = self._rooms.get(number)
        if room is not None and room.owner is owner:
            unfilled = [room.unfilled.pop(index) for index in chunks if index in room.unfilled]
            self._abandon(room.place, unfilled)
        for staging in () if self._stagings is None else self._stagings.open:
            staging.grants.release(owner, number, chunks, Access.WRITE)

    def _release(self, owner: Hashable, number: int, chunks: Sequence[int]) -> None:
        for place in self._places():
            place.grants.release(owner, number, chunks, Access.WRITE)

    def end(self, owner: Hashable) -> None:
        """The peer is gone: nothing of what it has announced will come. Harmless when repeated."""
        for room in [room for room in self._rooms.values() if room.owner is owner]:
            self._give_up(room)
        for number in list(self._announced.get(owner, ())):
            self.withdraw(owner, number)
        self._announced.pop(owner, None)

    async def cut_off(self, owner: Hashable) -> None:
        """The peer is gone: have it write to no staging buffer, and take back what it was granted there."""
        for staging in () if self._stagings is None else list(self._stagings.open):
            if staging.grants.may_still_write(owner):
                await staging.cut_off()
            staging.grants.end(owner)

    def _give_up(self, room: _Room) -> None:
        """The grant is over, or its owner is gone."""
        self._rooms.pop(room.grant.number, None)
        unfilled = list(room.unfilled.values())
        room.unfilled.clear()
        self._counts["given_up"] += len(unfilled)
        self._abandon(room.place, unfilled)

    # Committing.

    def check(self, question: Commit) -> None:
        """Raises :class:`ProtocolError` where there is not a checksum for each chunk that needs one."""
        room = self._rooms.get(question.grant)
        needed = CHECKSUM_BYTES * len(question.chunks)
        given = len(question.checksums)
        staged = self._stagings is not None and (room is None or room.place is not self._arena)
        if given != needed and (given or not staged):
            raise ProtocolError("it commits chunks without their checksums")

    async def commit(self, owner: Hashable, question: Commit) -> list[bool]:
        """Serve those that are whole; which these are. It has passed :meth:`check`.

        From here on nobody may begin to write there; those that still do are waited for.
        """
        room = self._rooms.get(question.grant)
        if room is None or room.owner is not owner:
            # Too late; but that nothing writes there any longer holds all the same.
            self._release(owner, question.grant, question.chunks)
            return [False] * len(question.chunks)
        filled = {index: room.unfilled.pop(index) for index in question.chunks if index in room.unfilled}
        if len(filled) < len(question.chunks):
            self._counts["refused"] += len(question.chunks) - len(filled)
        whole: set[int] = set()
        try:
            room.place.grants.release(owner, question.grant, list(filled))
            whole = await self._whole(room.place, filled, question)
        finally:
            room.place.commit([filled[index] for index in whole])
            self._settled(room.place, [filled[index] for index in whole])
            self._abandon(room.place, [filled[index] for index in filled if index not in whole])
        self._counts["committed"] += len(whole)
        self._counts["refused"] += len(filled) - len(whole)
        return [index in whole for index in question.chunks]

    async def _whole(self, place: Place, filled: dict[int, Reservation], question: Commit) -> set[int]:
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
        good = await place.verify([(filled[index], checksums[index]) for index in indexes])
        return {index for index, fine in zip(indexes, good, strict=True) if fine}

    def _abandon(self, place: Place, reservations: Sequence[Reservation]) -> None:
        place.abandon(reservations)
        self._settled(place, reservations)

    def _settled(self, place: Place, reservations: Sequence[Reservation]) -> None:
        place.reserved_bytes -= sum(reservation.lease.length for reservation in reservations)
        self._cache.expecting.withdraw([reservation.header.key for reservation in reservations])


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
