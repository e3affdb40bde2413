"""A tier that fails, hangs or lies: requests go on, memory stays leased as long as it is written to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier import ModelCache, Settings, TieredCache, hookimpl
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, rows

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]
MakeSettings = Callable[..., Settings]


class Puppet(Backend):
    """A backend that does what the test says: answers, fails, raises, or waits until it may go on."""

    settings_type = LocalTierSettings

    def __init__(self, settings: object) -> None:
        self.held: dict[ChunkKey, bytes] = {}
        self.may_go_on = anyio.Event()
        self.may_go_on.set()
        self.waiting = 0
        """Calls that wait for :attr:`may_go_on`."""
        self.fails = False
        self.raises = False
        self.gets = 0
        Puppet.latest = self

    async def _act(self) -> bool:
        if self.raises:
            raise ConnectionError("cut")
        self.waiting += 1
        with anyio.CancelScope(shield=True):
            await self.may_go_on.wait()
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


class PuppetPlugin:
    @hookimpl
    def kvtier_backends(self) -> dict[str, type[Backend]]:
        return {"puppet": Puppet}


@asynccontextmanager
async def opened(
    settings: MakeSettings, **more: Any
) -> AsyncIterator[tuple[TieredCache, ModelCache, Puppet]]:
    plugins = Plugins.load([])
    plugins.register(PuppetPlugin(), "puppet", "a test")
    base = settings(ssd=0, ram=more.pop("ram", 16), **more)
    tiers = [*base.tiers, {"name": "doll", "type": "puppet", "capacity": 2**30, "deadline": "60s"}]
    chosen = base.model_copy(update={"tiers": tiers})
    async with TieredCache.open(chosen, plugins=plugins) as cache:
        puppet = Puppet.latest
        try:
            yield cache, cache.model("llama", token_bytes=TOKEN_BYTES), puppet
        finally:
            puppet.fails = puppet.raises = False
            puppet.may_go_on.set()
        with anyio.fail_after(60):
            while cache.pending_bytes or cache.arena.leases != cache.hierarchy.catalog.count(0):
                await anyio.sleep(0.01)


def hang(cache: TieredCache, puppet: Puppet) -> None:
    """Let calls hang from now on, and the tier give them up soon."""
    puppet.may_go_on = anyio.Event()
    limit_calls(cache, 0.2)


def resume(cache: TieredCache, puppet: Puppet) -> None:
    """Let calls go on, and from now on take as long as a busy machine makes them."""
    puppet.may_go_on.set()
    limit_calls(cache, 60)


def limit_calls(cache: TieredCache, seconds: float) -> None:
    tier = cache.hierarchy.tiers[1]
    tier.settings = tier.settings.model_copy(update={"deadline": seconds})


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.005)


async def stored_below_only(cache: TieredCache, model: ModelCache, tokens: list[int]) -> None:
    """Store a prompt and take it out of memory again."""
    assert await model.store(tokens, rows(tokens)) == len(tokens)
    assert await cache.drain(60)
    assert await model.move(tokens, "ram", "doll") == len(tokens)
    assert cache.hierarchy.catalog.count(0) == 0


@pytest.mark.parametrize("fault", ["fails", "raises"])
async def test_a_tier_that_fails_costs_a_miss(settings: MakeSettings, prompt: Prompt, fault: str) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(1024)
        await stored_below_only(cache, model, tokens)
        setattr(puppet, fault, True)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        assert await model.retrieve(tokens, out) == 0
        setattr(puppet, fault, False)
        with anyio.fail_after(60):
            while await model.retrieve(tokens, out) != 1024:
                await anyio.sleep(0.05)
        assert out == rows(tokens)


async def test_a_write_that_fails_leaves_the_chunk_in_memory(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, puppet):
        puppet.fails = True
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        await cache.drain(60)
        assert cache.hierarchy.catalog.count(1) == 0
        assert model.held_tokens(tokens) == 1024


async def test_memory_that_an_outage_left_full_takes_chunks_again(
    settings: MakeSettings, prompt: Prompt
) -> None:
    """Full below its watermark: less than a chunk is free, and nothing may go before it is written."""
    async with opened(settings, ram=15.8) as (cache, model, puppet):
        puppet.fails = True
        tokens = prompt(256 * 15)
        assert await model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)
        assert not cache.hierarchy.tiers[0].excess_bytes(0)
        puppet.fails = False
        tokens = prompt(256, 1)
        with anyio.fail_after(60):
            while not cache.hierarchy.tiers[1].available:  # Else what it would inherit is dropped.
                await anyio.sleep(0.01)
            while await model.store(tokens, rows(tokens)) != 256:
                await anyio.sleep(0.01)


async def test_a_tier_that_hangs_is_given_up_and_its_memory_stays_leased(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(1024)
        await stored_below_only(cache, model, tokens)
        hang(cache, puppet)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        with anyio.fail_after(60):
            assert await model.retrieve(tokens, out) == 0
        assert cache.arena.used == 4 * CHUNK_OBJECT_BYTES, "the backend may still write into it"
        resume(cache, puppet)
        with anyio.fail_after(60):
            while await model.retrieve(tokens, out) != 1024:
                await anyio.sleep(0.01)
        assert out == rows(tokens)


async def test_a_hanging_write_keeps_its_memory_and_is_entered_late(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as (cache, model, puppet):
        hang(cache, puppet)
        tokens = prompt(1024)
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60), "the write is given up"
        assert cache.arena.leases > cache.hierarchy.catalog.count(0)
        assert not any(cache.hierarchy.catalog.tiers(key) == [0, 1] for key in model.keys(tokens))
        resume(cache, puppet)
        await until(lambda: cache.arena.leases == cache.hierarchy.catalog.count(0))
        assert all(cache.hierarchy.catalog.tiers(key) == [0, 1] for key in model.keys(tokens))


async def test_many_requests_for_one_prompt_are_one_flight_each_chunk(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(2048)
        await stored_below_only(cache, model, tokens)
        hits = []

        async def ask() -> None:
            out = bytearray(len(tokens) * TOKEN_BYTES)
            hits.append(await model.retrieve(tokens, out))
            assert out == rows(tokens)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
        assert hits == [2048] * 8
        assert puppet.gets == 8


async def test_a_cancelled_request_frees_what_it_held(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(1024)
        await stored_below_only(cache, model, tokens)
        puppet.may_go_on = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.retrieve, tokens, bytearray(len(tokens) * TOKEN_BYTES))
            await until(lambda: puppet.waiting > 0)
            tasks.cancel_scope.cancel()


async def test_what_finds_the_queue_full_is_written_later(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, ram=64) as (cache, model, puppet):
        puppet.may_go_on = anyio.Event()
        for seed in range(6):
            tokens = prompt(2048, seed=seed)
            await model.store(tokens, rows(tokens))
        assert cache.hierarchy.counts["write_deferred"] > 0
        assert cache.pending_bytes <= 2 * 64 * CHUNK_OBJECT_BYTES // 4, "memory is not held by what waits"
        assert model.held_tokens(prompt(2048, seed=5)) == 2048
        puppet.may_go_on.set()
        await until(lambda: len(puppet.held) == 48)


async def test_what_is_cleared_on_its_way_in_does_not_arrive(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(1024)
        hang(cache, puppet)
        await model.store(tokens, rows(tokens))
        await until(lambda: puppet.waiting > 0)
        assert await model.clear() == 4
        resume(cache, puppet)
        await until(lambda: not puppet.held and not len(cache.hierarchy.catalog))


async def test_a_lying_tier_is_found_out(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings) as (cache, model, puppet):
        tokens = prompt(1024)
        await stored_below_only(cache, model, tokens)
        one, two, *_ = model.keys(tokens)
        puppet.held[one] = puppet.held[two]
        out = bytearray(len(tokens) * TOKEN_BYTES)
        assert await model.retrieve(tokens, out) == 0
        assert one not in puppet.held


async def test_what_is_cleared_while_it_waits_to_be_written_is_not_written(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, ram=64) as (cache, model, puppet):
        hang(cache, puppet)
        first, waiting = prompt(256, seed=1), prompt(1024, seed=2)
        await model.store(first, rows(first))
        await until(lambda: puppet.waiting > 0)
        await model.store(waiting, rows(waiting))
        assert await model.clear() == 5
        assert await model.store(waiting, rows(waiting)[::-1]) == 1024, "with other weights"
        resume(cache, puppet)
        await until(lambda: len(puppet.held) == 4)
        assert await model.move(waiting, "ram", "doll") == 1024
        out = bytearray(len(waiting) * TOKEN_BYTES)
        assert await model.retrieve(waiting, out) == 1024
        assert out == rows(waiting)[::-1]
