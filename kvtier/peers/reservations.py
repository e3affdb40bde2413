"""Server side of pushes: reserve room, verify and commit what peers write.

A chunk is invisible until it is complete. A reserved chunk is PENDING, and becomes READY once no peer can
write to it and its target has verified it (:mod:`kvtier.peers.push_targets`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat

import anyio
from anyio import CancelScope

from kvtier.cache import TieredCache
from kvtier.catalog.catalog import State
from kvtier.concurrency.breaker import Backoff
from kvtier.errors import ProtocolError
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import BLOCK_HASH_BYTES, KEY_BYTES, MAX_BLOCK_HASHES, ChunkKey, split_keys
from kvtier.peers.grants import Grant
from kvtier.peers.protocol import (
    CHECKSUM_BYTES,
    MAX_IN_ONE,
    MAX_RESERVED,
    NO_GRANT,
    Announce,
    Commit,
    Reserve,
    Reserved,
    Stage,
    Staged,
)
from kvtier.peers.push_targets import ArenaTarget, PushTarget
from kvtier.peers.staging.buffers import Stagings
from kvtier.tiers.host_memory import Reservation
from kvtier.transports.base import Access

MAX_ANNOUNCEMENTS = 1024
MAX_ANNOUNCED = 131_072
"""Limits per peer: announcements, and chunks in all of them. Lookups do not wait for more."""
MAX_ANNOUNCED_BY_ALL = 524_288
"""Chunks announced by all peers; about 80 MB of Python objects."""
MAX_PAYLOAD, MAX_TOKENS = 1 << 48, (1 << 32) - 1
STRAGGLER_SECONDS = 5.0
"""Timeout for a lost connection to release memory that was rewritten over a new one."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.1


