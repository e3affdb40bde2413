"""The built-in policies and libCacheSim, an independent implementation, evict the same chunks.

Single chunks without parents, one use per request, capacities in chunks, room made before a chunk is added.
Where the rules are the same, so must be the number of hits.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import libcachesim
import pytest
from blake3 import blake3

from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, RemovalReason
from kvtier.catalog.policies.arc import ArcPolicy
from kvtier.catalog.policies.gdsf import GdsfPolicy
from kvtier.catalog.policies.lfu import LfuPolicy
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.s3fifo import S3FifoPolicy
from kvtier.catalog.policies.sieve import SievePolicy
from kvtier.catalog.policies.tinylfu import TinyLfuPolicy
from kvtier.memory.keys import ChunkKey

REQUESTS = 20_000
CAPACITIES = (100, 500)
Counter = Callable[[Sequence[int], int], int]
"""Counts the hits of a cache of a capacity in a sequence of objects."""


def zipf(chance: random.Random, objects: int, requests: int, first: int = 0) -> list[int]:
    """Return requests for objects, the *n*-th of which is *n* times as rare as the first."""
    weights = [1 / (rank + 1) for rank in range(objects)]
    return [first + choice for choice in chance.choices(range(objects), weights, k=requests)]


def make_sequences() -> dict[str, list[int]]:
    chance = random.Random(7)
    scan = iter(range(10**6, 2 * 10**6))
    scanned = zipf(chance, 2000, REQUESTS)
    for start in range(1000, REQUESTS, 3000):
        scanned[start : start + 700] = [next(scan) for _ in range(700)]
    parts = [zipf(chance, 2000, REQUESTS // 4, first=1000 * part) for part in range(4)]
    return {
        "zipf": zipf(chance, 3000, REQUESTS),
        "zipf_with_scans": scanned,
        "zipf_that_shifts": [one for part in parts for one in part],
        "loop": [at % 550 for at in range(REQUESTS)],
        "loop_in_zipf": [
            5000 + at // 2 % 300 if at % 2 else one for at, one in enumerate(zipf(chance, 2000, REQUESTS))
        ],
    }


SEQUENCES = make_sequences()
OBJECTS: set[int] = set().union(*SEQUENCES.values())
KEYS = {one: ChunkKey(blake3(one.to_bytes(4)).digest()) for one in OBJECTS}


def ours(
    policy_type: type[EvictionPolicy], length: Callable[[int], int] = lambda _: 1, **settings: Any
) -> Counter:
    """Return what counts the hits of one of kvtier's policies. ``length``: of an object in bytes."""

    def count(sequence: Sequence[int], capacity: int) -> int:
        columns = ChunkColumns()
        make = policy_type.factory(policy_type.settings_type(type="mine", **settings), capacity)
        policy = make(columns)
        rows: dict[int, int] = {}
        held: dict[int, int] = {}
        vacant: list[int] = []
        used = hits = 0
        for now, one in enumerate(sequence):
            if one in rows:
                hits += 1
                policy.used([rows[one]], now)
                continue
            while used + length(one) > capacity:
                row = next(iter(policy.victims()))
                policy.removed([row], RemovalReason.EVICTED)
                used -= length(held[row])
                del rows[held.pop(row)]
                vacant.append(row)
            row = vacant.pop() if vacant else len(columns.parents)
            if row == len(columns.parents):
                columns.parents.append(-1)
                columns.lengths.append(0)
                columns.keys += bytes(32)
            columns.keys[row * 32 : row * 32 + 32] = KEYS[one]
            columns.lengths[row] = length(one)
            policy.added([row], now)
            rows[one], held[row] = row, one
            used += length(one)
        return hits

    return count


def theirs(make: Callable[..., Any], length: Callable[[int], int] = lambda _: 1) -> Counter:
    """Return what counts the hits of one of libCacheSim's policies."""

    def count(sequence: Sequence[int], capacity: int) -> int:
        cache, request = make(cache_size=capacity, hashpower=12), libcachesim.Request()
        hits = 0
        for one in sequence:
            request.obj_id, request.obj_size = one + 1, length(one)
            hits += cache.get(request)
        return hits

    return count


