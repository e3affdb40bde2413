"""Reservations of an engine, against a model: memory is leased as long as a process may write to it."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.bridge.leases import PendingWrites
from kvtier.memory.header import ChunkHeader
from kvtier.memory.slices import PAGE_BYTES, Slices
from kvtier.testing.backend import make_key
from kvtier.tiers.host_memory import Reservation

RANKS = 2
ranks = st.integers(0, RANKS - 1)
pick = st.randoms(use_true_random=False)


class NoCatalog:
    """The part of a cache that is told of chunks that will not be complete."""

    def cancel(self, reservations: Any) -> None:
        """Forget nothing: the model does not look up."""


class Process:
    """A worker's process, which fills what is granted from its start on."""

    def __init__(self, rank: int, client: int, first: int) -> None:
        self.rank, self.client, self.first = rank, client, first
        self.exited = False

    def may_fill(self, number: int) -> bool:
        return number >= self.first


class Writes(RuleBasedStateMachine):
    """An engine whose workers commit, give up, disconnect, return, are replaced and exit."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Slices(64 * PAGE_BYTES)
        self.writes = PendingWrites(NoCatalog(), RANKS)  # type: ignore[arg-type]
        self.numbers, self.clients = itertools.count(1), itertools.count(1)
        self.writers: dict[int, set[Process]] = {}
        """The processes that may write to each reservation, whether connected or not."""
        self.connected: dict[int, Process] = {rank: self.new_process(rank) for rank in range(RANKS)}
        self.departed: dict[Process, None] = {}
        """In the order in which they have disconnected, so that an example can be repeated."""

    def new_process(self, rank: int) -> Process:
        return Process(rank, next(self.clients), next(self.numbers))

    def stops(self, process: Process, numbers: list[int]) -> None:
        for number in numbers:
            self.writers.get(number, set()).discard(process)

    def filled_by(self, process: Process) -> list[int]:
        return [number for number, writers in self.writers.items() if process in writers]

    @precondition(lambda self: len(self.connected) == RANKS)
    @rule()
    def reserve(self) -> None:
        lease = self.memory.allocate(PAGE_BYTES)
        if lease is not None:
            number = next(self.numbers)
            header = ChunkHeader(make_key(number), make_key(0), bytes(32), PAGE_BYTES)
            self.writes.add(number, Reservation(header, lease))
            self.writers[number] = set(self.connected.values())

    @precondition(lambda self: self.connected)
    @rule(choice=pick, commits=st.booleans())
    def finish(self, choice: Any, *, commits: bool) -> None:
        process = choice.choice(list(self.connected.values()))
        numbers = [number for number in self.filled_by(process) if choice.random() < 0.5]
        if commits:
            for write in self.writes.finish(numbers, process.rank):
                write.lease.release()
        else:
            self.writes.give_up(numbers, process.rank)
        self.stops(process, numbers)

    @precondition(lambda self: self.connected)
    @rule(choice=pick, exits=st.booleans())
    def disconnect(self, choice: Any, *, exits: bool) -> None:
        process = self.connected.pop(choice.choice(list(self.connected)))
        process.exited = exits
        if self.writes.worker_left(process.rank, process):  # type: ignore[arg-type]
            self.departed[process] = None
        if exits:
            self.stops(process, self.filled_by(process))

    @precondition(lambda self: len(self.connected) < RANKS)
    @rule(choice=pick, returns=st.booleans())
    def connect(self, choice: Any, *, returns: bool) -> None:
        rank = choice.choice([rank for rank in range(RANKS) if rank not in self.connected])
        before = [process for process in self.departed if process.rank == rank and not process.exited]
        if returns and before:
            process = choice.choice(before)
            filling = [number for number in self.filled_by(process) if choice.random() < 0.5]
            self.stops(process, list(set(self.filled_by(process)) - set(filling)))
        else:
            process, filling = self.new_process(rank), []
        self.writes.worker_writes(rank, process.client, filling)
        self.connected[rank] = process

    @precondition(lambda self: self.departed.keys() - self.connected.values())
    @rule(choice=pick)
    def exit(self, choice: Any) -> None:
        process = choice.choice([each for each in self.departed if each not in self.connected.values()])
        process.exited = True
        self.writes.worker_exited(process)  # type: ignore[arg-type]
        self.departed.pop(process)
        self.stops(process, self.filled_by(process))

    @invariant()
    def memory_is_leased_while_a_process_may_write_to_it(self) -> None:
        written = [number for number, writers in self.writers.items() if writers]
        assert self.memory.used >= len(written) * PAGE_BYTES
        assert self.writes.reserved_bytes == self.memory.used
        assert self.writes.void_bytes <= self.writes.reserved_bytes

    def teardown(self) -> None:
        """All processes exit: nothing stays out of use."""
        for process in list(self.connected.values()):
            self.writes.worker_writes(process.rank, process.client)
        for process in list(self.departed):
            self.writes.worker_exited(process)  # type: ignore[arg-type]
        self.writes.close()
        assert self.memory.used == 0
        assert not len(self.writes)


Writes.TestCase.settings = hypothesis_settings(deadline=None, max_examples=80, stateful_step_count=40)
test_memory_is_leased_while_a_process_may_write_to_it = Writes.TestCase
