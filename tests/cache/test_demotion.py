"""Demotion of chunks to a lower tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier import Settings
from kvtier.events import Evict
from kvtier.tiers.planner import Transfer

from .test_sealing import opened, store

pytestmark = pytest.mark.anyio


async def test_chunk_removed_after_being_chosen_does_not_affect_others(
    settings: Callable[..., Settings], prompt: Callable[..., list[int]]
) -> None:
    async with opened(settings()) as cache:
        keys = store(cache, prompt(1024))
        assert await cache.drain(10)
        ssd = cache.index_of("ssd")
        event = Evict(keys=keys, tier=ssd)
        cache.memory.drop([keys[1]])
        for tier in cache.catalog.tiers(keys[1]):
            await cache._writer.delete(event, Transfer(tier, None, [keys[1]]))
        assert keys[1] not in cache.catalog
        read = await cache._reader.lease(event, ssd, keys)
        assert [chunk.key for chunk in read] == [keys[0], *keys[2:]]
        for chunk in read:
            chunk.lease.release()
