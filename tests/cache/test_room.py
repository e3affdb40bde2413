"""Room for what engines store: which chunks are dropped for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier import Settings, TieredCache
from kvtier.catalog import kvtier_eviction_policies
from tests.rigs.faulty_sources import BUILT_IN

from .conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows

pytestmark = pytest.mark.anyio
CHUNKS = 32


@pytest.mark.parametrize("policy", sorted(set(kvtier_eviction_policies()) - {"sieve", "tinylfu"}))
async def test_only_the_first_in_the_order_are_dropped_and_the_others_stay_in_it(
    settings: Callable[..., Settings], prompt: Callable[..., list[int]], policy: str
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
            leases = cache._allocator.allocate_all([CHUNK_OBJECT_BYTES] * 3)
            assert len(leases) == 3
            assert catalog.victims(0) == order[CHUNKS - left :]
            for lease in leases:
                lease.release()
            leases = cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 3)  # The memory stays in use.
            assert len(leases) == 3
