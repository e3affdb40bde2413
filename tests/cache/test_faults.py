"""A tier that fails, hangs or corrupts data: requests continue, and its memory stays leased."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier import ModelCache, TieredCache, hookimpl
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings
from kvtier.tiers.batches import IN_FLIGHT
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, MakeSettings, Prompt, rows

pytestmark = pytest.mark.anyio


class ScriptedBackend(Backend):
    """A backend controlled by the test: it succeeds, fails, raises, or waits for :attr:`resumed`."""

    settings_type = LocalTierSettings

    def __init__(self, settings: object) -> None:
        self.held: dict[ChunkKey, bytes] = {}
        self.resumed = anyio.Event()
        self.resumed.set()
        self.waiting = 0
        """Number of calls that wait for :attr:`resumed`."""
        self.fails = False
        self.raises = False
        self.gets = 0
        ScriptedBackend.latest = self

    async def _act(self) -> bool:
        if self.raises:
            raise ConnectionError("disconnected")
        self.waiting += 1
        with anyio.CancelScope(shield=True):
            await self.resumed.wait()
        self.waiting -= 1
        return not self.fails

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self.held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        if not await self._act():
            return [Outcome.FAILED] * len(items)
        self.held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        self.gets += len(items)
        if not await self._act():
            return [Outcome.FAILED] * len(items)
        for key, view in items:
            view[:] = self.held[key]
        return [Outcome.OK] * len(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._act()
        for key in keys:
            self.held.pop(key, None)


class ScriptedPlugin:
    @hookimpl
    def kvtier_backends(self) -> dict[str, type[Backend]]:
        return {"scripted": ScriptedBackend}


@asynccontextmanager
async def opened(
    settings: MakeSettings, **more: Any
) -> AsyncIterator[tuple[TieredCache, ModelCache, ScriptedBackend]]:
    plugins = Plugins.load([])
    plugins.register(ScriptedPlugin(), "scripted", "a test")
    base = settings(ssd=0, ram=more.pop("ram", 16), **more)
    tiers = [*base.tiers, {"name": "doll", "type": "scripted", "capacity": 2**30, "deadline": "60s"}]
    chosen = base.model_copy(update={"tiers": tiers})
    async with TieredCache.open(chosen, plugins=plugins) as cache:
        backend = ScriptedBackend.latest
        try:
            yield cache, cache.model("llama", token_bytes=TOKEN_BYTES), backend
        finally:
            backend.fails = backend.raises = False
            backend.resumed.set()
        await until(lambda: not (cache.pending_bytes or cache.arena.leases != cache.catalog.count(0)))


def hang(cache: TieredCache, backend: ScriptedBackend) -> None:
    """Make calls hang, with a short deadline."""
    backend.resumed = anyio.Event()
    set_deadline(cache, 0.2)


def resume(cache: TieredCache, backend: ScriptedBackend) -> None:
    """Resume calls, with a deadline that suits a busy machine."""
    backend.resumed.set()
    set_deadline(cache, 60)


def set_deadline(cache: TieredCache, seconds: float) -> None:
    tier = cache.tiers[1]
    tier.settings = tier.settings.model_copy(update={"deadline": seconds})


async def store_in_lower_tier_only(cache: TieredCache, model: ModelCache, tokens: list[int]) -> None:
    """Store a prompt and evict it from memory."""
    assert await model.store(tokens, rows(tokens)) == len(tokens)
    assert await cache.drain(60)
    assert await model.move(tokens, "ram", "doll") == len(tokens)
    assert cache.catalog.count(0) == 0


@pytest.mark.parametrize("fault", ["fails", "raises"])
async def test_failing_tier_is_a_miss(settings: MakeSettings, prompt: Prompt, fault: str) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        await store_in_lower_tier_only(cache, model, tokens)
        setattr(backend, fault, True)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        assert await model.retrieve(tokens, out) == 0
        setattr(backend, fault, False)
        with anyio.fail_after(60):
            while await model.retrieve(tokens, out) != 1024:
                await anyio.sleep(0.05)
        assert out == rows(tokens)


async def test_failed_write_keeps_the_chunk_in_memory(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        backend.fails = True
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        await cache.drain(60)
        assert cache.catalog.count(1) == 0
        assert model.held_tokens(tokens) == 1024


async def test_full_memory_accepts_chunks_after_an_outage(settings: MakeSettings, prompt: Prompt) -> None:
    """Memory is below its watermark, but less than a chunk is free, and unwritten chunks are not evicted."""
    async with opened(settings, ram=15.8) as (cache, model, backend):
        backend.fails = True
        tokens = prompt(256 * 15)
        assert await model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)
        assert not cache.tiers[0].excess_bytes(0)
        backend.fails = False
        tokens = prompt(256, 1)
        with anyio.fail_after(60):
            while not cache.tiers[1].available:  # Otherwise evicted chunks are dropped instead of demoted.
                await anyio.sleep(0.01)
            while await model.store(tokens, rows(tokens)) != 256:
                await anyio.sleep(0.01)


async def test_hanging_read_times_out_and_keeps_its_memory_leased(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        await store_in_lower_tier_only(cache, model, tokens)
        hang(cache, backend)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        with anyio.fail_after(60):
            assert await model.retrieve(tokens, out) == 0
        assert cache.arena.used == 4 * CHUNK_OBJECT_BYTES, "the backend may still write into it"
        resume(cache, backend)
        with anyio.fail_after(60):
            while await model.retrieve(tokens, out) != 1024:
                await anyio.sleep(0.01)
        assert out == rows(tokens)


async def test_hanging_write_keeps_its_memory_and_is_recorded_late(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as (cache, model, backend):
        hang(cache, backend)
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60), "the write did not time out"
        assert cache.arena.leases > cache.catalog.count(0)
        assert not any(cache.catalog.tiers(key) == [0, 1] for key in model.keys(tokens))
        resume(cache, backend)
        await until(lambda: cache.arena.leases == cache.catalog.count(0))
        assert all(cache.catalog.tiers(key) == [0, 1] for key in model.keys(tokens))


async def test_concurrent_requests_share_one_read_per_chunk(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(2048)
        await store_in_lower_tier_only(cache, model, tokens)
        hits = []

        async def request() -> None:
            out = bytearray(len(tokens) * TOKEN_BYTES)
            hits.append(await model.retrieve(tokens, out))
            assert out == rows(tokens)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(request)
        assert hits == [2048] * 8
        assert backend.gets == 8


async def test_cancelled_request_frees_its_leases(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        await store_in_lower_tier_only(cache, model, tokens)
        backend.resumed = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.retrieve, tokens, bytearray(len(tokens) * TOKEN_BYTES))
            await until(lambda: backend.waiting > 0)
            tasks.cancel_scope.cancel()


async def test_chunks_beyond_the_write_queue_are_written_later(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, ram=64) as (cache, model, backend):
        backend.resumed = anyio.Event()
        for seed in range(6):
            tokens = prompt(2048, seed=seed)
            await model.store(tokens, rows(tokens))
        assert cache.counts["write_deferred"] > 0
        assert cache.pending_bytes <= 2 * 64 * CHUNK_OBJECT_BYTES // 4, "waiting chunks hold memory"
        assert model.held_tokens(prompt(2048, seed=5)) == 2048
        backend.resumed.set()
        await until(lambda: len(backend.held) == 48)


async def test_chunks_cleared_during_a_write_do_not_arrive(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        hang(cache, backend)
        await model.store(tokens, rows(tokens))
        await until(lambda: backend.waiting > 0)
        assert await model.clear() == 4
        resume(cache, backend)
        await until(lambda: not backend.held and not len(cache.catalog))


async def test_write_continues_if_only_memory_is_cleared(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        hang(cache, backend)
        await model.store(tokens, rows(tokens))
        await until(lambda: backend.waiting > 0)
        assert (await cache.clear(model.keys(tokens), tiers=["ram"])).chunks == 4
        resume(cache, backend)
        await until(lambda: len(backend.held) == 4 and not cache.pending_bytes)
        assert model.held_tokens(tokens) == 1024


async def test_swapped_value_is_detected(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, backend):
        tokens = prompt(1024)
        await store_in_lower_tier_only(cache, model, tokens)
        first_key, second_key, *_ = model.keys(tokens)
        backend.held[first_key] = backend.held[second_key]
        out = bytearray(len(tokens) * TOKEN_BYTES)
        assert await model.retrieve(tokens, out) == 0
        assert first_key not in backend.held


async def test_chunks_cleared_while_queued_are_not_written(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, ram=64) as (cache, model, backend):
        hang(cache, backend)
        waiting = prompt(1024, seed=IN_FLIGHT)
        for seed in range(IN_FLIGHT):
            first = prompt(256, seed=seed)
            await model.store(first, rows(first))
            await until(lambda: backend.waiting == seed + 1)  # noqa: B023 - called at once
        await model.store(waiting, rows(waiting))
        assert await model.clear() == IN_FLIGHT + 4
        assert await model.store(waiting, rows(waiting)[::-1]) == 1024, "with other weights"
        resume(cache, backend)
        await until(lambda: len(backend.held) == 4)
        assert await model.move(waiting, "ram", "doll") == 1024
        out = bytearray(len(waiting) * TOKEN_BYTES)
        assert await model.retrieve(waiting, out) == 1024
        assert out == rows(waiting)[::-1]
