"""What one engine holds of the memory: leases to read, and reservations that its ranks may write to.

Neither expires, as an engine may be slow. Why peers have another table: see
``docs/decisions/0029-two-tables-of-leases.md``.
"""

from __future__ import annotations

import os
import select
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import anyio

from kvtier.cache import TieredCache
from kvtier.pipeline.found import FoundPrefix, Ready
from kvtier.rpc.wire import peer_credentials
from kvtier.tiers.host_memory import Reservation


@dataclass(slots=True, eq=False)
class ReadGrant:
    """Leases in one memory that were granted together, under consecutive numbers."""

    ticket: Ticket
    numbers: list[int]
    chunks: Ready
    left: int
    """Number of its leases that the engine still holds."""
    ended: set[int] = field(default_factory=set)
    """The positions of those that it has released, if it holds others."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A lookup with leases that the engine still holds."""

    number: int
    held: int = 0
    """Number of its leases that the engine holds."""
    grants: list[ReadGrant] = field(default_factory=list)
    pending: FoundPrefix | None = None
    """The part that has not been reported to the engine yet."""
    cancelled: bool = False

    def cancel(self) -> None:
        """Stop waiting for the pending part."""
        self.cancelled = True
        if self.pending is not None:
            self.pending.release()


class ReadLeases:
    """Leases of one engine to read, by numbers that no other lease of this process has."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        # Not by lease: a lookup has hundreds, and usually all of them are confirmed and released at once.
        self._grants: list[ReadGrant] = []
        """In the order of their numbers."""
        self._firsts: list[int] = []
        """The first number of each."""
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return sum(grant.left for grant in self._grants)

    @property
    def tickets(self) -> int:
        """Number of lookups that hold leases or are in flight."""
        return len(self._tickets)

    def begin(self, number: int) -> Ticket:
        """Begin a lookup, to which leases are granted later."""
        ticket = self._tickets[number] = Ticket(number)
        return ticket

    def find(self, number: int) -> Ticket | None:
        """Return a lookup that was not cancelled."""
        ticket = self._tickets.get(number)
        return None if ticket is None or ticket.cancelled else ticket

    def grant(self, ticket: Ticket, chunks: Ready) -> list[int]:
        """Take over leases, and return the number of each."""
        numbers = list(islice(self._numbers, len(chunks.leases)))
        grant = ReadGrant(ticket, numbers, chunks, len(numbers))
        self._grants.append(grant)
        self._firsts.append(numbers[0])
        ticket.grants.append(grant)
        ticket.held += len(numbers)
        return numbers

    def end_pending(self, number: int, found: FoundPrefix) -> None:
        """Note that the pending part of a lookup was released."""
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.pending is found:
            ticket.pending = None
            self.forget_if_empty(ticket)

    def forget(self, number: int) -> None:
        """Forget a cancelled lookup, whose leases have ended."""
        self._tickets.pop(number, None)

    def cancel(self, number: int) -> None:
        """End a lookup and every lease that it was granted."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()
            for grant in tuple(ticket.grants):
                self.release(grant.numbers)

    def release(self, leases: Sequence[int]) -> None:
        """Release leases; numbers that the engine does not hold are ignored."""
        for grant, start, count in self._runs(leases):
            if grant is None:
                continue
            if count == len(grant.numbers):
                grant.chunks.release_all()
            else:
                grant.ended.update(range(start, start + count))
                for index in range(start, start + count):
                    grant.chunks.release(index)
            grant.left -= count
            if not grant.left:
                at = bisect_left(self._firsts, grant.numbers[0])
                del self._grants[at], self._firsts[at]
            grant.ticket.held -= count
            self.forget_if_empty(grant.ticket)

    def _runs(self, leases: Sequence[int]) -> Iterator[tuple[ReadGrant | None, int, int]]:
        """Yield the grant of each lease, and its position there; the rest of a grant at once, as a count.

        The grant is ``None`` for a number that the engine does not hold.
        """
        at = 0
        while at < len(leases):
            index = bisect_right(self._firsts, leases[at]) - 1
            grant = self._grants[index] if index >= 0 else None
            start, count = 0 if grant is None else leases[at] - grant.numbers[0], 1
            if grant is not None and (start >= len(grant.numbers) or start in grant.ended):
                grant = None
            elif grant is not None and not grant.ended:
                most = min(len(grant.numbers) - start, len(leases) - at)
                if leases[at : at + most] == grant.numbers[start : start + most]:
                    count = most
            yield grant, start, count
            at += count

    def forget_if_empty(self, ticket: Ticket) -> None:
        """Forget a lookup without leases and without a pending part."""
        if ticket.held or (ticket.pending is not None and not ticket.cancelled):
            return
        ticket.grants.clear()  # Grants refer to the ticket: break the cycle, so that no GC run is needed.
        if self._tickets.get(ticket.number) is ticket:  # The engine may have reused its number.
            del self._tickets[ticket.number]

    def holds(self, leases: Sequence[int]) -> bool:
        """Return whether all of these leases are still held and their memory is still valid."""
        return all(grant is not None and grant.chunks.valid for grant, _, _ in self._runs(leases))

    def release_all(self, but: Sequence[int] = ()) -> None:
        """End every lookup, and release every lease ``but`` these, which a returning scheduler still uses."""
        for ticket in self._tickets.values():
            ticket.cancel()
        kept = set(but)
        self.release([number for grant in self._grants for number in grant.numbers if number not in kept])

    def clear(self) -> None:
        """Forget all lookups, whose leases have ended."""
        self._tickets.clear()