class Reservations:
    """Reservations and announcements of all peers. Bound to one event loop."""

    def __init__(
        self,
        cache: TieredCache,
        arena: ArenaTarget,
        stagings: Stagings,
        refusal: Callable[[bytes], str] | None = None,
    ) -> None:
        """``refusal``: returns why a namespace is rejected; empty if it is accepted."""
        self._cache = cache
        self._refusal = refusal
        self._arena = arena
        self._stagings = stagings
        self._open = 0
        """Reservations that are not committed yet."""
        self._announced: dict[Hashable, dict[int, list[ChunkKey]]] = {}
        self._announced_by_all = 0
        """In chunks."""
        self._counts: Counter[str] = Counter()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of chunks that are not committed yet."""
        return sum(target.reserved_bytes for target in self._targets())

    def _targets(self) -> Iterable[PushTarget]:
        return chain((self._arena,), self._stagings.open)

    def status(self) -> dict[str, object]:
        """Return counters and gauges."""
        return {
            "reserved_bytes": self.reserved_bytes,
            "reservations": self._open,
            "announcements": sum(map(len, self._announced.values())),
            "counts": dict(self._counts),
        }

    # Announcements.

    def announce(self, owner: Hashable, announcement: Announce) -> bool:
        """Make lookups wait for these chunks; return whether they do. Raises :class:`ProtocolError`."""
        keys = split_keys(announcement.keys)
        if len(keys) > MAX_IN_ONE:
            raise ProtocolError(f"the client announces more than {MAX_IN_ONE} chunks at once")
        announced = self._announced.setdefault(owner, {})
        if announcement.number in announced:
            raise ProtocolError("the client reuses the number of an open announcement")
        owned_chunks = sum(map(len, announced.values())) + len(keys)
        if (
            len(announced) >= MAX_ANNOUNCEMENTS
            or owned_chunks > MAX_ANNOUNCED
            or self._announced_by_all + len(keys) > MAX_ANNOUNCED_BY_ALL
        ):
            return False
        announced[announcement.number] = keys
        self._announced_by_all += len(keys)
        self._cache.expecting.announce(keys)
        return True

    def withdraw(self, owner: Hashable, number: int) -> None:
        """End an announcement."""
        keys = self._announced.get(owner, {}).pop(number, [])
        self._announced_by_all -= len(keys)
        self._cache.expecting.withdraw(keys)

    # Reservations.

    def stage(self, request: Stage) -> Staged:
        """Return the staging buffers of the engine that serves a namespace, or why it has none."""
        return self._stagings.answer(request, self._rejection(request.namespace))

    def reserve(self, owner: Hashable, request: Reserve) -> Reserved:
        """Reserve room for as many leading chunks as fit. Raises :class:`ProtocolError`."""
        headers = _headers(request)
        held: list[int] = []
        pending: list[int] = []
        absent: dict[ChunkKey, int] = {}
        if reason := self._rejection(request.namespace):
            return Reserved(request.ticket, NO_GRANT, [], [], 0.0, [], [], reason)
        targets = self._targets_of(request.namespace)
        target = next((each for each in targets if each.number == request.staging), None)
        if target is None:  # That staging buffer was lost.
            return Reserved(request.ticket, NO_GRANT, [], [], 0.0, [], [], "")
        left = min(target.room, self._arena.room_ahead) if request.ahead else target.room
        for at, header in enumerate(headers):
            # A key that the request lists twice has room once.
            # What one of its targets holds need not be pushed into another.
            state = State.PENDING if header.key in absent else targets[-1].state(header.key)
            if state is not State.ABSENT:
                (held if state is State.READY else pending).append(at)
                continue
            left -= target.length_of(header)
            if left < 0:
                self._counts["no_room_ahead" if request.ahead else "no_room"] += 1
                break
            absent[header.key] = at
        reserved = self._reserve(target, {at: headers[at] for at in absent.values()})
        self._cache.catalog.touch([headers[at].key for at in held])
        grant = self._grant(owner, target, list(reserved.values()))
        if grant is None:
            return Reserved(request.ticket, NO_GRANT, [], [], 0.0, held, pending, "")
        offsets = [target.offset_of(reservation) for reservation in grant.unfilled.values()]
        return Reserved(
            request.ticket,
            grant.number,
            list(reserved)[: len(offsets)],
            offsets,
            target.grants.seconds[Access.WRITE],
            held,
            pending,
            "",
        )

    def _reserve(self, target: PushTarget, headers: Mapping[int, ChunkHeader]) -> dict[int, Reservation]:
        """Reserve room for as many leading chunks as fit. Keys are those of ``headers``."""
        room = target.reserve(list(headers.values()))
        fitting = room.index(None) if None in room else len(room)
        self._counts["no_room"] += fitting < len(room)
        target.abandon([reservation for reservation in room[fitting:] if reservation is not None])
        leading = zip(headers, room[:fitting], strict=False)
        return {at: reservation for at, reservation in leading if reservation is not None}

    def _targets_of(self, namespace: bytes) -> list[PushTarget]:
        """Return what chunks of a namespace may be pushed to. The last one's lookups find chunks in all."""
        staging = self._stagings.find(namespace)
        return [self._arena] if staging is None else [self._arena, staging]

    def _rejection(self, namespace: bytes) -> str:
        if self._cache.catalog.namespaces.is_reset(namespace):
            return "this model was reset here, so copies on other hosts are invalid"
        return "" if self._refusal is None else self._refusal(namespace)

    def _grant(
        self, owner: Hashable, target: PushTarget, reservations: Sequence[Reservation]
    ) -> Grant | None:
        """Grant as many leading reservations as fit, and give up the others."""
        # A commit ends the grant before it verifies the chunks, and must not free their memory.
        leases = [reservation.lease.share() for reservation in reservations]
        grant = target.grants.grant(owner, leases, Access.WRITE)
        count = 0 if grant is None else grant.left
        for lease in leases[count:]:
            lease.release()
        target.abandon(reservations[count:])
        if grant is None:
            return None
        granted = reservations[:count]
        grant.unfilled.update(enumerate(granted))
        grant.on_end = partial(self._give_up, target, grant)
        self._open += count
        target.reserved_bytes += sum(reservation.lease.length for reservation in granted)
        self._cache.expecting.announce([reservation.header.key for reservation in granted])
        self._counts["reserved"] += count
        return grant

    def _find(self, owner: Hashable, number: int) -> tuple[PushTarget, Grant] | None:
        """Return a grant of this peer that it may still commit, and the memory that it is of."""
        for target in self._targets():
            grant = target.grants.find_write(number)
            if grant is not None and grant.owner is owner:
                return target, grant
        return None

    def release(self, owner: Hashable, number: int, chunks: Sequence[int]) -> bool:
        """Release slices of a grant, for writing or reading; see :meth:`GrantBook.release`.

        Gives up what is reserved in them: the writes have ended. Unknown numbers are ignored.
        """
        if found := self._find(owner, number):
            self._abandon(found[0], self._take_unfilled(found[1], chunks).values())
        return any(target.grants.release(owner, number, chunks) for target in self._targets())

    def _take_unfilled(self, grant: Grant, chunks: Iterable[int]) -> dict[int, Reservation]:
        taken = {index: grant.unfilled.pop(index) for index in chunks if index in grant.unfilled}
        self._open -= len(taken)
        return taken

    async def end(self, owner: Hashable) -> None:
        """Drop the reservations and announcements of a disconnected peer, then end its grants. Idempotent.

        A peer that may still write is cut off before. Cannot be cancelled.
        """
        for target in self._targets():
            for grant in target.grants.of(owner):
                if target.grants.find_write(grant.number):
                    self._give_up(target, grant)
        for number in list(self._announced.get(owner, ())):
            self.withdraw(owner, number)
        self._announced.pop(owner, None)
        with CancelScope(shield=True):
            for target in list(self._targets()):
                if target.grants.may_still_write(owner):
                    await target.cut_off()
                target.grants.end(owner)

    def _give_up(self, target: PushTarget, grant: Grant) -> None:
        """Give up the unfilled reservations of a grant that has ended or whose owner disconnected."""
        grant.on_end = None
        unfilled = self._take_unfilled(grant, list(grant.unfilled))
        self._counts["given_up"] += len(unfilled)
        self._abandon(target, unfilled.values())

    # Commits.

    def check(self, request: Commit) -> None:
        """Raise :class:`ProtocolError` unless each chunk that needs a checksum has one."""
        needed = CHECKSUM_BYTES * len(request.chunks)
        received = len(request.checksums)
        staged = self._stagings.enabled and self._arena.grants.find_write(request.grant) is None
        if received != needed and (received or not staged):
            raise ProtocolError("the client commits chunks without checksums")

    async def commit(self, owner: Hashable, request: Commit) -> list[bool]:
        """Publish the valid chunks, and return which these are. Call :meth:`check` first.

        Ends the right to write at once, and waits for writes in flight.
        """
        found = self._find(owner, request.grant)
        if found is None:
            # Too late to commit, but the writes have ended, so the memory can be released.
            for target in self._targets():
                target.grants.release(owner, request.grant, request.chunks, Access.WRITE)
            return [False] * len(request.chunks)
        target, grant = found
        filled = self._take_unfilled(grant, request.chunks)
        if len(filled) < len(request.chunks):
            self._counts["refused"] += len(request.chunks) - len(filled)
        valid: set[int] = set()
        try:
            target.grants.release(owner, request.grant, list(filled))
            valid = await self._verify(target, grant, filled, request)
        finally:
            # Also if cancelled: the right to write has ended, so these cannot be committed again.
            target.commit([filled[index] for index in valid])
            self._unreserve(target, [filled[index] for index in valid])
            self._abandon(target, [filled[index] for index in filled if index not in valid])
        self._counts["committed"] += len(valid)
        self._counts["refused"] += len(filled) - len(valid)
        return [index in valid for index in request.chunks]

    async def _verify(
        self, target: PushTarget, grant: Grant, filled: dict[int, Reservation], request: Commit
    ) -> set[int]:
        """Return the reservations that match their checksums and whose writes have ended."""
        backoff = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        # A write that was in flight when the grant ended has a lease of its own, and may still change bytes.
        with anyio.move_on_after(STRAGGLER_SECONDS):
            while not all(reservation.lease.is_exclusive for reservation in filled.values()):  # noqa: ASYNC110
                await anyio.sleep(backoff.next())
        checksums = {
            index: request.checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]
            for at, index in enumerate(request.chunks)
        }
        indexes = [index for index, reservation in filled.items() if reservation.lease.is_exclusive]
        written = [
            (
                (one := filled[index]),
                checksums[index],
                grant.checksum_of(one.lease, target.offset_of(one), one.header.payload_bytes),
            )
            for index in indexes
        ]
        matches = await target.verify(written)
        return {index for index, ok in zip(indexes, matches, strict=True) if ok}

    def _abandon(self, target: PushTarget, reservations: Iterable[Reservation]) -> None:
        reservations = list(reservations)
        target.abandon(reservations)
        self._unreserve(target, reservations)

    def _unreserve(self, target: PushTarget, reservations: Sequence[Reservation]) -> None:
        target.reserved_bytes -= sum(reservation.lease.length for reservation in reservations)
        self._cache.expecting.withdraw([reservation.header.key for reservation in reservations])


