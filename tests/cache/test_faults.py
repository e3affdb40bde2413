"""A tier that fails, hangs or corrupts data: requests continue, and its memory stays leased."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import pytest

from kvtier import TieredCache
from kvtier.memory.keys import ChunkKey
from kvtier.testing.faults import Fault
from kvtier.tiers.batches import IN_FLIGHT
from tests.rigs import faulty_sources
from tests.rigs.faulty_sources import BUILT_IN, CacheHarness
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, MakeSettings, Prompt, rows, store

pytestmark = pytest.mark.anyio


def opened(settings: MakeSettings, ram: float = 16) -> AbstractAsyncContextManager[CacheHarness]:
    """Open a cache with a lower tier of its own, which is written through."""
    return faulty_sources.opened(settings, "doll", shared=False, ram=ram)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.RAISE])
async def test_failing_tier_is_a_miss(settings: MakeSettings, prompt: Prompt, fault: Fault) -> None:
    async with opened(settings) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "doll")
        harness.sources["doll"].faults.fault = fault
        assert await harness.retrieve(tokens) == 0
        harness.sources["doll"].faults.fault = None
        with anyio.fail_after(60):
            while await harness.retrieve(tokens) != 1024:
                await anyio.sleep(0.05)


async def test_failed_write_keeps_the_chunk_in_memory(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        harness.sources["doll"].faults.fault = Fault.FAIL
        tokens = prompt(1024)
        await harness.model.store(tokens, rows(tokens))
        await harness.cache.drain(60)
        assert harness.held_chunks(tokens, "doll") == []
        assert harness.model.held_tokens(tokens) == 1024


async def test_full_memory_accepts_chunks_after_an_outage(settings: MakeSettings, prompt: Prompt) -> None:
    """Memory is below its watermark, but less than a chunk is free, and unwritten chunks are not evicted."""
    async with opened(settings, ram=15.8) as harness:
        cache, model = harness.cache, harness.model
        harness.sources["doll"].faults.fault = Fault.FAIL
        tokens = prompt(256 * 15)
        assert await model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)
        assert not cache.memory.excess_bytes(0)
        harness.sources["doll"].faults.fault = None
        tokens = prompt(256, 1)
        with anyio.fail_after(60):
            while not harness.tier("doll").available:  # Else evicted chunks are dropped instead of demoted.
                await anyio.sleep(0.01)
            while await model.store(tokens, rows(tokens)) != 256:
                await anyio.sleep(0.01)


async def test_hanging_read_times_out_and_keeps_its_memory_leased(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "doll")
        harness.hang("doll")
        with anyio.fail_after(60):
            assert await harness.retrieve(tokens) == 0
        assert harness.cache.arena.used == 4 * CHUNK_OBJECT_BYTES, "the backend may still write into it"
        harness.resume("doll")
        with anyio.fail_after(60):
            while await harness.retrieve(tokens) != 1024:
                await anyio.sleep(0.01)


async def test_hanging_write_keeps_its_memory_and_is_recorded_late(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as harness:
        cache = harness.cache
        harness.hang("doll")
        tokens = prompt(1024)
        await harness.model.store(tokens, rows(tokens))
        assert await cache.drain(60), "the write did not time out"
        assert cache.arena.leases > cache.catalog.count(0)
        assert harness.held_chunks(tokens, "doll") == []
        harness.resume("doll")
        await until(lambda: cache.arena.leases == cache.catalog.count(0))
        assert harness.held_chunks(tokens, "ram") == harness.held_chunks(tokens, "doll") == [0, 1, 2, 3]


@pytest.mark.parametrize(("source", "waited_for"), [("ram", 4), ("ssd", 0)])
async def test_shutdown_waits_for_moves_out_of_memory_but_not_for_those_out_of_another_tier(
    settings: MakeSettings, prompt: Prompt, source: str, waited_for: int
) -> None:
    async with faulty_sources.opened(settings, "doll", ssd=64, shared=False) as harness:
        cache, tokens = harness.cache, prompt(1024)
        keys = harness.model.keys(tokens)
        await harness.fill(tokens, "ssd")
        assert await harness.retrieve(tokens) == len(tokens)
        await cache.clear(keys, tiers=["doll"])
        harness.sources["doll"].delays.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(cache.move, keys, source, "doll", copy=True))
            await until(lambda: harness.sources["doll"].delays.waiting > 0)
            assert cache.pending_bytes == waited_for * CHUNK_OBJECT_BYTES
            harness.sources["doll"].delays.resume()
        assert harness.held_chunks(tokens, "doll") == [0, 1, 2, 3]


async def test_concurrent_requests_share_one_read_per_chunk(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        tokens = prompt(2048)
        await harness.fill(tokens, "doll")
        hits = []

        async def request() -> None:
            hits.append(await harness.retrieve(tokens))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(request)
        assert hits == [2048] * 8
        assert sum(count for _, count in harness.reads) == 8


async def test_cancelled_request_frees_its_leases(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        tokens = prompt(1024)
        await harness.fill(tokens, "doll")
        delays = harness.sources["doll"].delays
        delays.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.retrieve, tokens)
            await until(lambda: delays.waiting > 0)
            tasks.cancel_scope.cancel()


async def test_chunks_beyond_the_write_queue_are_written_later(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, ram=64) as harness:
        cache, source = harness.cache, harness.sources["doll"]
        source.delays.hang()
        for seed in range(6):
            tokens = prompt(2048, seed=seed)
            await harness.model.store(tokens, rows(tokens))
        assert cache.counts["write_deferred"] > 0
        assert cache.pending_bytes <= 2 * 64 * CHUNK_OBJECT_BYTES // 4, "waiting chunks hold memory"
        assert harness.model.held_tokens(prompt(2048, seed=5)) == 2048
        source.delays.resume()
        await until(lambda: len(source.pool.held) == 48)


async def test_chunks_cleared_during_a_write_do_not_arrive(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        tokens, source = prompt(1024), harness.sources["doll"]
        harness.hang("doll")
        await harness.model.store(tokens, rows(tokens))
        await until(lambda: source.delays.waiting > 0)
        assert await harness.model.clear() == 4
        harness.resume("doll")
        await until(lambda: not source.pool.held and not len(harness.cache.catalog))


async def test_chunks_stored_again_while_they_are_cleared_are_kept(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that is deleted late, the catalog knows nothing any more."""
    async with TieredCache.open(settings(ram=8), plugins=BUILT_IN) as cache:
        tokens = prompt(4 * CHUNK_TOKENS)
        keys = store(cache, tokens)
        assert await cache.drain(60)
        [tier] = cache.lower
        delete, may_delete = tier.backend.delete, anyio.Event()

        async def delete_late(deleted: Sequence[ChunkKey]) -> None:
            await may_delete.wait()
            await delete(deleted)

        monkeypatch.setattr(tier.backend, "delete", delete_late)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.clear, keys)
            await until(lambda: cache.catalog.prefix(keys) == [])
            store(cache, tokens)
            await anyio.sleep(0.1)
            may_delete.set()
        assert await cache.drain(60)
        assert await tier.backend.contains(keys) == [True] * len(keys)
        assert [cache.catalog.tiers(key) for key in keys] == [[0, 1]] * len(keys)


