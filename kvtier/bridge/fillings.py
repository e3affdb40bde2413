"""Reservations of one engine, and the ranks that may still write to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cache import TieredCache
from kvtier.pipeline.store import Reservation

if TYPE_CHECKING:
    from kvtier.bridge.writers import WriterProcess
    from kvtier.peers.kv_transfer import KVTransfer as Transfer
    from kvtier.peers.staging.buffers import Staging


@dataclass(slots=True)
class Filling:
    """A reservation, and the ranks that have finished with their slices of it."""

    reservation: Reservation
    transfer: Transfer | None = None
    """The transfer that pushes it, if it is in ``staging``."""
    staging: Staging | None = None
    ranks: int = 0
    """Bit mask of the ranks that have stopped writing to it."""
    void: bool = False
    """Whether a rank did not fill its slice. If it is in the arena, it is not in the catalog then."""
    continued: bytes = b""
    """See :class:`~kvtier.bridge.protocol.Run`."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena; 0 in a staging buffer."""
        return self.reservation.lease.length if self.transfer is None else 0


class Fillings:
    """What an engine has reserved, by lease number. Memory that a process may write to is not freed."""

    def __init__(self, cache: TieredCache, ranks: int) -> None:
        """``ranks``: that must have finished with their slices of each reservation."""
        self._cache = cache
        self._ranks = ranks
        self._open: dict[int, Filling] = {}
        self._bytes = 0
        self._departed: dict[WriterProcess, tuple[int, set[int]]] = {}
        """Processes without a connection that may write to reservations: the rank of each, and which ones."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int, filling: Filling) -> None:
        """Add a reservation."""
        self._open[number] = filling
        self._bytes += filling.arena_bytes

    def _remove(self, number: int) -> Filling:
        filling = self._open.pop(number)
        self._bytes -= filling.arena_bytes
        return filling

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
        return {number for number, filling in self._open.items() if not filling.ranks >> rank & 1}

    def give_up(self, leases: Sequence[int], rank: int) -> None:
        """Record that a rank will not fill its slices. Memory is freed after the last rank has finished."""
        self.void([self._open[number] for number in leases if number in self._open])
        self.discard(self.finish(leases, rank))

    def void(self, fillings: Sequence[Filling]) -> None:
        """Let others store these chunks. Their memory is kept until all ranks have finished."""
        fresh = [filling for filling in fillings if not filling.void]
        self._cache.void([filling.reservation for filling in fresh if filling.transfer is None])
        for filling in fresh:
            filling.void = True

    def finish(self, leases: Sequence[int], rank: int) -> list[Filling]:
        """Record that a rank has stopped writing to its slices; return what all ranks have finished."""
        done = []
        for number in leases:
            filling = self._open.get(number)
            if filling is None:
                continue
            filling.ranks |= 1 << rank
            if filling.ranks.bit_count() == self._ranks:
                done.append(self._remove(number))
        return done

    def abandon(self, leases: Sequence[int]) -> None:
        """Drop reservations that have not been passed to any rank."""
        self.discard([self._remove(number) for number in leases if number in self._open])

    def discard(self, fillings: Sequence[Filling]) -> None:
        """Release the memory of reservations to which no rank writes."""
        self.void(fillings)
        for filling in fillings:
            if filling.transfer is None:
                filling.reservation.lease.release()
            else:
                filling.transfer.give_up(filling.reservation)

    def close(self) -> None:
        """Release all to which no process may write: no client is connected. Idempotent."""
        self.void_all()
        written = [known & self._filled_by(rank) for rank, known in self._departed.values()]
        kept = {number for number in set[int]().union(*written) if self._open[number].staging is None}
        self.abandon([number for number in self._open if number not in kept])

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the arena that are reserved for it."""
        return self._bytes

    @property
    def void_bytes(self) -> int:
        """Those of them that are out of use, because a process may still write to them."""
        return sum(filling.arena_bytes for filling in self._open.values() if filling.void)

    @property
    def all_void(self) -> bool:
        """Whether no chunk is being stored."""
        return all(filling.void for filling in self._open.values())
