"""What one engine holds in the cache process, and what it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING

from kvtier.bridge.handing import Handing
from kvtier.bridge.protocol import MAX_RESERVED_CHUNKS, Found, Hello, Reserve, Reserved, Run
from kvtier.bridge.protocol import LookUp as AskLookUp
from kvtier.cache import TieredCache
from kvtier.errors import ProtocolError
from kvtier.header import ChunkHeader, object_bytes
from kvtier.keys import KEY_BYTES, ChunkKey, split_keys
from kvtier.pipeline.discover import Expected
from kvtier.pipeline.found import LookUp, Ready
from kvtier.pipeline.store import Reservation

if TYPE_CHECKING:
    from kvtier.peers.staging import EngineStaging, Staging

NO_LEASE = 0


@dataclass(slots=True)
class Filling:
    """A reservation and the ranks that are done with their slices of it."""

    reservation: Reservation
    handing: Handing | None = None
    """What it is to be pushed by, where it is in ``staging``."""
    staging: Staging | None = None
    ranks: int = 0
    """A bit for each that writes into it no longer."""
    void: bool = False
    """Whether one of them has not filled its slice."""


@dataclass(slots=True, eq=False)
class Grant:
    """Leases in one memory that were given out together, under consecutive numbers."""

    ticket: Ticket
    numbers: list[int]
    chunks: Ready


@dataclass(slots=True, eq=False)
class Ticket:
    """A look-up whose leases the engine has not all given back."""

    number: int
    left: int = 0
    """How many of its leases the engine has."""
    grants: list[Grant] = field(default_factory=list)
    coming: LookUp | None = None
    """What it has not been told of yet."""
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for the rest any longer."""
        self.cancelled = True
        if self.coming is not None:
            self.coming.release()


def _no_hand_over(ticket: int) -> Handing | None:
    return None