async def test_write_continues_if_only_memory_is_cleared(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        tokens, source, model = prompt(1024), harness.sources["doll"], harness.model
        harness.hang("doll")
        await model.store(tokens, rows(tokens))
        await until(lambda: source.delays.waiting > 0)
        assert (await harness.cache.clear(model.keys(tokens), tiers=["ram"])).chunks == 4
        harness.resume("doll")
        await until(lambda: len(source.pool.held) == 4 and not harness.cache.pending_bytes)
        assert model.held_tokens(tokens) == 1024


async def test_swapped_value_is_detected(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as harness:
        tokens, held = prompt(1024), harness.sources["doll"].pool.held
        await harness.fill(tokens, "doll")
        first_key, second_key, *_ = harness.model.keys(tokens)
        held[first_key] = held[second_key]
        assert await harness.retrieve(tokens) == 0
        assert first_key not in held


async def test_chunks_cleared_while_queued_are_not_written(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, ram=64) as harness:
        model, source = harness.model, harness.sources["doll"]
        harness.hang("doll")
        waiting = prompt(1024, seed=IN_FLIGHT)
        for seed in range(IN_FLIGHT):
            first = prompt(256, seed=seed)
            await model.store(first, rows(first))
            await until(lambda: source.delays.waiting == seed + 1)  # noqa: B023 - called at once
        await model.store(waiting, rows(waiting))
        assert await model.clear() == IN_FLIGHT + 4
        assert await model.store(waiting, rows(waiting)[::-1]) == 1024, "with other weights"
        harness.resume("doll")
        await until(lambda: len(source.pool.held) == 4)
        assert await model.move(waiting, "ram", "doll") == 1024
        out = bytearray(len(waiting) * TOKEN_BYTES)
        assert await model.retrieve(waiting, out) == 1024
        assert out == rows(waiting)[::-1]
