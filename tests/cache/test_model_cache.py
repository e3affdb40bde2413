"""Store and retrieve: from memory, from disk, after a restart, and never for another prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier import ModelCache, Settings, SettingsError, TieredCache
from kvtier import cache as cache_module
from kvtier.catalog.partial_matches import block_tags_of
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import block_hashes
from kvtier.pipeline.query import Query
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, MakeSettings, Prompt, retrieve, rows

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[tuple[TieredCache, ModelCache]]:
    """Open a cache with one model. At the end, only the first tier may hold leases."""
    async with TieredCache.open(settings) as cache:
        yield cache, cache.model("llama", token_bytes=TOKEN_BYTES)
        await until(lambda: not (cache.pending_bytes or cache.arena.leases != cache.catalog.count(0)))
        assert not cache.status()["flights"]


async def test_store_and_retrieve(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ssd=0)) as (cache, model):
        tokens = prompt(1100)
        assert await model.store(tokens, rows(tokens)) == 1100
        found = cache.look_up(Query(model.keys(tokens)))
        headers = [ChunkHeader.parse(chunk.lease.view) for chunk in found.chunks]
        found.release()
        assert [header.tokens for header in headers] == [256, 256, 256, 256, 76]
        assert await retrieve(model, tokens) == 1100


async def test_a_longer_prompt_hits_its_prefix(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ssd=0)) as (_, model):
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        longer = tokens + prompt(512, seed=1)
        assert await retrieve(model, longer) == 1024


async def test_equal_tokens_with_another_prefix_are_a_miss(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ssd=0)) as (_, model):
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        assert await retrieve(model, [1, *tokens[1:]]) == 0


async def test_models_sizes_and_salts_are_separate(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ssd=0)) as (cache, model):
        tokens = prompt(512)
        await model.store(tokens, rows(tokens))
        assert model.held_tokens(tokens) == 512
        assert cache.model("qwen", token_bytes=TOKEN_BYTES).held_tokens(tokens) == 0
        assert cache.model("llama", token_bytes=TOKEN_BYTES * 2).held_tokens(tokens) == 0
        assert cache.model("llama", token_bytes=TOKEN_BYTES, salt="tenant").held_tokens(tokens) == 0


@pytest.mark.parametrize(
    ("shared", "hit"),
    [(15, 0), (16, 16), (300, 288), (1024, 1024), (1039, 1024), (1040, 1040), (1099, 1088)],
)
async def test_hits_end_where_a_prompt_leaves_what_is_stored(
    settings: MakeSettings, prompt: Prompt, shared: int, hit: int
) -> None:
    async with opened(settings(ssd=0)) as (_, model):
        tokens = prompt(1100)
        await model.store(tokens, rows(tokens))
        other = [*tokens[:shared], *prompt(700, seed=1)]
        assert await retrieve(model, other) == hit


async def test_the_most_similar_chunk_is_used_after_a_restart(settings: MakeSettings, prompt: Prompt) -> None:
    base = prompt(1024)
    async with opened(settings()) as (_, model):
        for shared in range(300, 500, 20):
            tokens = base[:shared] + prompt(700, seed=shared)
            await model.store(tokens, rows(tokens))
    async with opened(settings()) as (_, model):
        for shared in range(290, 500, 7):
            tokens = base[:shared] + prompt(100, seed=999)
            assert await retrieve(model, tokens) == min(shared, 480) // 16 * 16


async def test_a_longer_partial_chunk_replaces_a_shorter_one(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(600)
    async with opened(settings()) as (cache, model):
        for length in (300, 340, 400, 401, 512, 600):
            await model.store(tokens[:length], rows(tokens[:length]))
            await cache.drain(10)
            chunks = -(-length // 256)
            with anyio.fail_after(60):
                while [cache.catalog.count(tier) for tier in (0, 1)] != [chunks, chunks]:
                    await anyio.sleep(0.01)
            assert model.held_tokens(tokens[:length]) == length
        # What a longer one begins with is not kept either.
        await model.store(tokens[:560], rows(tokens[:560]))
        await until(lambda: cache.catalog.count(0) == 3)
        assert await retrieve(model, tokens[:560]) == 560


async def test_a_pinned_partial_chunk_is_kept(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(600)
    async with opened(settings(ssd=0)) as (cache, model):
        await model.store(tokens[:300], rows(tokens[:300]))
        model.pin(tokens[:300])
        await model.store(tokens, rows(tokens))
        await anyio.wait_all_tasks_blocked()
        assert model.held_tokens(tokens[:300]) == 300
        assert cache.catalog.count(0) == 4


async def test_a_chunk_that_only_seems_to_begin_like_a_prompt_is_not_used(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks have one byte: chunks are found by them, but compared by whole hashes."""
    async with opened(settings(ssd=0)) as (cache, model):
        tokens = prompt(512)
        await model.store(tokens, rows(tokens))
        monkeypatch.setattr(cache_module, "block_tags_of", lambda hashes: stored)
        stored = block_tags_of(block_hashes(tokens, 16))
        other = prompt(512, seed=1)
        assert await retrieve(model, other) == 0
        assert cache.look_up(Query(model.keys(other))).count == 0


