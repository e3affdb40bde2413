"""Tiers that others fill and empty, too: what they hold is asked for, and believed for a while."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import pytest

from kvtier import ModelCache, Settings, TieredCache, hookimpl, tier
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings

from .conftest import TOKEN_BYTES, rows

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]
MakeSettings = Callable[..., Settings]


class SharedSettings(TierSettings):
    ttl: float | None = None


class Shared(Backend):
    """A pool in this process: one for each name, whatever cache has it open."""

    settings_type = SharedSettings
    pools: ClassVar[dict[str, dict[ChunkKey, bytes]]] = {}

    def __init__(self, settings: SharedSettings) -> None:
        self.settings = settings
        self.held = Shared.pools.setdefault(settings.name, {})
        self.asked: list[int] = []
        self.may_answer = anyio.Event()
        self.may_answer.set()
        Shared.latest = self

    @property
    def ttl(self) -> float | None:
        return self.settings.ttl

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.asked.append(len(keys))
        with anyio.CancelScope(shield=True):
            await self.may_answer.wait()
        return [key in self.held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        self.held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return [self._get(key, view) for key, view in items]

    def _get(self, key: ChunkKey, view: memoryview) -> Outcome:
        value = self.held.get(key, b"")
        if len(value) != len(view):
            return Outcome.MISS
        view[:] = value
        return Outcome.OK

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)


class SharedPlugin:
    @hookimpl
    def kvtier_backends(self) -> dict[str, type[Backend]]:
        return {"shared": Shared}


@pytest.fixture(autouse=True)
def empty_pools() -> None:
    Shared.pools.clear()


@asynccontextmanager
async def opened(
    settings: MakeSettings, *pools: dict[str, Any], **more: Any
) -> AsyncIterator[tuple[TieredCache, ModelCache]]:
    """A cache of memory and the pools named, ``pool`` where none is; at the end nothing may be leased."""
    plugins = Plugins.load([])
    plugins.register(SharedPlugin(), "shared", "a test")
    base = settings(ssd=0, **more)
    shared = [{"type": "shared", "deadline": "60s", **pool} for pool in pools or [{"name": "pool"}]]
    chosen = base.model_copy(update={"tiers": [*base.tiers, *shared]})
    async with TieredCache.open(chosen, plugins=plugins) as cache:
        try:
            yield cache, cache.model("llama", token_bytes=TOKEN_BYTES)
        finally:
            Shared.latest.may_answer.set()
        with anyio.fail_after(60):
            while cache.pending_bytes or cache.arena.leases != cache.hierarchy.catalog.count(0):
                await anyio.sleep(0.01)


async def store(settings: MakeSettings, *prompts: list[int], pool: str = "pool") -> None:
    """Another host stores prompts in a pool."""
    async with opened(settings, {"name": pool}) as (cache, model):
        for tokens in prompts:
            assert await model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)


async def retrieve(model: ModelCache, tokens: list[int]) -> int:
    """How many tokens come back; every one of them right."""
    out = bytearray(len(tokens) * TOKEN_BYTES)
    count = await model.retrieve(tokens, out)
    assert out[: count * TOKEN_BYTES] == rows(tokens)[: count * TOKEN_BYTES]
    return count


@pytest.mark.parametrize("partial", [False, True])
async def test_what_another_host_stored_is_found(
    settings: MakeSettings, prompt: Prompt, partial: bool
) -> None:
    tokens = prompt(1024 + 100 * partial)
    async with opened(settings, partial_chunks=partial) as (cache, model):
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
    async with opened(settings, partial_chunks=partial) as (cache, model):
        assert await retrieve(model, tokens) == len(tokens)
        assert Shared.latest.asked == [len(model.keys(tokens))], "one round trip for a whole prompt"
        assert await retrieve(model, tokens) == len(tokens)
        assert len(Shared.latest.asked) == 1, "what is in memory is not asked for"
        assert cache.hierarchy.counts["put_ok"] == 0, "what came from the pool is not written back"


async def test_a_prompt_that_begins_here_and_goes_on_in_the_pool(
    settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(2048)
    await store(settings, tokens)
    async with opened(settings) as (_, model):
        await model.store(tokens[:512], rows(tokens[:512]))
        assert await retrieve(model, tokens) == 2048
        assert Shared.latest.asked == [6]


async def test_two_pools_that_hold_parts_of_one_prompt(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1280)
    await store(settings, tokens, pool="near")
    keys: list[ChunkKey] = []
    async with opened(settings) as (_, model):
        keys = model.keys(tokens)
    Shared.pools["far"] = {keys[index]: Shared.pools["near"].pop(keys[index]) for index in (1, 3)}
    async with opened(settings, {"name": "near"}, {"name": "far"}) as (cache, model):
        assert await retrieve(model, tokens) == 1280
        assert cache.hierarchy.counts["found_near"] == 3
        assert cache.hierarchy.counts["found_far"] == 2


async def test_what_a_pool_has_forgotten_is_stored_again(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(settings) as (cache, model):
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
        await model.move(tokens, "ram", "pool")
        Shared.pools["pool"].clear()
        assert await retrieve(model, tokens) == 0
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
        assert len(Shared.pools["pool"]) == 4


async def test_another_value_under_our_key_is_a_miss(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings) as (_, model):
        held = Shared.pools["pool"]
        first, second, third, _ = model.keys(tokens)
        held[second] = held[first]  # Whole and with a good checksum, but another chunk's.
        assert await retrieve(model, tokens) == 256
        held[third] = b"a stranger's"
        assert await retrieve(model, tokens) == 256
        assert second not in held


async def test_a_pool_that_does_not_answer_costs_a_miss(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings, {"name": "pool", "deadline": "200ms"}) as (cache, model):
        Shared.latest.may_answer = anyio.Event()
        backend = cache.hierarchy.tiers[1].backend
        now = time.monotonic()
        monkeypatch.setattr(backend, "_clock", lambda: now)
        with anyio.fail_after(60):
            for _ in range(5):  # As many as it takes for the breaker.
                assert await retrieve(model, tokens) == 0
            assert not cache.hierarchy.tiers[1].available
            assert await retrieve(model, tokens) == 0
        assert len(Shared.latest.asked) == 5, "it is not asked while its breaker is open"
        monkeypatch.setattr(backend, "_clock", time.monotonic)
        Shared.latest.may_answer.set()
        with anyio.fail_after(60):
            while await retrieve(model, tokens) != 1024:
                await anyio.sleep(0.05)


async def test_who_waits_for_nothing_finds_it_later(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings, prefetch={"policy": "best_effort"}) as (_, model):
        Shared.latest.may_answer = anyio.Event()
        with anyio.fail_after(30):  # Half the deadline, in which the pool does not answer.
            assert await retrieve(model, tokens) == 0
        Shared.latest.may_answer.set()
        with anyio.fail_after(60):
            while await retrieve(model, tokens) != 1024:
                await anyio.sleep(0.01)


async def test_a_look_up_that_is_given_up_leaves_nothing_behind(
    settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings) as (cache, model):
        Shared.latest.may_answer = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(retrieve, model, tokens)
            with anyio.fail_after(60):
                while not Shared.latest.asked:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        Shared.latest.may_answer.set()
        with anyio.fail_after(60):
            while model.held_tokens(tokens) != 1024:
                await anyio.sleep(0.01)
        assert cache.arena.leases == 0, "nobody wants it any more"


async def test_what_was_cleared_is_not_fetched_from_others(settings: MakeSettings, prompt: Prompt) -> None:
    """A model's weights have changed: what another host stored before must not come back."""
    theirs, ours = prompt(1024, 1), prompt(1024, 2)
    await store(settings, theirs)
    async with opened(settings) as (cache, model):
        await model.store(ours, rows(ours))
        assert await cache.drain(60)
        await model.clear()
        assert await retrieve(model, theirs) == 0
        assert len(Shared.pools["pool"]) == 4, "theirs stays, ours is gone"
        await model.store(ours, rows(ours))
        assert await cache.drain(60)
        await model.move(ours, "ram", "pool")
        assert await retrieve(model, ours) == 1024, "what was stored since is believed"


