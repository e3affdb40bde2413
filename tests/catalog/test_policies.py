"""The classic eviction policies: the conformance suite, and what each of them evicts first."""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict
from itertools import islice
from typing import Any, ClassVar

import pytest

from kvtier.catalog import kvtier_eviction_policies
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import EvictionPolicy, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.arc import ArcPolicy
from kvtier.catalog.policies.gdsf import GdsfPolicy
from kvtier.catalog.policies.ghosts import Ghosts
from kvtier.catalog.policies.lfu import LfuPolicy
from kvtier.catalog.policies.rings import MAX_PASSED, NO_ROW, NOWHERE, Rings
from kvtier.catalog.policies.s3fifo import S3FifoPolicy
from kvtier.catalog.policies.sieve import SievePolicy
from kvtier.catalog.policies.sketch import Sketch
from kvtier.catalog.policies.tinylfu import TinyLfuPolicy
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH, EvictionConformance, prompt_of

pytestmark = pytest.mark.usefixtures("either_core")


class TestLfu(EvictionConformance):
    policy = LfuPolicy


class TestLfuWithoutAgeing(EvictionConformance):
    policy = LfuPolicy
    settings: ClassVar = {"ageing": False}


class TestArc(EvictionConformance):
    policy = ArcPolicy


class TestS3Fifo(EvictionConformance):
    policy = S3FifoPolicy


class TestSieve(EvictionConformance):
    policy = SievePolicy


class TestTinyLfu(EvictionConformance):
    policy = TinyLfuPolicy


class TestGdsf(EvictionConformance):
    policy = GdsfPolicy


Policy = type[EvictionPolicy]
CLASSIC = ("lru", "lfu", "arc", "s3fifo", "sieve", "tinylfu", "gdsf")
BUILT_IN = kvtier_eviction_policies()
every_policy = pytest.mark.parametrize("name", CLASSIC)
MAX_BYTES = 40
"""Per chunk, with ghosts."""


def catalog_of(policy: Policy, **settings: Any) -> Catalog:
    return Catalog([policy.factory(policy.settings_type(type="mine", **settings), 1000 * LENGTH)])


def one(number: int) -> ChunkKey:
    """Return the key of a prompt of one chunk."""
    return prompt_of(number, 1)[0]


def store(catalog: Catalog, *keys: ChunkKey, length: int = LENGTH, hints: ChunkHints | None = None) -> None:
    """Store prompts of one chunk."""
    for key in keys:
        catalog.add(key, 0, length, State.READY, hints=hints)


def evict(catalog: Catalog, chunks: int) -> list[ChunkKey]:
    victims = catalog.victims(0, chunks * LENGTH)
    catalog.remove_all(victims, 0, RemovalReason.EVICTED)
    return victims


@every_policy
def test_prompt_leaves_from_its_end_without_help_of_the_catalog(name: str) -> None:
    """So that the catalog defers no chunk, which would cost a search more steps than it evicts chunks."""
    catalog = catalog_of(BUILT_IN[name])
    keys = prompt_of(1, 40)
    for turn in range(4):
        catalog.touch(keys[: 10 * turn])
        parent = keys[10 * turn - 1] if turn else None
        catalog.add_chain(
            keys[10 * turn : 10 * turn + 10], 0, [LENGTH] * 10, State.READY, parent, hints=ChunkHints()
        )
        offered = list(catalog.policies[0].victims())
        newest = [catalog.row(key) for key in keys[10 * turn : 10 * turn + 10]]
        assert [row for row in offered if row in newest] == newest[::-1]


@every_policy
def test_busy_chunks_are_passed_by_once(name: str) -> None:
    """LRU, which has no second chance, passes by the coldest ones in each search."""
    catalog = catalog_of(BUILT_IN[name])
    store(catalog, *map(one, range(500)))
    busy = {catalog.row(one(number)) for number in range(400)}
    asked: list[int] = []

    def is_leased(row: int) -> bool:
        asked.append(row)
        return row in busy

    steps = []
    for _ in range(5):
        asked.clear()
        victims = catalog.victims(0, 4 * LENGTH, is_leased)
        catalog.remove_all(victims, 0)
        steps.append(len(asked))
        assert len(victims) == 4
    assert steps[0] <= 404
    assert sum(steps[1:]) <= (4 * 404 if name == "lru" else 440)


