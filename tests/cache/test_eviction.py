"""What leaves a tier for new chunks, and what stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import TieredCache
from kvtier.catalog import kvtier_eviction_policies
from kvtier.events import Evict
from kvtier.tiers.planner import Transfer
from tests.rigs.chunks import make_key
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.small_disk import mounted

from .conftest import (
    CHUNK_OBJECT_BYTES,
    CHUNK_TOKENS,
    TOKEN_BYTES,
    MakeSettings,
    Prompt,
    headers,
    rows,
    store,
)

pytestmark = pytest.mark.anyio
CHUNKS = 32


@pytest.mark.parametrize("policy", sorted(set(kvtier_eviction_policies()) - {"sieve", "tinylfu"}))
async def test_only_the_first_in_the_order_are_dropped_and_the_others_stay_in_it(
    settings: MakeSettings, prompt: Prompt, policy: str
) -> None:
    """Whatever else the search examines. ``sieve`` and ``tinylfu`` age what a search passes by."""
    memory = {"eviction": policy, "high_watermark": 1.0, "low_watermark": 1.0}
    async with TieredCache.open(settings(ram=CHUNKS, ssd=0, memory=memory), plugins=BUILT_IN) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        for seed in range(CHUNKS):
            tokens = prompt(CHUNK_TOKENS, seed=seed)
            assert await model.store(tokens, rows(tokens)) == len(tokens)
        catalog = cache.catalog
        order = catalog.victims(0)
        assert len(order) == CHUNKS
        for left in range(CHUNKS - 3, 0, -3):
            reserved = cache.reserve_all(headers([make_key(at) for at in range(3)]))
            assert catalog.victims(0) == order[CHUNKS - left :]
            cache.abandon([reservation for reservation in reserved if reservation is not None])
            leases = cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 3)  # The memory stays in use.
            assert len(leases) == 3


async def test_chunk_removed_after_being_chosen_does_not_affect_others(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with TieredCache.open(settings(), plugins=BUILT_IN) as cache:
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB below the disk tier."""
    with mounted(tmp_path / "ssd", 2) as path:
        yield path


async def test_new_chunks_evict_cold_ones_on_a_full_disk(
    small_disk: Path, settings: MakeSettings, prompt: Prompt
) -> None:
    configured = settings(ssd=512, disk={"path": str(small_disk)})  # A capacity of 10 MiB.
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        keys = []
        for seed in range(16):  # 5 MiB
            keys.append(store(cache, prompt(4096, seed)))
            assert await cache.drain(30)
        assert cache.counts["put_full"]
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        kept = [sum(key in cache.catalog for key in prompt_keys) for prompt_keys in keys]
    # What the disk rejects is lost, and as much is evicted before the next batch. Which chunks are written in
    # one batch depends on timing: a whole prompt, or parts of it.
    stored, newest = sum(kept[-4:]), sum(map(len, keys[-4:]))
    assert stored >= newest - stored - len(keys[-1]), kept
    assert kept[0] == 0, kept
