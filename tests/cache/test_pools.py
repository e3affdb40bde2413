"""Pools that other hosts fill and empty as well: lookups query them and cache the result for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from kvtier import ModelCache, TieredCache, hookimpl
from kvtier.backends.base import Backend
from kvtier.catalog.misses import MissReason
from kvtier.errors import TierError
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.query import Expected, Query
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from kvtier.tiers.breaker import CircuitBreaker
from tests.rigs.chunks import DictBackend
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, MakeSettings, Prompt, retrieve, rows

pytestmark = pytest.mark.anyio


class SharedSettings(TierSettings):
    ttl: float | None = None


class Shared(DictBackend):
    """A pool in this process, shared by all caches that open the same name."""

    settings_type = SharedSettings
    pools: ClassVar[dict[str, dict[ChunkKey, bytes]]] = {}

    def __init__(self, settings: SharedSettings) -> None:
        self.settings = settings
        super().__init__(Shared.pools.setdefault(settings.name, {}))
        self.queried: list[int] = []
        self.may_reply = anyio.Event()
        self.may_reply.set()
        Shared.latest = self

    @property
    def ttl(self) -> float | None:
        return self.settings.ttl

    async def check(self) -> str:
        return "a pool in this process"

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.queried.append(len(keys))
        with anyio.CancelScope(shield=True):
            await self.may_reply.wait()
        return [key in self.held for key in keys]


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
    """Open a cache with memory and pools, by default one named ``pool``. Checks for leaks at the end."""
    plugins = Plugins.load([])
    plugins.register(SharedPlugin(), "shared", "a test")
    base = settings(ssd=0, **more)
    shared = [{"type": "shared", "deadline": "60s", **pool} for pool in pools or [{"name": "pool"}]]
    configured = base.model_copy(update={"tiers": [*base.tiers, *shared]})
    async with TieredCache.open(configured, plugins=plugins) as cache:
        try:
            yield cache, cache.model("llama", token_bytes=TOKEN_BYTES)
        finally:
            Shared.latest.may_reply.set()
        await until(lambda: not (cache.pending_bytes or cache.arena.leases != cache.catalog.count(0)))


async def store(settings: MakeSettings, *prompts: list[int], pool: str = "pool") -> None:
    """Store prompts in a pool from another cache."""
    async with opened(settings, {"name": pool}) as (cache, model):
        for tokens in prompts:
            assert await model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)


@pytest.mark.parametrize("partial", [False, True])
async def test_chunks_of_another_host_are_found(
    settings: MakeSettings, prompt: Prompt, partial: bool
) -> None:
    tokens = prompt(1024 + 100 * partial)
    async with opened(settings, partial_chunks=partial) as (cache, model):
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
    async with opened(settings, partial_chunks=partial) as (cache, model):
        assert await retrieve(model, tokens) == len(tokens)
        assert Shared.latest.queried == [len(model.keys(tokens))], "more than one round trip for a prompt"
        assert await retrieve(model, tokens) == len(tokens)
        assert len(Shared.latest.queried) == 1, "the pool was queried for chunks in memory"
        assert cache.counts["put_ok"] == 0, "chunks of the pool were written back"


async def test_prompt_split_between_memory_and_pool(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(2048)
    await store(settings, tokens)
    async with opened(settings) as (_, model):
        await model.store(tokens[:512], rows(tokens[:512]))
        assert await retrieve(model, tokens) == 2048
        assert Shared.latest.queried == [6]


async def test_pool_is_not_asked_again_while_a_request_is_queued(
    settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(1024)
    async with opened(settings) as (cache, model):
        keys = model.keys(tokens)
        expected = Expected(model.namespace, [CHUNK_OBJECT_BYTES] * len(keys))
        for counted in (None, 0, 0):
            query = Query(keys, len(tokens), repeated=counted is not None, counted=counted)
            found = cache.look_up(query, expected)
            await cache.settle(found)
            found.release()
        assert Shared.latest.queried == [len(keys)]


async def test_prompt_split_between_two_pools(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1280)
    await store(settings, tokens, pool="near")
    keys: list[ChunkKey] = []
    async with opened(settings) as (_, model):
        keys = model.keys(tokens)
    Shared.pools["far"] = {keys[index]: Shared.pools["near"].pop(keys[index]) for index in (1, 3)}
    async with opened(settings, {"name": "near"}, {"name": "far"}) as (cache, model):
        assert await retrieve(model, tokens) == 1280
        assert cache.counts["found_near"] == 3
        assert cache.counts["found_far"] == 2


async def test_chunks_lost_by_a_pool_are_stored_again(settings: MakeSettings, prompt: Prompt) -> None:
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


async def test_foreign_value_under_a_key_is_a_miss(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings) as (_, model):
        held = Shared.pools["pool"]
        first, second, third, _ = model.keys(tokens)
        held[second] = held[first]  # Valid checksum, but another chunk.
        assert await retrieve(model, tokens) == 256
        held[third] = b"foreign data"
        assert await retrieve(model, tokens) == 256
        assert second not in held


async def test_unresponsive_pool_is_a_miss(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings, {"name": "pool", "deadline": "200ms"}) as (cache, model):
        Shared.latest.may_reply = anyio.Event()
        now = 0.0
        cache.lower[0].breaker = CircuitBreaker("pool", clock=lambda: now)
        with anyio.fail_after(60):
            for _ in range(5):  # The breaker opens after five failures.
                assert await retrieve(model, tokens) == 0
            assert not cache.tiers[1].available
            assert await retrieve(model, tokens) == 0
        assert len(Shared.latest.queried) == 5, "the pool was queried while its breaker was open"
        now = 60.0
        Shared.latest.may_reply.set()
        with anyio.fail_after(60):
            while await retrieve(model, tokens) != 1024:
                await anyio.sleep(0.05)


async def reason(cache: TieredCache, model: ModelCache, tokens: list[int]) -> tuple[MissReason, str]:
    """Return why a prompt is not a hit at all, and the tier that is named."""
    keys = model.keys(tokens)
    found = cache.look_up(Query(keys, len(tokens)), Expected(model.namespace, [20_480] * len(keys)))
    await cache.settle(found)
    [miss] = cache.explain(found, model.namespace)
    assert (found.total, miss.tokens) == (0, len(tokens))
    found.release()
    return miss.reason, miss.tier


async def test_what_a_failing_pool_may_hold_does_not_count_as_never_stored(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, {"name": "pool", "deadline": "100ms"}) as (cache, model):
        assert await reason(cache, model, prompt(1024)) == (MissReason.NEVER_STORED, "")
        Shared.latest.may_reply = anyio.Event()
        for _ in range(7):  # The breaker opens after five failures.
            assert await reason(cache, model, prompt(1024)) == (MissReason.TIER_UNAVAILABLE, "pool")
        assert not cache.tiers[1].available


async def test_a_prompt_is_explained_with_what_a_pool_holds(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings) as (cache, model):
        hits, misses = await cache.explain_prompt(model.namespace, model.layout, [*tokens, *prompt(256, 1)])
        assert hits == [("pool", 1024)]
        assert [(miss.reason, miss.tokens) for miss in misses] == [(MissReason.NEVER_STORED, 256)]
        assert cache.arena.leases == 0


async def test_what_a_slow_pool_may_hold_is_too_late(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, prefetch={"policy": "timeout", "deadline": "50ms"}) as (cache, model):
        Shared.latest.may_reply = anyio.Event()
        assert await reason(cache, model, prompt(1024)) == (MissReason.TOO_LATE, "pool")


async def test_best_effort_lookup_finds_chunks_later(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings, prefetch={"policy": "best_effort"}) as (_, model):
        Shared.latest.may_reply = anyio.Event()
        with anyio.fail_after(30):  # Half the pool's deadline.
            assert await retrieve(model, tokens) == 0
        Shared.latest.may_reply.set()
        with anyio.fail_after(60):
            while await retrieve(model, tokens) != 1024:
                await anyio.sleep(0.01)


async def test_cancelled_lookup_leaks_nothing(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    await store(settings, tokens)
    async with opened(settings) as (cache, model):
        Shared.latest.may_reply = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(retrieve, model, tokens)
            await until(lambda: Shared.latest.queried)
            tasks.cancel_scope.cancel()
        Shared.latest.may_reply.set()
        await until(lambda: model.held_tokens(tokens) == 1024)
        assert cache.arena.leases == 0, "the cancelled lookup holds leases"


async def test_cleared_chunks_are_not_read_from_pools(settings: MakeSettings, prompt: Prompt) -> None:
    """After new weights, chunks that another host stored earlier must not be used."""
    theirs, ours = prompt(1024, 1), prompt(1024, 2)
    await store(settings, theirs)
    async with opened(settings) as (cache, model):
        await model.store(ours, rows(ours))
        assert await cache.drain(60)
        await model.clear()
        assert await retrieve(model, theirs) == 0
        assert len(Shared.pools["pool"]) == 4, "only our chunks are deleted"
        await model.store(ours, rows(ours))
        assert await cache.drain(60)
        await model.move(ours, "ram", "pool")
        assert await retrieve(model, ours) == 1024, "chunks stored after the clear must be used"


async def test_tracked_chunks_of_a_pool_are_bounded(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.level.MAX_TRACKED_CHUNKS", 6)
    prompts = [prompt(1024, seed) for seed in range(5)]
    async with opened(settings) as (cache, model):
        for tokens in prompts:
            await model.store(tokens, rows(tokens))
            assert await cache.drain(60)
        assert cache.catalog.count(1) <= 6 + 4
        assert len(Shared.pools["pool"]) == 20, "chunks were deleted from the pool"
        await cache.move(cache.catalog.keys(0), "ram", "pool")
        for tokens in prompts:
            assert await retrieve(model, tokens) == 1024


async def test_chunks_expire_with_the_ttl_of_the_pool(settings: MakeSettings, prompt: Prompt) -> None:
    """An expired chunk is demoted to the pool again instead of dropped."""
    tokens = prompt(1024)
    async with opened(settings, {"name": "pool", "ttl": 0.2}, ram=8) as (cache, model):
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
        assert cache.catalog.count(1) == 4
        Shared.pools["pool"].clear()
        await until(lambda: not cache.catalog.count(1))
        other = prompt(2048, 1)
        await model.store(other, rows(other))
        await until(lambda: set(model.keys(tokens)).intersection(Shared.pools["pool"]))


class Checked(Shared):
    """A pool with a check, which succeeds after ``failures``."""

    failures = 2
    checks = 0

    async def check(self) -> str:
        self.checks += 1
        if self.checks <= self.failures:
            raise TierError("cache:6379 failed: Connection refused")
        return "Redis 7.0.15"

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        if self.checks <= self.failures:
            raise ConnectionError("no server answers")
        return await super().contains(keys)


async def test_unreachable_pool_is_reported_before_it_is_used(
    settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvtier")
    monkeypatch.setattr(SharedPlugin, "kvtier_backends", hookimpl(lambda self: {"shared": Checked}))
    monkeypatch.setattr("kvtier.concurrency.breaker.Backoff.next", lambda backoff: 0.01)
    errors: list[object] = []
    async with opened(settings) as (cache, _):
        tier = cache.lower[0]
        with anyio.fail_after(60):
            while Shared.latest.checks <= Checked.failures:
                errors.append(tier.status()["error"])
                await anyio.sleep(0.001)
        await anyio.lowlevel.checkpoint()
        assert tier.status()["error"] is None
        assert tier.outages == 0
    assert "cache:6379 failed: Connection refused" in errors
    logged = [record.getMessage() for record in caplog.records if "tier pool" in record.getMessage()]
    assert logged == ["tier pool: cache:6379 failed: Connection refused", "tier pool: Redis 7.0.15"]


class Unchecked(Shared):
    """A pool without a health check that answers the third lookup."""

    check = None  # type: ignore[assignment]

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.queried.append(len(keys))
        if len(self.queried) < 3:
            raise ConnectionError("nobody answers")
        return [False for _ in keys]


async def test_pool_without_a_health_check_is_asked_for_a_chunk(
    settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedPlugin, "kvtier_backends", hookimpl(lambda self: {"shared": Unchecked}))
    monkeypatch.setattr("kvtier.concurrency.breaker.Backoff.next", lambda backoff: 0.01)
    errors: list[object] = []
    async with opened(settings) as (cache, _):
        tier = cache.lower[0]
        with anyio.fail_after(60):
            while len(Shared.latest.queried) < 3:
                errors.append(tier.status()["error"])
                await anyio.sleep(0.001)
        await anyio.lowlevel.checkpoint()
        assert (tier.status()["error"], tier.outages) == (None, 0)
    assert "ConnectionError('nobody answers')" in errors
    logged = [record.getMessage() for record in caplog.records if "tier pool" in record.getMessage()]
    assert logged == ["tier pool: ConnectionError('nobody answers')"]


async def test_check_of_a_pool_ends_when_a_call_succeeds(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as without permission for the command that the check uses."""
    monkeypatch.setattr(SharedPlugin, "kvtier_backends", hookimpl(lambda self: {"shared": Checked}))
    monkeypatch.setattr(Checked, "failures", 1)
    tokens = prompt(1024)
    async with opened(settings) as (cache, model):
        tier = cache.lower[0]
        await until(lambda: tier.status()["error"] is not None)
        await model.store(tokens, rows(tokens))
        assert await cache.drain(60)
        assert tier.status()["error"] is None
        assert Shared.latest.checks == 1