async def test_prompts_without_partial_chunks(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ssd=0, partial_chunks=False)) as (_, model):
        tokens = prompt(1100)
        assert await model.store(tokens, rows(tokens)) == 1024
        assert await retrieve(model, tokens) == 1024
        assert await retrieve(model, tokens[:1000]) == 992, "in the middle of a whole chunk"


async def test_chunks_on_disk_survive_a_restart(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(2048)
    async with opened(settings()) as (_, model):
        await model.store(tokens, rows(tokens))
    async with opened(settings()) as (cache, model):
        assert cache.catalog.used(1) == 8 * CHUNK_OBJECT_BYTES
        assert await retrieve(model, tokens) == 2048
        counts = cache.status()["counts"]
        assert isinstance(counts, dict)
        assert counts["found_ssd"] == 8


async def test_corrupt_and_truncated_files_are_misses_and_deleted(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    tokens = prompt(2048)
    async with opened(settings()) as (_, model):
        await model.store(tokens, rows(tokens))
        keys = model.keys(tokens)
    flipped = next((tmp_path / "ssd").rglob(f"{keys[4].hex()}*"))
    content = bytearray(flipped.read_bytes())
    content[5000] ^= 1
    flipped.write_bytes(content)
    truncated = next((tmp_path / "ssd").rglob(f"{keys[6].hex()}*"))
    truncated.write_bytes(truncated.read_bytes()[:9000])
    async with opened(settings()) as (cache, model):
        assert await retrieve(model, tokens) == 4 * 256
        assert not flipped.exists()
        assert not truncated.exists()
        assert cache.catalog.used(1) == 6 * CHUNK_OBJECT_BYTES


async def test_capacities_are_never_exceeded(settings: MakeSettings, prompt: Prompt, tmp_path: Path) -> None:
    async with opened(settings(ram=16, ssd=24)) as (cache, model):
        for seed in range(30):
            tokens = prompt(1024, seed=seed)
            await model.store(tokens, rows(tokens))
            await cache.drain(10)
            on_disk = sum(path.stat().st_size for path in (tmp_path / "ssd").rglob("*.kv"))
            assert on_disk <= 24 * CHUNK_OBJECT_BYTES
            assert cache.arena.used <= 16 * CHUNK_OBJECT_BYTES
        assert await retrieve(model, prompt(1024, seed=29)) == 1024


async def test_write_on_evict_writes_only_evicted_chunks(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ram=16, disk={"write": "on_evict"})) as (cache, model):
        first = prompt(2048, seed=1)
        await model.store(first, rows(first))
        assert cache.catalog.count(1) == 0
        for seed in range(2, 8):
            tokens = prompt(1024, seed=seed)
            await model.store(tokens, rows(tokens))
            with anyio.fail_after(60):
                while cache.tiers[0].excess_bytes(0):
                    await anyio.sleep(0.01)
        assert cache.catalog.count(1) > 0
        assert await retrieve(model, first) > 0


async def test_write_never_writes_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ram=16, disk={"write": "never"})) as (cache, model):
        for seed in range(6):
            tokens = prompt(1024, seed=seed)
            await model.store(tokens, rows(tokens))
        await cache.drain(60)
        assert cache.catalog.count(1) == 0


