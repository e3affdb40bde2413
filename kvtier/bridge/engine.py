"""What one engine holds in the cache process, and what it may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.bridge.handing import Handing
from kvtier.bridge.protocol import Commit, Found, Hello, Reserve, Reserved
from kvtier.bridge.protocol import LookUp as AskLookUp
from kvtier.cache import TieredCache
from kvtier.errors import ProtocolError
from kvtier.header import ChunkHeader, object_bytes
from kvtier.keys import ChunkKey, split_keys
from kvtier.lookup import FoundChunk, LookUp
from kvtier.pipeline.discover import Expected
from kvtier.pipeline.store import Reservation

if TYPE_CHECKING:
    from kvtier.peers.staging import EngineStaging, Staging

NO_LEASE = 0


@dataclass(slots=True)
class Filling:
    """A reservation and the ranks that have filled their slices of it."""

    reservation: Reservation
    handing: Handing | None = None
    """What it is to be pushed by, where it is in ``staging``."""
    staging: Staging | None = None
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Ticket:
    """A look-up whose leases the engine has not all given back."""

    leases: set[int] = field(default_factory=set)
    coming: LookUp | None = None
    """What it has not been told of yet."""
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for the rest any longer."""
        self.cancelled = True
        if self.coming is not None:
            self.coming.release()


class Engine:
    """Leases, reservations and look-ups of one engine. They end with it."""

    def __init__(self, cache: TieredCache, hello: Hello, numbers: Iterator[int]) -> None:
        self.name = hello.engine
        self.layout = hello.layout
        self.namespace = hello.namespace
        self.staging: EngineStaging | None = None
        """Where its workers have asked for a buffer."""
        self._cache = cache
        self._numbers = numbers
        self._leases: dict[int, tuple[FoundChunk, int]] = {}
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
        ticket = self._tickets[ask.ticket] = Ticket()
        ready = found.take_ready()
        answer = self._grant(ask.ticket, ticket, ready, fetching=found.under_way)
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
        lengths = [object_bytes(self.layout.payload_bytes(whole))] * chunks
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
        return self._grant(number, ticket, found.chunks, fetching=0)

    def _grant(self, number: int, ticket: Ticket, chunks: Sequence[FoundChunk], *, fetching: int) -> Found:
        leases = []
        staging = self._buffers
        behind = len(self._cache.hierarchy.tiers)
        for chunk in chunks:
            lease = next(self._numbers)
            self._leases[lease] = (chunk, number)
            leases.append(lease)
        ticket.leases.update(leases)
        if not ticket.leases and not fetching:
            del self._tickets[number]
        return Found(
            ticket=number,
            leases=leases,
            offsets=[chunk.lease.offset for chunk in chunks],
            sources=[behind if chunk.staged else chunk.source for chunk in chunks],
            fetching=fetching,
            staging=0 if staging is None else staging.number,
        )

    def cancel(self, number: int) -> None:
        """End a look-up and every lease that it was given."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()
            self.release(tuple(ticket.leases))

    def release(self, leases: Sequence[int]) -> None:
        """End leases; numbers that are not the engine's are passed over."""
        for number in leases:
            chunk, ticket_number = self._leases.pop(number, (None, 0))
            if chunk is None:
                continue
            chunk.release()
            ticket = self._tickets.get(ticket_number)
            if ticket is not None:
                ticket.leases.discard(number)
                if not ticket.leases:
                    del self._tickets[ticket_number]

    def holds(self, leases: Sequence[int]) -> bool:
        """Whether every one of these leases still stands."""
        return all(number in self._leases and self._leases[number][0].stands for number in leases)

    def keep_only(self, leases: Sequence[int]) -> None:
        """A new scheduler took over: end every look-up and every lease that it does not know of."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self.release(tuple(self._leases.keys() - set(leases)))

    def reserve(self, ask: Reserve, handing: Handing | None = None) -> Reserved:
        """Room for consecutive chunks; lease 0 for those that are refused.

        Where a hand-over is named, in the staging buffer, for those that ``handing`` wants from there.
        """
        keys = _keys(ask.keys)
        leases, offsets = [], []
        parent = ChunkKey(ask.parent)
        staging = self._buffers if ask.hand_over else None
        for index, key in enumerate(keys):
            tokens = ask.last_tokens if index == len(keys) - 1 else self.layout.chunk_tokens
            header = ChunkHeader(key, parent, self.namespace, self.layout.payload_bytes(tokens))
            if ask.hand_over:
                filling = _stage(staging, handing, header)
            else:
                reservation = self._cache.reserve(header)
                filling = None if reservation is None else Filling(reservation)
            parent = key
            if filling is None:
                leases.append(NO_LEASE)
                offsets.append(0)
                continue
            number = next(self._numbers)
            self._fillings[number] = filling
            leases.append(number)
            offsets.append(filling.reservation.lease.offset)
        return Reserved(ask.ticket, leases, offsets, 0 if staging is None else staging.number)

    def commit(self, commit: Commit, rank: int) -> None:
        """One rank has filled its slices; chunks that all ranks have filled are READY.

        Those in the staging buffer first: a hand-over then knows that they go from there.
        """
        complete = []
        for number in commit.leases:
            filling = self._fillings.get(number)
            if filling is None:
                continue
            filling.ranks.add(rank)
            if len(filling.ranks) < self.layout.ranks:
                continue
            del self._fillings[number]
            if filling.handing is not None and filling.staging is not None:
                filling.handing.filling -= 1
                filling.handing.staged(filling.staging, filling.reservation)
            else:
                complete.append(filling.reservation)
        self._cache.commit(complete)

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        for number in leases:
            filling = self._fillings.pop(number, None)
            if filling is None:
                continue
            if filling.handing is not None:
                filling.handing.filling -= 1
                filling.reservation.lease.release()
            else:
                self._cache.abandon(filling.reservation)

    def close(self) -> None:
        """The engine is gone, and so is all that it held."""
        self.keep_only(())
        self.abandon(tuple(self._fillings))
        self._tickets.clear()

    def status(self) -> dict[str, object]:
        """What it holds now."""
        return {
            "name": self.name,
            "leases": len(self._leases),
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
