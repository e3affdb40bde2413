"""The conformance suite of eviction policies: for LRU, for other orders, and with broken policies."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import EvictionConformance


@pytest.mark.usefixtures("either_core")
class TestLru(EvictionConformance):
    policy = LruPolicy


class Fifo(EvictionPolicy):
    """First in, first out: a parent is in front of its children."""

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        self.rows: dict[int, None] = {}

    def added(self, rows: Sequence[int], now: float) -> None:
        self.rows.update(dict.fromkeys(rows))

    def used(self, rows: Sequence[int], now: float) -> None: ...

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        for row in rows:
            del self.rows[row]

    def victims(self) -> Iterator[int]:
        return iter(self.rows)


class Clock(Fifo):
    """A second chance for chunks that were used: the search changes the policy's state."""

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self.was_used = array("b")

    def added(self, rows: Sequence[int], now: float) -> None:
        super().added(rows, now)
        self.was_used.frombytes(bytes(max(0, max(rows, default=-1) + 1 - len(self.was_used))))

    def used(self, rows: Sequence[int], now: float) -> None:
        for row in rows:
            if row in self.rows:
                self.was_used[row] = 1

    def victims(self) -> Iterator[int]:
        for row in list(self.rows):
            if self.was_used[row]:
                self.was_used[row] = 0
                self.rows[row] = self.rows.pop(row)
        return super().victims()


class TestFifo(EvictionConformance):
    policy = Fifo


class TestClock(EvictionConformance):
    policy = Clock


class ForgetsOnUse(Fifo):
    def used(self, rows: Sequence[int], now: float) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        for row in rows:
            self.rows.pop(row, None)


class ForgetsVictims(ForgetsOnUse):
    def used(self, rows: Sequence[int], now: float) -> None: ...

    def victims(self) -> Iterator[int]:
        for row in list(self.rows):
            self.removed([row], RemovalReason.EVICTED)
            yield row


class YieldsTwice(Fifo):
    def victims(self) -> Iterator[int]:
        yield from self.rows
        yield from self.rows


class ForgetsOnEnd(ForgetsOnUse):
    def used(self, rows: Sequence[int], now: float) -> None: ...

    def answer_ended(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        self.removed(rows, RemovalReason.EVICTED)


class ExpectsOthers(Fifo):
    def returning(self, now: float) -> list[int]:
        return [max(self.rows) + 1]


class KeepsObjects(Fifo):
    def added(self, rows: Sequence[int], now: float) -> None:
        super().added(rows, now)
        self.rows.update((row, [row]) for row in rows)


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (ForgetsOnUse, "test_random_operations"),
        (ForgetsOnUse, "test_every_chunk_is_evicted_once"),
        (ForgetsVictims, "test_chunk_that_was_not_evicted_after_all_is_a_victim_again"),
        (YieldsTwice, "test_search_without_result_ends"),
        (ForgetsOnEnd, "test_random_ends_of_answers"),
        (ExpectsOthers, "test_random_ends_of_answers"),
        (KeepsObjects, "test_collector_does_not_visit_chunks"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_suite_detects_fault(policy: type[EvictionPolicy], test: str) -> None:
    def run(policy: type[EvictionPolicy]) -> None:
        suite: Any = type("Suite", (EvictionConformance,), {"policy": policy})()
        getattr(suite, test)(suite.make_catalog())

    run(Fifo)
    with pytest.raises((AssertionError, KeyError)):
        run(policy)