async def test_move_and_copy_between_tiers(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(settings(disk={"write": "never"})) as (cache, model):
        await model.store(tokens, rows(tokens))
        catalog = cache.catalog
        assert await model.move(tokens, "ram", "ssd", copy=True) == 1024
        assert (catalog.count(0), catalog.count(1)) == (4, 4)
        assert await model.move(tokens, "ram", "ssd") == 1024
        assert (catalog.count(0), catalog.count(1)) == (0, 4)
        assert await model.move(tokens, "ssd", "ram") == 1024
        assert (catalog.count(0), catalog.count(1)) == (4, 0)
        assert await retrieve(model, tokens) == 1024
        assert await model.move(tokens, "ssd", "ram") == 1024, "repeating a move must not fail"
        with pytest.raises(SettingsError, match="use one of ram, ssd"):
            await model.move(tokens, "ram", "tape")


async def test_chunks_removed_during_a_move_are_skipped(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.batches.BATCH_BYTES", CHUNK_OBJECT_BYTES)
    tokens = prompt(2048)
    async with opened(settings(disk={"write": "never"})) as (cache, model):
        await model.store(tokens, rows(tokens))
        catalog = cache.catalog
        async with anyio.create_task_group() as tasks:
            moved: list[int] = []

            async def move() -> None:
                moved.append(await cache.move(model.keys(tokens), "ram", "ssd", copy=True))

            tasks.start_soon(move)
            while not catalog.count(1):
                await anyio.lowlevel.checkpoint()
            await cache.clear(model.keys(tokens)[4:], tiers=["ram"])
        assert 1 <= moved[0] <= 5
        assert catalog.count(1) == moved[0]


async def test_pinned_chunks_stay(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings(ram=16, ssd=0)) as (_, model):
        pinned = prompt(1024, seed=100)
        await model.store(pinned, rows(pinned))
        assert model.pin(pinned) == 1024
        for seed in range(10):
            tokens = prompt(1024, seed=seed)
            await model.store(tokens, rows(tokens))
        assert await retrieve(model, pinned) == 1024
        model.unpin(pinned)
        for seed in range(10, 20):
            tokens = prompt(1024, seed=seed)
            await model.store(tokens, rows(tokens))
        assert model.held_tokens(pinned) < 1024


async def test_clear_removes_one_prompt_or_one_model(settings: MakeSettings, prompt: Prompt) -> None:
    first, second = prompt(1024, seed=1), prompt(1024, seed=2)
    async with opened(settings()) as (cache, model):
        other = cache.model("qwen", token_bytes=TOKEN_BYTES)
        for tokens in (first, second):
            await model.store(tokens, rows(tokens))
        await other.store(first, rows(first))
        await cache.drain(60)
        assert await model.clear(first) == 4
        assert (model.held_tokens(first), model.held_tokens(second)) == (0, 1024)
        assert await model.clear() == 4
        assert (model.held_tokens(second), other.held_tokens(first)) == (0, 1024)
        cleared = await cache.clear()
        assert (cleared.chunks, cleared.bytes) == (4, 2 * 4 * CHUNK_OBJECT_BYTES)
        assert len(cache.catalog) == 0


async def test_clear_of_one_tier_keeps_the_others(settings: MakeSettings, prompt: Prompt) -> None:
    first, second = prompt(1024, seed=1), prompt(1024, seed=2)
    async with opened(settings()) as (cache, model):
        for tokens in (first, second):
            await model.store(tokens, rows(tokens))
        await cache.drain(60)
        catalog, keys = cache.catalog, model.keys(first)
        cleared = await cache.clear(keys[:3], tiers=["ram"])
        assert (sorted(cleared.keys), cleared.bytes) == (sorted(keys[:3]), 3 * CHUNK_OBJECT_BYTES)
        assert [catalog.tiers(key) for key in keys] == [[1], [1], [1], [0, 1]]
        assert (await cache.clear(keys[:3], tiers=["ram"])).chunks == 0
        assert (await cache.clear(tiers=["ssd"])).chunks == 8
        assert (cache.counts["evicted"], cache.lacks_room) == (0, False), "there was room for them"
        assert (catalog.count(0), catalog.count(1)) == (5, 0)
        assert not cache.catalog.namespaces.is_reset(model.namespace)


async def test_leased_chunks_survive_a_clear(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(settings(ssd=0)) as (cache, model):
        await model.store(tokens, rows(tokens))
        found = cache.look_up(Query(model.keys(tokens)))
        before = [bytes(chunk.lease.view) for chunk in found.chunks]
        assert (await cache.clear(tiers=["ram"])).chunks == 4
        assert (model.held_tokens(tokens), cache.arena.leases) == (0, 4)
        assert [bytes(chunk.lease.view) for chunk in found.chunks] == before
        found.release()
        assert cache.arena.used == 0


async def test_exceptions_in_the_block_propagate(settings: MakeSettings) -> None:
    with pytest.raises(ZeroDivisionError):
        async with TieredCache.open(settings(ssd=0)):
            raise ZeroDivisionError


async def test_close_writes_memory_to_the_lower_tier(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(2048)
    async with opened(settings(disk={"write": "on_evict"})) as (_, model):
        await model.store(tokens, rows(tokens))
    async with opened(settings(disk={"write": "on_evict"})) as (_, model):
        assert await retrieve(model, tokens) == 2048
