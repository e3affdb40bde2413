"""What one engine holds in the cache process, and what it may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.arena import Lease
from kvtier.bridge.protocol import Commit, Found, Hello, Reserve, Reserved
from kvtier.bridge.protocol import LookUp as AskLookUp
from kvtier.cache import FoundChunk, LookUp, TieredCache
from kvtier.errors import ProtocolError
from kvtier.header import ChunkHeader, object_bytes
from kvtier.keys import ChunkKey, split_keys
from kvtier.pipeline.discover import Expected
from kvtier.pipeline.store import Reservation

NO_LEASE = 0


@dataclass(slots=True)
class Filling:
    """A reservation and the ranks that have filled their slices of it."""

    reservation: Reservation
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
        self._cache = cache
        self._numbers = numbers
        self._leases: dict[int, tuple[Lease, int]] = {}
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
        )
        ticket = self._tickets[ask.ticket] = Ticket()
        ready = found.take_ready()
        answer = self._grant(ask.ticket, ticket, ready, fetching=found.under_way)
        if not found.under_way:
            return answer, None
        ticket.coming = found
        return answer, found

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
        for chunk in chunks:
            lease = next(self._numbers)
            self._leases[lease] = (chunk.lease, number)
            leases.append(lease)
        ticket.leases.update(leases)
        if not ticket.leases and not fetching:
            del self._tickets[number]
        return Found(
            ticket=number,
            leases=leases,
            offsets=[chunk.lease.offset for chunk in chunks],
            sources=[chunk.source for chunk in chunks],
            fetching=fetching,
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
            lease, ticket_number = self._leases.pop(number, (None, 0))
            if lease is None:
                continue
            lease.release()
            ticket = self._tickets.get(ticket_number)
            if ticket is not None:
                ticket.leases.discard(number)
                if not ticket.leases:
                    del self._tickets[ticket_number]

    def holds(self, leases: Sequence[int]) -> bool:
        """Whether every one of these leases still stands."""
        return all(number in self._leases for number in leases)

    def keep_only(self, leases: Sequence[int]) -> None:
        """A new scheduler took over: end every look-up and every lease that it does not know of."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self.release(tuple(self._leases.keys() - set(leases)))

    def reserve(self, ask: Reserve) -> Reserved:
        """Room for consecutive chunks; lease 0 for those that are refused."""
        keys = _keys(ask.keys)
        leases, offsets = [], []
        parent = ChunkKey(ask.parent)
        for index, key in enumerate(keys):
            tokens = ask.last_tokens if index == len(keys) - 1 else self.layout.chunk_tokens
            header = ChunkHeader(key, parent, self.namespace, self.layout.payload_bytes(tokens))
            reservation = self._cache.reserve(header)
            parent = key
            if reservation is None:
                leases.append(NO_LEASE)
                offsets.append(0)
                continue
            number = next(self._numbers)
            self._fillings[number] = Filling(reservation)
            leases.append(number)
            offsets.append(reservation.lease.offset)
        return Reserved(ask.ticket, leases, offsets)

    def commit(self, commit: Commit, rank: int) -> None:
        """One rank has filled its slices; chunks that all ranks have filled are READY."""
        complete = []
        for number in commit.leases:
            filling = self._fillings.get(number)
            if filling is None:
                continue
            filling.ranks.add(rank)
            if len(filling.ranks) == self.layout.ranks:
                complete.append(self._fillings.pop(number).reservation)
        self._cache.commit(complete)

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        for number in leases:
            filling = self._fillings.pop(number, None)
            if filling is not None:
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


def _keys(joined: bytes) -> list[ChunkKey]:
    try:
        return split_keys(joined)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