def _headers(request: Reserve) -> list[ChunkHeader]:
    """Build the chunk headers of a request. Raises :class:`ProtocolError` if they are invalid."""
    keys, parents, lengths = split_keys(request.keys), split_keys(request.parents), request.payload_lengths
    if len(keys) > MAX_RESERVED:
        raise ProtocolError(f"the client reserves more than {MAX_RESERVED} chunks at once")
    if len(parents) != len(keys) or len(lengths) != len(keys) or len(request.namespace) != KEY_BYTES:
        raise ProtocolError("the reservation is inconsistent")
    if any(not 0 < length <= MAX_PAYLOAD for length in lengths):
        raise ProtocolError("the client reserves room for chunks of an invalid length")
    hashes = request.block_hashes or [b""] * len(keys)
    valid = range(0, (MAX_BLOCK_HASHES + 1) * BLOCK_HASH_BYTES, BLOCK_HASH_BYTES)
    if len(hashes) != len(keys) or any(len(each) not in valid for each in hashes):
        raise ProtocolError("the block hashes of the reservation are inconsistent")
    tokens = request.tokens or [0] * len(keys)
    if len(tokens) != len(keys) or any(not 0 <= each <= MAX_TOKENS for each in tokens):
        raise ProtocolError("the numbers of tokens of the reservation are inconsistent")
    return list(map(ChunkHeader, keys, parents, repeat(request.namespace), lengths, hashes, tokens))