@every_policy
def test_memory_is_bounded(name: str) -> None:
    """In flat arrays, with ghosts, after five times as many chunks as the tier holds."""
    catalog = catalog_of(BUILT_IN[name])
    chunks = 5_000
    for number in range(5 * chunks // 100):
        if catalog.count(0) >= chunks:
            evict(catalog, 100)
        keys = prompt_of(number, 100)
        catalog.add_chain(keys, 0, [LENGTH] * 100, State.READY)
        catalog.touch(keys[:50])
    policy = catalog.policies[0]
    skipped = {id(catalog.columns), *map(id, vars(catalog.columns).values())}
    size, pending = 0, list(vars(policy).values())
    while pending:
        item = pending.pop()
        if id(item) not in skipped and not isinstance(item, type):
            skipped.add(id(item))
            size += sys.getsizeof(item)
            pending += gc.get_referents(item)
    assert 8 <= size / chunks <= MAX_BYTES


def test_lfu_ages() -> None:
    catalog, fixed = catalog_of(LfuPolicy), catalog_of(LfuPolicy, ageing=False)
    for tier in (catalog, fixed):
        store(tier, one(0))
        for _ in range(10):
            tier.touch([one(0)])
        for number in range(1, 200):
            store(tier, one(number), one(1000 + number))
            tier.touch([one(number)])
            evict(tier, 2)
    assert one(0) not in catalog
    assert one(0) in fixed


@pytest.mark.parametrize("policy", [ArcPolicy, S3FifoPolicy])
@pytest.mark.parametrize("reason", RemovalReason)
def test_only_evicted_chunks_become_ghosts(policy: Policy, reason: RemovalReason) -> None:
    """A chunk that was evicted too early stays when it comes back, while others pass through."""
    catalog = catalog_of(policy)
    store(catalog, *map(one, range(100)))
    returning = catalog.victims(0, 10 * LENGTH)
    catalog.remove_all(returning, 0, reason)
    store(catalog, *returning)
    for number in range(200, 400):
        evict(catalog, 1)
        store(catalog, one(number))
    kept = sum(key in catalog for key in returning)
    assert kept == (10 if reason is RemovalReason.EVICTED else 0)


def test_s3fifo_keeps_what_was_used_twice() -> None:
    catalog = catalog_of(S3FifoPolicy)
    store(catalog, *map(one, range(100)))
    for uses, number in ((1, 3), (2, 5)):
        for _ in range(uses):
            catalog.touch([one(number)])
    evicted = evict(catalog, 60)
    assert one(3) in evicted
    assert one(5) not in evicted


def test_sieve_hand_goes_on_where_it_was() -> None:
    catalog = catalog_of(SievePolicy)
    store(catalog, *map(one, range(6)))
    catalog.touch([one(0)])
    assert evict(catalog, 2) == [one(1), one(2)]
    store(catalog, one(6))
    assert evict(catalog, 4) == [one(3), one(4), one(5), one(6)]
    assert evict(catalog, 1) == [one(0)]


def test_tinylfu_refuses_a_scan() -> None:
    catalog = catalog_of(TinyLfuPolicy)
    popular = [one(number) for number in range(200)]
    store(catalog, *popular)
    for _ in range(3):
        for key in popular:
            catalog.touch([key])
    for number in range(1000, 3000):
        store(catalog, one(number))
        evict(catalog, 1)
    assert sum(key in catalog for key in popular) >= 190


def test_tinylfu_remembers_the_uses_of_evicted_chunks() -> None:
    catalog = catalog_of(TinyLfuPolicy)
    store(catalog, *map(one, range(100)))
    for _ in range(6):
        catalog.touch([one(7)])
    catalog.remove(one(7), 0, RemovalReason.EVICTED)
    store(catalog, one(7))
    for number in range(200, 400):
        store(catalog, one(number))
        evict(catalog, 1)
    assert one(7) in catalog


def test_gdsf_keeps_what_takes_long_to_compute() -> None:
    catalog = catalog_of(GdsfPolicy)
    store(catalog, one(0), hints=ChunkHints(recompute=0.5))
    store(catalog, one(1), hints=ChunkHints(recompute=0.1))
    store(catalog, one(2), length=LENGTH * 100, hints=ChunkHints(recompute=0.5))
    assert catalog.victims(0) == [one(2), one(1), one(0)]


def test_gdsf_derives_the_time_from_the_depth() -> None:
    """A chunk deep in a long prompt, and what it continues, is worth more than a later short prompt."""
    catalog = catalog_of(GdsfPolicy, depth=10)
    long, short = prompt_of(1, 40), prompt_of(2, 4)
    for at, key in enumerate(long):
        catalog.add(key, 0, LENGTH, State.READY, long[at - 1] if at else None)
        catalog.touch(long[: at + 1])
    catalog.add_chain(short, 0, [LENGTH] * 4, State.READY)
    catalog.touch(short)
    assert catalog.victims(0, 4 * LENGTH) == short[::-1]


def test_gdsf_takes_a_new_length_into_account() -> None:
    policy = GdsfPolicy.factory(capacity_bytes=1000 * LENGTH)
    catalog = Catalog([policy], encoded=[0])
    store(catalog, one(0), one(1))
    assert catalog.victims(0, 1) == [one(0)]
    catalog.resize(one(0), 0, LENGTH // 10)
    assert catalog.victims(0, 1) == [one(1)]


@pytest.mark.parametrize("name", ["lru", "lfu", "arc", "s3fifo", "gdsf", "resume", "adaptive"])
def test_what_may_leave_but_does_not_is_the_first_to_leave_again(name: str) -> None:
    """It may have to be demoted before. ``sieve`` and ``tinylfu`` go on: a search ages what it passes by."""
    policy = kvtier_eviction_policies()[name]
    catalog = Catalog([policy.factory(capacity_bytes=200 * LENGTH)])
    prompts = [prompt_of(number, 5) for number in range(40)]
    for number, keys in enumerate(prompts):
        catalog.add_chain(keys, 0, [LENGTH] * 5, State.READY)
        catalog.touch(keys[: number % 6])
    for _ in range(20):
        first = catalog.victims(0, 10 * LENGTH)
        for limit in (None, 16, 64):
            assert catalog.victims(0, LENGTH, limit=limit) == first[:1]
        assert catalog.victims(0, 10 * LENGTH) == first
        catalog.remove_all(first[:4], 0)


def test_rings_agree_with_lists() -> None:
    """Random batches, as the native core and the Python code link them."""
    chance = random.Random(3)
    rings, model = Rings(3), [list[int]() for _ in range(3)]
    for _ in range(2_000):
        rows = chance.sample(range(60), chance.randint(0, 12))
        ring = chance.randrange(3)
        absent = [row for row in rows if not any(row in one_ring for one_ring in model)]
        held = [row for row in rows if row not in absent]
        assert rings.held([*rows, 99]) == held
        if chance.random() < 0.4:
            rings.insert(absent, ring)
            model[ring] += absent[::-1]
            continue
        model = [[row for row in one_ring if row not in held] for one_ring in model]
        if chance.random() < 0.3:
            rings.move(held, ring)
            model[ring] += held[::-1]
        elif chance.random() < 0.5:
            rings.use([*rows, *rows, 99], ring)
            model[ring] += held[::-1]
        else:
            rings.remove([*rows, *rows, 99])
            assert all(rings.ring(row) == NOWHERE for row in rows)
        assert [list(islice(rings.rows(number), 100)) for number in range(3)] == model
        assert list(rings.counts) == [len(one_ring) for one_ring in model]
        assert rings.coldest(ring) == (model[ring][0] if model[ring] else NO_ROW)


@pytest.mark.parametrize("limit", [0, 1, 5, 100, 700])
def test_ghosts_agree_with_an_ordered_dictionary(limit: int) -> None:
    chance = random.Random(limit)
    ghosts, model = Ghosts(), OrderedDict[int, None]()
    hashes = [chance.getrandbits(64) for _ in range(max(4, 3 * limit))]
    for _ in range(20_000):
        hashed = chance.choice(hashes)
        assert (hashed in ghosts) == (hashed in model)
        if hashed in model:
            assert ghosts.discard(hashed)
            del model[hashed]
        else:
            assert not ghosts.discard(hashed)
            ghosts.add(hashed, limit)
            model[hashed] = None
            while len(model) > limit:
                model.popitem(last=False)
        assert len(ghosts) == len(model)
    ghosts.trim(limit // 2)
    assert [hashed in ghosts for hashed in model] == [
        at >= len(model) - limit // 2 for at in range(len(model))
    ]


def test_sketch_never_forgets_and_rarely_exaggerates() -> None:
    chance = random.Random(5)
    sketch, counts = Sketch(), {chance.getrandbits(64): chance.randint(0, 20) for _ in range(3_000)}
    for at, (hashed, count) in enumerate(counts.items()):
        sketch.fit(at)
        sketch.put(hashed, count)
    found = {hashed: sketch.count(hashed) for hashed in counts}
    assert all(found[hashed] >= min(count, 15) for hashed, count in counts.items())
    assert sum(found[hashed] > min(count, 15) for hashed, count in counts.items()) < 300
    sketch.halve()
    assert all(sketch.count(hashed) == count // 2 for hashed, count in found.items())


@pytest.mark.parametrize("policy", [SievePolicy, S3FifoPolicy])
def test_search_passes_by_few_chunks_even_if_all_were_used(
    policy: type[EvictionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search blocks the event loop: ten million used chunks would take seconds before the first victim."""
    catalog = Catalog([policy.factory()])
    keys = prompt_of(1, 3 * MAX_PASSED)
    catalog.add_chain(keys, 0, [1] * len(keys), State.READY)
    for _ in range(3):
        catalog.touch(keys)
    passed: list[int] = []
    warmer = Rings.warmer
    monkeypatch.setattr(Rings, "warmer", lambda self, row: (passed.append(row), warmer(self, row))[1])
    next(catalog.policies[0].victims())
    assert MAX_PASSED <= len(passed) <= MAX_PASSED + 2
