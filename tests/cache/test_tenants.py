"""A cache whose tiers tenants share: the room of each holds while others store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier import ChunkHints, TieredCache
from kvtier.catalog.tenants import Usage, tenant_of_salt

from .conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, MakeSettings, rows

pytestmark = pytest.mark.anyio

TENANTS = {"a": {"share": 0.4, "salt": "salt of a"}, "b": {"max": 0.25}}


def usage(cache: TieredCache, tier: int = 0) -> dict[str, Usage]:
    shared = cache.tiers[tier].tenants
    assert shared is not None
    return {each.tenant: each for each in shared.usage()}


async def store(
    cache: TieredCache, tokens: list[int], hints: ChunkHints | None = None, salt: str = ""
) -> None:
    model = cache.model("m", token_bytes=TOKEN_BYTES, salt=salt)
    await model.store(tokens, rows(tokens), hints)
    assert await cache.drain(60)


async def test_share_holds_in_memory_and_on_disk(
    settings: MakeSettings, prompt: Callable[[int, int], list[int]]
) -> None:
    async with TieredCache.open(settings(ram=40, ssd=40, tenants=TENANTS)) as cache:
        mine = prompt(14 * CHUNK_TOKENS, 0)
        await store(cache, mine, salt="salt of a")
        for seed in range(1, 30):
            await store(cache, prompt(5 * CHUNK_TOKENS, seed), ChunkHints(f"t{seed}", 100, 10 * 365 * 86_400))
        for tier in (0, 1):
            assert usage(cache, tier)["a"].chunks == 14
            assert usage(cache, tier)["a"].evictions == 0
            assert usage(cache, tier)["other"].evictions > 50
        model = cache.model("m", token_bytes=TOKEN_BYTES, salt="salt of a")
        found = bytearray(len(mine) * TOKEN_BYTES)
        assert await model.retrieve(mine, found) == len(mine)
        assert found == rows(mine)
        assert usage(cache)["a"].hits == 14


async def test_maximum_holds_in_memory_and_on_disk(
    settings: MakeSettings, prompt: Callable[[int, int], list[int]]
) -> None:
    async with TieredCache.open(settings(ram=80, ssd=80, tenants=TENANTS)) as cache:
        limit = usage(cache)["b"].max_bytes
        assert limit == int(0.25 * int(80 * CHUNK_OBJECT_BYTES * 0.9))
        for seed in range(8):
            await store(cache, prompt(5 * CHUNK_TOKENS, seed), ChunkHints("b"))
        await store(cache, prompt(CHUNK_TOKENS, 99))
        assert usage(cache, 1)["b"].used_bytes <= limit
        assert usage(cache)["b"].used_bytes <= limit + 5 * CHUNK_OBJECT_BYTES
        assert usage(cache, 1)["b"].evictions >= 20
        assert usage(cache, 1)["other"].chunks == 1
        assert cache.tiers[1].used_bytes < 30 * CHUNK_OBJECT_BYTES


async def test_chunks_found_at_the_start_belong_to_who_uses_them(
    settings: MakeSettings, prompt: Callable[[int, int], list[int]]
) -> None:
    shared, tokens = settings(tenants=TENANTS), prompt(4 * CHUNK_TOKENS, 0)
    async with TieredCache.open(shared) as cache:
        await store(cache, tokens, salt="salt of a")
    async with TieredCache.open(shared) as cache:
        assert usage(cache, 1)["other"].chunks == 4
        model = cache.model("m", token_bytes=TOKEN_BYTES, salt="salt of a")
        assert await model.retrieve(tokens, bytearray(len(tokens) * TOKEN_BYTES)) == len(tokens)
        assert [usage(cache, tier)["a"].chunks for tier in (0, 1)] == [4, 4]


async def test_salts_are_not_shown(settings: MakeSettings, prompt: Callable[[int, int], list[int]]) -> None:
    async with TieredCache.open(settings(tenants=TENANTS)) as cache:
        await store(cache, prompt(CHUNK_TOKENS, 0), salt="another salt")
        status = cache.status()
        assert "salt" not in str(status)
        assert usage(cache)["other"].chunks == 1
        columns = cache.catalog.columns.hints
        assert columns.tenant(0) == columns.number(tenant_of_salt("another salt"))


async def test_without_tenants_nothing_is_divided(settings: MakeSettings) -> None:
    async with TieredCache.open(settings()) as cache:
        assert [tier.tenants for tier in cache.tiers] == [None, None]
        assert cache.status()["tenants"] == []