def arc(sequence: Sequence[int], capacity: int) -> int:
    """Count the hits of ARC (Megiddo and Modha, FAST 2003, figure 4), with one difference.

    Room is made (the function REPLACE) before it is known whether the next object is a ghost.
    """
    recent, frequent, recent_ghosts, frequent_ghosts = (OrderedDict[int, None]() for _ in range(4))
    target, hits = 0.0, 0
    for one in sequence:
        if one in recent or one in frequent:
            hits += 1
            recent.pop(one, None)
            frequent.pop(one, None)
            frequent[one] = None
            continue
        if len(recent) + len(frequent) == capacity:
            if len(recent) > target or not frequent:
                recent_ghosts[recent.popitem(last=False)[0]] = None
            else:
                frequent_ghosts[frequent.popitem(last=False)[0]] = None
        if one in recent_ghosts:
            target = min(capacity, target + max(1, len(frequent_ghosts) / len(recent_ghosts)))
            del recent_ghosts[one]
            frequent[one] = None
        elif one in frequent_ghosts:
            target = max(0, target - max(1, len(recent_ghosts) / len(frequent_ghosts)))
            del frequent_ghosts[one]
            frequent[one] = None
        else:
            recent[one] = None
            if len(recent) + len(recent_ghosts) > capacity:
                recent_ghosts.popitem(last=False)
            elif sum(map(len, (recent, frequent, recent_ghosts, frequent_ghosts))) > 2 * capacity:
                frequent_ghosts.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        pytest.param(ours(LruPolicy), theirs(libcachesim.LRU), id="lru"),
        pytest.param(ours(LfuPolicy, ageing=False), theirs(libcachesim.LFU), id="lfu"),
        pytest.param(ours(SievePolicy), theirs(libcachesim.Sieve), id="sieve"),
    ],
)
def test_policy_has_the_hits_of_the_reference(
    counted: Counter, expected: Counter, sequence: str, capacity: int
) -> None:
    assert counted(SEQUENCES[sequence], capacity) == expected(SEQUENCES[sequence], capacity)


def lfu_da(sequence: Sequence[int], capacity: int) -> int:
    """Count the hits of LFU-DA (Arlitt et al. 2000): the uses, plus the priority of the last evicted one."""
    uses: dict[int, int] = {}
    priorities: dict[int, tuple[int, int]] = {}  # And the time of the last use.
    age = hits = 0
    for now, one in enumerate(sequence):
        if one in priorities:
            hits += 1
            uses[one] = min(uses[one] + 1, 254)
        else:
            if len(priorities) == capacity:
                victim = min(priorities, key=priorities.__getitem__)
                age = priorities.pop(victim)[0]
            uses[one] = 1
        priorities[one] = (age + uses[one], now)
    return hits


def s3_fifo(sequence: Sequence[int], capacity: int) -> int:
    """Count the hits of S3-FIFO (Yang et al., SOSP 2023, algorithm 1)."""
    small, main, ghosts = (OrderedDict[int, None]() for _ in range(3))
    uses: dict[int, int] = {}
    hits = 0

    def evict() -> None:
        while len(small) + len(main) == capacity:
            if len(small) >= int(capacity * 0.1) and small:
                one = small.popitem(last=False)[0]
                if uses[one] > 1:
                    uses[one], main[one] = 0, None
                    continue
                ghosts[one] = None
                if len(ghosts) > int(capacity * 0.9):
                    ghosts.popitem(last=False)
            else:
                one = main.popitem(last=False)[0]
                if uses[one]:
                    uses[one], main[one] = uses[one] - 1, None

    for one in sequence:
        if one in small or one in main:
            hits += 1
            uses[one] = min(uses[one] + 1, 3)
            continue
        evict()
        uses[one] = 0
        if one in ghosts:
            del ghosts[one]
            main[one] = None
        else:
            small[one] = None
    return hits


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        pytest.param(ours(ArcPolicy), arc, id="arc"),
        pytest.param(ours(S3FifoPolicy), s3_fifo, id="s3fifo"),
        pytest.param(ours(LfuPolicy), lfu_da, id="lfu"),
    ],
)
def test_same_hits_as_the_paper(counted: Counter, expected: Counter, sequence: str) -> None:
    """Where libCacheSim differs: its LFUDA has other priorities, for the others see the next test."""
    assert counted(SEQUENCES[sequence], CAPACITIES[0]) == expected(SEQUENCES[sequence], CAPACITIES[0])


def sized(one: int) -> int:
    return 1 + one % 7


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("sequence", ["zipf", "zipf_with_scans", "loop_in_zipf"])
@pytest.mark.parametrize(
    ("counted", "expected", "tolerance"),
    [
        # It adapts to a ghost that comes back before it makes room, and here after that.
        pytest.param(ours(ArcPolicy), theirs(libcachesim.ARC), 0.002, id="arc"),
        # While its cache is filled for the first time, new objects also go to the main queue.
        pytest.param(ours(S3FifoPolicy), theirs(libcachesim.S3FIFO), 0.15, id="s3fifo"),
        # Other sketches and segments; objects of the window compete when they are evicted from it.
        pytest.param(ours(TinyLfuPolicy), theirs(libcachesim.WTinyLFU), 0.05, id="tinylfu"),
        # Values are rounded to a quarter of a doubling.
        pytest.param(ours(GdsfPolicy, sized, depth=10**9), theirs(libcachesim.GDSF, sized), 0.04, id="gdsf"),
    ],
)
def test_policy_has_about_the_hits_of_the_reference(
    counted: Counter, expected: Counter, tolerance: float, sequence: str, capacity: int
) -> None:
    hits = expected(SEQUENCES[sequence], capacity)
    assert abs(counted(SEQUENCES[sequence], capacity) - hits) <= tolerance * hits