class PendingWrites:
    """What an engine has reserved, by lease number. Memory that a process may write to is not freed."""

    def __init__(self, cache: TieredCache, ranks: int) -> None:
        """``ranks``: that must have finished with their slices of each reservation."""
        self._cache = cache
        self._ranks = ranks
        self._open: dict[int, Reservation] = {}
        self.reserved_bytes = 0
        """Bytes of the arena that are reserved for it."""
        self._departed: dict[WriterProcess, tuple[int, set[int]]] = {}
        """Processes without a connection that may write to reservations: the rank of each, and which ones."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int, write: Reservation) -> None:
        """Add a reservation."""
        self._open[number] = write
        self.reserved_bytes += _arena_bytes(write)

    def _remove(self, number: int) -> Reservation:
        write = self._open.pop(number)
        self.reserved_bytes -= _arena_bytes(write)
        return write

    def void_all(self) -> None:
        """Void all. Without a scheduler, it is not known which of them a worker is filling."""
        self.void(list(self._open.values()))

    def abandon_after(self, seen: int) -> None:
        """Drop reservations after the last one that the engine knows of."""
        self.abandon([number for number in self._open if number > seen])

    def worker_writes(self, rank: int, client: int, filling: Sequence[int] = ()) -> None:
        """Process that a client writes to nothing that was granted so far, but ``filling``."""
        others = [process for process in self._departed if not client or process.client != client]
        self._stop(rank, self._filled_by(rank) - set(filling), others)

    def worker_left(self, rank: int, process: WriterProcess | None) -> bool:
        """Void what a rank was filling; return whether to call :meth:`worker_exited` later.

        ``process``: ``None`` if it writes no more.
        """
        filled = self._filled_by(rank)
        self.void([self._open[number] for number in filled])
        if process is None or process.exited:
            self._stop(rank, filled, self._departed)
        elif known := set(filter(process.may_fill, filled)):
            self._departed[process] = rank, known
            return True
        return False

    def awaits(self, process: WriterProcess) -> bool:
        """Whether a departed process may still write to reservations."""
        rank, known = self._departed[process]
        return not known.isdisjoint(self._filled_by(rank))

    def worker_exited(self, process: WriterProcess) -> None:
        """Process that a departed process has exited, or writes to nothing any more."""
        rank, known = self._departed.pop(process)
        self._stop(rank, known, self._departed)

    def _stop(self, rank: int, numbers: set[int], others: Iterable[WriterProcess]) -> None:
        """Record that a process writes to no slices of its rank; departed ``others`` may still do so."""
        departed = [self._departed[process] for process in others]
        kept = set[int]().union(*(known for other, known in departed if other == rank))
        self.give_up(sorted(numbers - kept), rank)

    def _filled_by(self, rank: int) -> set[int]:
        """Return the reservations to which a rank may write."""
        return {number for number, write in self._open.items() if not write.ranks >> rank & 1}

    def give_up(self, leases: Sequence[int], rank: int) -> None:
        """Record that a rank will not fill its slices. Memory is freed after the last rank has finished."""
        self.void([self._open[number] for number in leases if number in self._open])
        self.discard(self.finish(leases, rank))

    def void(self, writes: Sequence[Reservation]) -> None:
        """Let others store these chunks. Their memory is kept until all ranks have finished."""
        fresh = [write for write in writes if not write.void]
        self._cache.cancel([write for write in fresh if write.in_catalog])
        for write in fresh:
            write.void = True

    def finish(self, leases: Sequence[int], rank: int) -> list[Reservation]:
        """Record that a rank has stopped writing to its slices; return what all ranks have finished."""
        done = []
        for number in leases:
            write = self._open.get(number)
            if write is None:
                continue
            write.ranks |= 1 << rank
            if write.ranks.bit_count() == self._ranks:
                done.append(self._remove(number))
        return done

    def abandon(self, leases: Sequence[int]) -> None:
        """Drop reservations that have not been passed to any rank."""
        self.discard([self._remove(number) for number in leases if number in self._open])

    def discard(self, writes: Sequence[Reservation]) -> None:
        """Release the memory of reservations to which no rank writes."""
        self.void(writes)
        for write in writes:
            write.give_up()

    def close(self) -> None:
        """Release all to which no process may write: no client is connected. Idempotent."""
        self.void_all()
        written = [known & self._filled_by(rank) for rank, known in self._departed.values()]
        kept = {number for number in set[int]().union(*written) if self._open[number].in_arena}
        self.abandon([number for number in self._open if number not in kept])

    @property
    def void_bytes(self) -> int:
        """Those of :attr:`reserved_bytes` that are out of use, because a process may still write to them."""
        return sum(_arena_bytes(write) for write in self._open.values() if write.void)

    @property
    def all_void(self) -> bool:
        """Whether no chunk is being stored."""
        return all(write.void for write in self._open.values())


def _arena_bytes(write: Reservation) -> int:
    return write.lease.length if write.in_arena else 0


SO_PEERPIDFD = 77
"""Of Linux 6.5. Unlike ``SO_PEERCRED``, it also works for a process in another PID namespace."""


class WriterProcess:
    """The process at the other end of a Unix socket. Created with :meth:`of`."""

    def __init__(self, fd: int | None, pid: int) -> None:
        """Takes ownership of the pidfd; ``None`` without one. ``pid``: 0 in another PID namespace."""
        self._fd = fd
        self._pid = pid
        self.client = 0
        """See :class:`~kvtier.bridge.protocol.Hello`."""
        self._first, self._filling = 0, frozenset[int]()

    @classmethod
    def of(cls, connected: socket.socket) -> WriterProcess:
        """Return the process that has connected."""
        pid, _ = peer_credentials(connected)
        try:
            return cls(connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD), pid)
        except OSError:  # An older kernel, no file descriptor, or it has exited.
            try:
                return cls(os.pidfd_open(pid), pid)
            except OSError:
                return cls(None, pid)

    def welcomed(self, client: int, first: int, filling: Iterable[int]) -> None:
        """Note what it may write to: reservations from ``first`` on, and those that it is ``filling``."""
        self.client, self._first, self._filling = client, first, frozenset(filling)

    def may_fill(self, number: int) -> bool:
        """Whether it may write to a reservation that was granted before the end of its connection."""
        return number >= self._first or number in self._filling

    @property
    def watched(self) -> bool:
        """Whether its exit will be noticed."""
        return self._fd is not None or self._pid > 0

    @property
    def exited(self) -> bool:
        """Whether the process has exited: its memory is unmapped, and its devices have stopped."""
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            # With another process that has its PID meanwhile, it counts as running.
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    async def wait_exited(self) -> None:
        """Wait until the process has exited; forever without a pidfd."""
        if self._fd is None:
            await anyio.sleep_forever()
        else:
            await anyio.wait_readable(self._fd)

    def close(self) -> None:
        """Stop watching."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