async def test_what_is_known_of_a_pool_is_bounded(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "KNOWN_CHUNKS", 6)
    prompts = [prompt(1024, seed) for seed in range(5)]
    async with opened(settings) as (cache, model):
        for tokens in prompts:
            await model.store(tokens, rows(tokens))
            assert await cache.drain(60)
        assert cache.hierarchy.catalog.count(1) <= 6 + 4
        assert len(Shared.pools["pool"]) == 20, "nothing is deleted"
        await cache.move(cache.hierarchy.catalog.keys(0), "ram", "pool")
        for tokens in prompts:
            assert await retrieve(model, tokens) == 1024


async def test_what_a_pool_will_have_forgotten_is_not_believed(
    settings: MakeSettings, prompt: Prompt
) -> None:
    """What the pool forgets by itself is demoted again rather than dropped."""
    tokens = prompt(1024)
    async with opened(settings, {"name": "pool", "ttl": 0.2}, ram=8) as (cache, model):
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
        assert cache.hierarchy.catalog.count(1) == 4
        Shared.pools["pool"].clear()
        with anyio.fail_after(60):
            while cache.hierarchy.catalog.count(1):
                await anyio.sleep(0.02)
        other = prompt(2048, 1)
        await model.store(other, rows(other))
        with anyio.fail_after(60):
            while not set(model.keys(tokens)).intersection(Shared.pools["pool"]):
                await anyio.sleep(0.02)