class Engine:
    """Leases, reservations and look-ups of one engine. They end with it."""

    def __init__(self, cache: TieredCache, hello: Hello, numbers: Iterator[int]) -> None:
        self.name = hello.engine
        self.layout = hello.layout
        self.namespace = hello.namespace
        self.staging: EngineStaging | None = None
        """Where its workers have asked for a buffer."""
        self._whole_payload = self.layout.payload_bytes(self.layout.chunk_tokens)
        self._whole_bytes = object_bytes(self._whole_payload)
        self._cache = cache
        self._numbers = numbers
        self._granted: dict[int, Grant] = {}
        """By the number of each lease that it has."""
        self._tickets: dict[int, Ticket] = {}
        self._fillings: dict[int, Filling] = {}

    def look_up(self, ask: AskLookUp) -> tuple[Found, LookUp | None]:
        """The answer to give at once, and what is still being fetched or asked for."""
        keys = _keys(ask.keys)
        found = self._cache.look_up(
            keys,
            self._expected(len(keys), ask.tokens),
            expect=ask.expect_seconds,
            expect_chunks=ask.expect_chunks,
            staged=self._buffers,
        )
        ticket = self._tickets[ask.ticket] = Ticket(ask.ticket)
        answer = self._grant(ticket, found.take_ready(), fetching=found.under_way)
        if not found.under_way:
            return answer, None
        ticket.coming = found
        return answer, found

    @property
    def _buffers(self) -> Staging | None:
        return None if self.staging is None else self.staging.current

    def _expected(self, chunks: int, tokens: int) -> Expected:
        whole = self.layout.chunk_tokens
        last = tokens - (chunks - 1) * whole
        if chunks and not 0 < last <= whole:
            raise ProtocolError(f"{tokens} tokens are not {chunks} chunks of {whole}")
        lengths = [self._whole_bytes] * chunks
        if last != whole:
            lengths[-1:] = [object_bytes(self.layout.payload_bytes(last))] if chunks else []
        return Expected(self.namespace, lengths)

    def fetched(self, number: int, found: LookUp) -> Found | None:
        """The final answer of a look-up, or ``None`` where it was cancelled meanwhile."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.cancelled:
            found.release()
            self._tickets.pop(number, None)
            return None
        ticket.coming = None
        return self._grant(ticket, found.take_ready(), fetching=0)

    def _grant(self, ticket: Ticket, ready: Sequence[Ready], *, fetching: int) -> Found:
        staging = self._buffers
        behind = len(self._cache.hierarchy.tiers)
        found = Found(ticket.number, [], [], [], fetching, 0 if staging is None else staging.number)
        for chunks in ready:
            count = len(chunks.leases)
            numbers = list(islice(self._numbers, count))
            grant = Grant(ticket, numbers, chunks)
            self._granted.update(dict.fromkeys(numbers, grant))
            ticket.grants.append(grant)
            ticket.left += count
            found.leases.extend(numbers)
            found.offsets.extend(chunks.leases.offsets)
            found.sources.extend(chunks.sources if chunks.staged is None else repeat(behind, count))
        if not fetching:
            self._forget_if_empty(ticket)
        return found

    def cancel(self, number: int) -> None:
        """End a look-up and every lease that it was given."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()
            for grant in tuple(ticket.grants):
                self.release(grant.numbers)

    def release(self, leases: Sequence[int]) -> None:
        """End leases; numbers that are not the engine's are passed over."""
        grants = [self._granted.pop(number, None) for number in leases]
        first = next(iter(grants), None)
        if first is not None and leases == first.numbers and grants.count(first) == len(grants):
            # As mostly: all that were granted together, at once.
            first.chunks.release_all()
            self._returned(first, len(grants))
            return
        for number, grant in zip(leases, grants, strict=True):
            if grant is not None:
                grant.chunks.release(number - grant.numbers[0])
                self._returned(grant, 1)

    def _returned(self, grant: Grant, count: int) -> None:
        grant.ticket.left -= count
        self._forget_if_empty(grant.ticket)

    def _forget_if_empty(self, ticket: Ticket) -> None:
        if ticket.left:
            return
        ticket.grants.clear()  # They refer to it, too: a cycle would wait for the collector.
        if self._tickets.get(ticket.number) is ticket:  # An engine may have used its number again.
            del self._tickets[ticket.number]

    def holds(self, leases: Sequence[int]) -> bool:
        """Whether every one of these leases still stands, and so does the memory that it is on."""
        grants = set(map(self._granted.get, leases))
        return all(grant is not None and grant.chunks.stands for grant in grants)

    def keep_only(self, leases: Sequence[int]) -> None:
        """A new scheduler took over: end every look-up and every lease that it does not know of."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self.release(tuple(self._granted.keys() - set(leases)))

    def reserve(self, ask: Reserve, find: Callable[[int], Handing | None] = _no_hand_over) -> Reserved:
        """Reserve room for the chunks of many requests; lease 0 for those that are refused.

        ``find`` finds the hand-over that a run names: room for it is in the staging buffer. Raises
        :class:`ProtocolError`.
        """
        if sum(len(run.keys) for run in ask.runs) > MAX_RESERVED_CHUNKS * KEY_BYTES:
            raise ProtocolError(f"a reservation of more than {MAX_RESERVED_CHUNKS} chunks")
        # All of them, before anything is reserved: one that cannot be is refused with the rest.
        runs = [(run.hand_over, self._headers(run)) for run in ask.runs]
        in_arena = [header for hand_over, headers in runs if not hand_over for header in headers]
        reserved = iter(self._cache.reserve_all(in_arena))
        staging = self._buffers
        fillings: list[Filling | None] = []
        for hand_over, headers in runs:
            if hand_over:
                handing = find(hand_over)
                fillings += [_stage(staging, handing, header) for header in headers]
            else:
                chunks = islice(reserved, len(headers))
                fillings += [None if chunk is None else Filling(chunk) for chunk in chunks]
        leases, offsets = [NO_LEASE] * len(fillings), [0] * len(fillings)
        for index, filling in enumerate(fillings):
            if filling is not None:
                leases[index] = number = next(self._numbers)
                offsets[index] = filling.reservation.lease.offset
                self._fillings[number] = filling
        return Reserved(ask.ticket, leases, offsets, 0 if staging is None else staging.number)

    def _headers(self, run: Run) -> list[ChunkHeader]:
        keys = _keys(run.keys)
        if len(run.parent) != KEY_BYTES or not 0 < run.last_tokens <= self.layout.chunk_tokens:
            raise ProtocolError(
                f"{len(keys)} chunks of which the last has {run.last_tokens} tokens cannot be"
            )
        parents = [ChunkKey(run.parent), *keys[:-1]]
        payloads = [self._whole_payload] * len(keys)
        if run.last_tokens != self.layout.chunk_tokens and keys:
            payloads[-1] = self.layout.payload_bytes(run.last_tokens)
        return list(map(ChunkHeader, keys, parents, repeat(self.namespace), payloads))

    def commit(self, leases: Sequence[int], rank: int) -> None:
        """One rank has filled its slices; chunks that all ranks have filled are READY.

        Those in the staging buffer first: a hand-over then knows that they go from there.
        """
        complete, void = [], []
        for filling in self._done_with(leases, rank):
            if filling.void:
                void.append(filling)
            elif filling.handing is not None and filling.staging is not None:
                filling.handing.filling -= 1
                filling.handing.staged(filling.staging, filling.reservation)
            else:
                complete.append(filling.reservation)
        self._cache.commit(complete)
        self._discard(void)

    def give_up(self, leases: Sequence[int], rank: int) -> None:
        """One rank will not fill its slices. Others may be writing theirs: memory is free after the last."""
        for number in leases:
            if (filling := self._fillings.get(number)) is not None:
                filling.void = True
        self._discard(self._done_with(leases, rank))

    def _done_with(self, leases: Sequence[int], rank: int) -> list[Filling]:
        """Note that a rank writes into these no longer; those into which none does any longer."""
        done = []
        for number in leases:
            filling = self._fillings.get(number)
            if filling is None:
                continue
            filling.ranks |= 1 << rank
            if filling.ranks.bit_count() == self.layout.ranks:
                del self._fillings[number]
                done.append(filling)
        return done

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled, and no rank has been told of them."""
        fillings = [self._fillings.pop(number, None) for number in leases]
        self._discard([filling for filling in fillings if filling is not None])

    def _discard(self, fillings: Sequence[Filling]) -> None:
        in_arena = []
        for filling in fillings:
            if filling.handing is None:
                in_arena.append(filling.reservation)
            else:
                filling.handing.filling -= 1
                filling.reservation.lease.release()
        self._cache.abandon(in_arena)

    def close(self) -> None:
        """The engine is gone, and so is all that it held."""
        self.keep_only(())
        self.abandon(tuple(self._fillings))
        self._tickets.clear()

    def status(self) -> dict[str, object]:
        """What it holds now."""
        return {
            "name": self.name,
            "leases": len(self._granted),
            "reservations": len(self._fillings),
            "tickets": len(self._tickets),
        }


def _stage(staging: Staging | None, handing: Handing | None, header: ChunkHeader) -> Filling | None:
    """Room in the staging buffer, where a chunk is to be pushed from there."""
    if staging is None or handing is None or not handing.stages(header.key):
        return None
    reservation = staging.take(header)
    if reservation is None:
        return None
    handing.filling += 1
    return Filling(reservation, handing, staging)


def _keys(joined: bytes) -> list[ChunkKey]:
    try:
        return split_keys(joined)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
