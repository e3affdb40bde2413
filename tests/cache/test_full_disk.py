"""A disk that is full before the tier reaches its capacity, because it is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier import Settings, TieredCache
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.small_disk import mounted

from .test_sealing import store

pytestmark = pytest.mark.anyio


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB below the disk tier."""
    with mounted(tmp_path / "ssd", 2) as path:
        yield path


async def test_new_chunks_evict_cold_ones_on_a_full_disk(
    small_disk: Path, settings: Callable[..., Settings], prompt: Callable[..., list[int]]
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
