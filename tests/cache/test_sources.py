"""Chunks that several lower tiers hold are read from the cheapest. Chunks of peers may disappear."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.pipeline.query import Query
from kvtier.testing.faults import Fault
from kvtier.tiers.costs import HALF_LIFE_SECONDS, ReadCost
from tests.rigs.faulty_sources import CacheHarness, opened, set_costs
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, MakeSettings, Prompt, rows

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("seconds", "source"),
    [({}, "ssd"), ({"ssd": 1.0, "peers": 0.9}, "ssd"), ({"ssd": 1.0, "peers": 0.1}, "peers")],
    ids=["unmeasured", "alike", "clearly cheaper"],
)
async def test_prompt_is_read_from_the_cheapest_source(
    settings: MakeSettings, prompt: Prompt, seconds: dict[str, float], source: str
) -> None:
    async with opened(settings, "peers", ssd=64) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "ssd", "peers")
        set_costs(harness, **seconds)
        found = harness.cache.look_up(Query(harness.model.keys(tokens)))
        assert [chunk.source for chunk in found.chunks] == [harness.tier(source).index] * 4
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert harness.reads == [(source, 4)]
        assert harness.cache.counts[f"found_{source}"] == 4


async def test_costs_are_learned_from_reads(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].delays.delay = 0.05
        assert harness.tier("near").cost(CHUNK_OBJECT_BYTES) is None
        assert await harness.retrieve(tokens) == 1024
        cost = harness.tier("near").cost(4 * CHUNK_OBJECT_BYTES)
        assert cost is not None
        assert cost >= 0.05
        assert harness.tier("far").cost(CHUNK_OBJECT_BYTES) is None
        set_costs(harness, far=1e-6)
        harness.cache.memory.drop(harness.model.keys(tokens))
        assert await harness.retrieve(tokens) == 1024
        assert harness.reads == [("near", 4), ("far", 4)]


async def test_failures_and_timeouts_raise_the_cost(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near")
        near = harness.sources["near"]
        set_costs(harness, near=1.0)
        near.faults.fault, near.faults.only = Fault.FAIL, frozenset(harness.model.keys(tokens))
        assert await harness.retrieve(tokens) == 0
        failed = harness.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert failed is not None
        assert failed > 1.0
        harness.hang("near")
        assert await harness.retrieve(tokens) == 0
        timed_out = harness.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert timed_out is not None
        assert timed_out > 1.2 * failed


async def test_slow_source_is_tried_again_later(settings: MakeSettings, prompt: Prompt) -> None:
    now = 0.0
    async with opened(settings, "near", "far") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "near", "far")
        set_costs(harness, far=0.001)
        harness.tier("near").reading = ReadCost(lambda: now)
        harness.tier("near").reading.succeeded(CHUNK_OBJECT_BYTES, 10.0)
        for elapsed, source in [(0.0, "far"), (HALF_LIFE_SECONDS, "far"), (10 * HALF_LIFE_SECONDS, "near")]:
            now += elapsed
            assert await harness.retrieve(tokens) == 1024
            assert harness.reads.pop() == (source, 4)
            harness.cache.memory.drop(harness.model.keys(tokens))


async def test_prompt_split_over_three_sources(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as harness:
        tokens = prompt(3072)
        await harness.fill(tokens, "near", "far", "peers")
        harness.lose_chunks(tokens, "near", range(4, 12))
        harness.lose_chunks(tokens, "far", [*range(4), *range(8, 12)])
        harness.lose_chunks(tokens, "peers", range(8))
        assert await harness.retrieve(tokens) == 3072
        assert sorted(harness.reads) == [("far", 4), ("near", 4), ("peers", 4)]


# Chunks of peers.


async def test_chunks_held_only_by_peers_are_demoted(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "peers", ssd=64, ram=8, disk={"write": "on_evict"}) as harness:
        tokens, more = prompt(1024), prompt(2048, 1)
        await harness.fill(tokens, "peers")
        assert await harness.retrieve(tokens) == 1024
        assert harness.held_chunks(tokens, "ssd") == []
        assert await harness.model.store(more, rows(more)) > 0
        await until(lambda: bool(harness.held_chunks(tokens, "ssd")))


async def test_move_to_peers_keeps_the_source_copy(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "peers") as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "peers")
        assert await harness.retrieve(tokens) == 1024
        assert await harness.model.move(tokens, "ram", "peers") == 1024
        assert harness.held_chunks(tokens, "ram") == [0, 1, 2, 3]


async def test_local_lookup_reads_only_from_this_host(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "peers", ssd=64) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "ssd", "peers")
        set_costs(harness, ssd=1.0, peers=0.001)
        found = harness.cache.look_up(Query(harness.model.keys(tokens), local=True))
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert harness.reads == [("ssd", 4)]


async def test_local_lookup_does_not_wait_for_other_hosts(settings: MakeSettings, prompt: Prompt) -> None:
    """Otherwise, two hosts that fetch the same chunk from each other would deadlock."""
    async with opened(settings, "peers", ssd=64) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "ssd", "peers")
        set_costs(harness, ssd=1.0, peers=0.001)
        harness.sources["peers"].delays.hang()
        ours = harness.cache.look_up(Query(harness.model.keys(tokens)))
        theirs = harness.cache.look_up(Query(harness.model.keys(tokens), local=True))
        assert (len(ours.chunks), len(theirs.chunks)) == (4, 0)
        harness.sources["peers"].delays.resume()
        await ours.settle(None)
        assert ours.ready == 4
        ours.release()


async def test_lookups_of_peers_are_not_counted(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(settings) as harness:
        await harness.model.store(tokens, rows(tokens))
        keys = harness.model.keys(tokens)
        harness.cache.look_up(Query(keys, local=True)).release()
        counts = harness.cache.counts
        assert (counts["looked_up"], counts["found_ram"]) == (0, 0)
        harness.cache.look_up(Query(keys)).release()
        assert (counts["looked_up"], counts["found_ram"]) == (4, 4)


def hit_tokens(harness: CacheHarness) -> tuple[int, int]:
    """Return the tokens that were looked up, and those of them that were hit."""
    counts = harness.cache.counts
    tiers = [tier.name for tier in harness.cache.tiers]
    return counts["lookup_tokens"], sum(counts[f"hit_tokens_{name}"] for name in tiers)


async def test_what_a_request_finds_when_it_asks_again_counts_once(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eviction policies see whole prompts, and each only if more of it is used."""
    tokens = prompt(1000)
    used: list[int] = []
    touch = Catalog.touch_rows

    def touch_rows(catalog: Catalog, rows: Sequence[int]) -> None:
        used.append(len(rows))
        touch(catalog, rows)

    monkeypatch.setattr(Catalog, "touch_rows", touch_rows)
    async with opened(settings) as harness:
        keys, expected = harness.model.keys(tokens), harness.expected(tokens)
        await harness.model.store(tokens[:400], rows(tokens[:400]))
        first = harness.cache.look_up(Query(keys, len(tokens)), expected)
        assert (first.hit_tokens, *hit_tokens(harness)) == (256, 1000, 256)
        await harness.model.store(tokens, rows(tokens))
        for _ in range(2):
            query = Query(keys, len(tokens), repeated=True, counted=first.hit_tokens)
            again = harness.cache.look_up(query, expected)
            first.release()
            assert (again.total, again.hit_tokens, *hit_tokens(harness)) == (4, 1000, 1000, 1000)
            first = again
        first.release()
        assert (harness.cache.counts["looked_up"], harness.cache.counts["found_ram"]) == (4, 4)
        assert [count for count in used if count] == [1, 4]


async def test_hit_rate_is_of_tokens(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1000)
    async with opened(settings, "peers") as harness:
        await harness.model.store(tokens, rows(tokens))
        keys, expected = harness.model.keys(tokens), harness.expected(tokens)
        harness.cache.look_up(Query(keys, len(tokens)), expected).release()
        assert hit_tokens(harness) == (1000, 1000), "the last chunk is shorter"
        harness.cache.look_up(Query(keys, len(tokens), repeated=True), expected).release()
        harness.cache.look_up(Query(keys, len(tokens), local=True), expected).release()
        assert hit_tokens(harness) == (1000, 1000), "neither repeated lookups nor those of peers"
        await harness.model.retrieve(tokens[:900], bytearray(len(rows(tokens[:900]))))
        assert hit_tokens(harness) == (1900, 1000 + 768 + 128), "of the last chunk, 8 whole blocks are equal"
        others = list(range(50_000, 50_600))
        await harness.model.retrieve(others, bytearray(len(rows(others))))
        assert hit_tokens(harness) == (2500, 1896)
        await harness.fill(others, "peers")
        await harness.model.retrieve([*others, 1], bytearray(len(rows([*others, 1]))))
        assert harness.cache.counts["hit_tokens_peers"] == 512 + 80
