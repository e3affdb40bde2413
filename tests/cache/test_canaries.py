"""Chunks of a canary: read from the tier that it names, not counted, and removed soon."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvtier.cache
from kvtier import Settings
from kvtier.observability.canary import ELSEWHERE
from kvtier.pipeline.query import Query
from tests.cache.conftest import CHUNK_TOKENS, rows
from tests.rigs.faulty_sources import CacheHarness, opened
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

Prompt = Callable[[int, int], list[int]]
MakeSettings = Callable[..., Settings]
CHUNKS = 3
TIERS = ("ram", "ssd", "shelf")


async def stored(harness: CacheHarness, prompt: Prompt) -> list[int]:
    """Store a prompt in all tiers."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS, 1)
    assert await harness.model.store(tokens, rows(tokens)) == len(tokens)
    assert await harness.cache.drain(60)
    await until(lambda: all(len(harness.held_chunks(tokens, tier)) == CHUNKS for tier in TIERS))
    return tokens


@pytest.mark.parametrize("tier", TIERS)
async def test_each_tier_is_read_and_nothing_counts(
    settings: MakeSettings, prompt: Prompt, tier: str
) -> None:
    async with opened(settings, "shelf", ssd=64, shared=False) as harness:
        tokens = await stored(harness, prompt)
        before = dict(harness.cache.counts)
        keys = harness.model.keys(tokens)
        harness.cache.uncover(keys, tier)
        above = TIERS[: TIERS.index(tier)]
        await until(lambda: not any(harness.held_chunks(tokens, name) for name in above))
        query = Query(keys, len(tokens), canary=tier, repeated=True)
        found = harness.cache.look_up(query, harness.expected(tokens))
        assert [harness.cache.tiers[source].name for source, _ in found.pending_sources()] == [tier]
        await harness.cache.settle(found)
        assert found.ready == CHUNKS
        found.release()
        counts = harness.cache.counts
        counted = [name for name, count in counts.items() if count != before.get(name, 0)]
        assert not [name for name in counted if name.startswith(("looked_up", "lookup_", "found_", "hit_"))]


async def test_nothing_is_removed_before_the_tier_holds_it(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "shelf", ssd=64, shared=False) as harness:
        tokens = await stored(harness, prompt)
        harness.lose_chunks(tokens, "shelf", [1])
        harness.cache.uncover(harness.model.keys(tokens), "shelf")
        harness.cache.uncover(harness.model.keys(tokens), "no such tier")
        assert len(harness.held_chunks(tokens, "ram")) == CHUNKS


async def test_a_tier_that_is_written_to_on_eviction_gets_the_chunks_from_memory(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, ssd=64, disk={"write": "on_evict"}) as harness:
        tokens = prompt(CHUNKS * CHUNK_TOKENS, 1)
        await harness.model.store(tokens, rows(tokens))
        keys = harness.model.keys(tokens)
        harness.cache.uncover(keys, "ssd")
        await until(lambda: len(harness.held_chunks(tokens, "ssd")) == CHUNKS)
        assert len(harness.held_chunks(tokens, "ram")) == CHUNKS
        harness.cache.uncover(keys, "ssd")
        assert not harness.held_chunks(tokens, "ram")
        found = harness.cache.look_up(Query(keys, len(tokens), canary="ssd", repeated=True))
        await harness.cache.settle(found)
        assert found.ready == CHUNKS
        found.release()


async def test_what_another_cache_has_stored_expires_here_as_well(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.cache, "CANARY_SECONDS", 0.01)
    async with opened(settings, ssd=64) as harness:
        tokens = prompt(CHUNKS * CHUNK_TOKENS, 1)
        await harness.model.store(tokens, rows(tokens))
        assert harness.held_chunks(tokens, "ram")
        harness.cache.uncover(harness.model.keys(tokens), ELSEWHERE)
        await until(lambda: not any(harness.held_chunks(tokens, tier) for tier in ("ram", "ssd")))


async def test_chunks_expire_in_all_tiers(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.cache, "CANARY_SECONDS", 0.01)
    async with opened(settings, "shelf", ssd=64, shared=False) as harness:
        tokens, other = await stored(harness, prompt), prompt(CHUNK_TOKENS, 2)
        assert await harness.model.store(other, rows(other)) == len(other)
        harness.cache.tasks.start_soon(harness.cache.expire, harness.model.keys(tokens))
        await until(lambda: not any(harness.held_chunks(tokens, tier) for tier in TIERS))
        assert harness.held_chunks(other, "ram") == [0]
