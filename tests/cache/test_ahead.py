"""Prompts that are brought up from the disk shortly before they come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline import ahead
from kvtier.tiers.tier import Tier
from tests.rigs.faulty_sources import BUILT_IN

from .conftest import CHUNK_TOKENS, Prompt, store

pytestmark = pytest.mark.anyio
CHUNKS = 8


def memory(**more: Any) -> dict[str, Any]:
    return {"eviction": "resume", "high_watermark": 1.0, "low_watermark": 1.0, **more}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "CHECK_SECONDS", 0.01)


@pytest.fixture
async def cache(settings: Callable[..., Settings]) -> AsyncIterator[TieredCache]:
    """Memory for 8 chunks above a disk, to which everything is written."""
    made = settings(ram=CHUNKS, ssd=100, memory=memory(), prefetch={"ahead": True})
    async with TieredCache.open(made, plugins=BUILT_IN) as cache:
        yield cache


async def on_disk_only(cache: TieredCache, tokens: list[int]) -> list[ChunkKey]:
    keys = store(cache, tokens)
    await cache.drain(5.0)
    assert set(cache.catalog.prefix(keys)) == {0}
    cache.memory.drop(keys)
    assert cache.catalog.prefix(keys) == [1] * len(keys)
    return keys


def row_of(cache: TieredCache, key: ChunkKey) -> int:
    row = cache.catalog.row(key)
    assert row is not None
    return row


class Returning:
    """Replaces what the disk's policy expects, once."""

    def __init__(self, cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        monkeypatch.setattr(cache.catalog.policies[1], "returning", self._take)

    def _take(self, now: float) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.01)


async def test_prompt_is_read_before_it_is_asked_for(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: cache.catalog.prefix(keys) == [0] * len(keys))
    assert cache.counts["ahead"] == len(keys)
    assert cache.catalog.tiers(keys[0]) == [0, 1], "the disk keeps it"


async def test_chunks_that_memory_holds_are_not_read_again(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    returning, keys = Returning(cache, monkeypatch), store(cache, prompt(4 * CHUNK_TOKENS))
    await cache.drain(5.0)
    cache.memory.drop(keys[2:])
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: cache.catalog.prefix(keys) == [0] * len(keys))
    assert cache.counts["ahead"] == 2
    returning.rows = [row_of(cache, keys[-1])]
    await anyio.sleep(0.1)
    assert cache.counts["ahead"] == 2


async def test_what_memory_prefers_stays(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only as much of a prompt is read as finds room."""
    returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
    others = store(cache, prompt(6 * CHUNK_TOKENS, 1))
    await cache.drain(5.0)

    def prefer_others(prompt: IncomingPrompt) -> Iterator[int]:
        return iter(())

    monkeypatch.setattr(cache.catalog.policies[0], "victims_for", prefer_others)
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: cache.counts["ahead"] > 0)
    await anyio.sleep(0.05)
    assert cache.catalog.prefix(keys) == [0, 0, 1, 1]
    assert cache.catalog.prefix(others) == [0] * len(others)


async def test_nothing_is_read_if_memory_cannot_decline(
    settings: Callable[..., Settings], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(ram=CHUNKS, ssd=100, memory=memory(eviction="lru"))
    async with TieredCache.open(made, plugins=BUILT_IN) as cache:
        returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
        returning.rows = [row_of(cache, keys[-1])]
        await until(lambda: not returning.rows)
        await anyio.sleep(0.05)
        assert cache.counts["ahead"] == 0
        assert cache.catalog.prefix(keys) == [1] * len(keys)


@pytest.mark.parametrize("why", ["outage", "quarantine", "in flight"])
async def test_no_room_is_made_for_what_is_not_read(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
    others = store(cache, prompt(6 * CHUNK_TOKENS, 1))
    await cache.drain(5.0)
    if why == "outage":
        monkeypatch.setattr(Tier, "available", False)
    elif why == "quarantine":
        cache.quarantined[cache.catalog.namespace(keys[0])] = 1 << 1
    else:
        cache.catalog.add_copies(keys, 0)
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: not returning.rows)
    await anyio.sleep(0.05)
    assert cache.counts["ahead"] == 0
    assert cache.catalog.prefix(others) == [0] * len(others)


async def test_policy_that_fails_ends_neither_the_cache_nor_reading_ahead(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: float) -> list[int]:
        raise ZeroDivisionError("as a plugin's may")

    monkeypatch.setattr(cache.catalog.policies[1], "returning", fail)
    await until(lambda: bool(caplog.records))
    assert "ZeroDivisionError" in caplog.text
    returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: cache.catalog.prefix(keys) == [0] * len(keys))


async def test_nothing_is_read_during_a_shutdown(
    cache: TieredCache, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What memory holds is being written then."""
    returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
    await cache.finish()
    returning.rows = [row_of(cache, keys[-1])]
    await until(lambda: not returning.rows)
    await anyio.sleep(0.05)
    assert cache.catalog.prefix(keys) == [1] * len(keys)


async def test_setting_turns_it_off(
    settings: Callable[..., Settings], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(ram=CHUNKS, ssd=100, memory=memory(), prefetch={"ahead": False})
    async with TieredCache.open(made, plugins=BUILT_IN) as cache:
        returning, keys = Returning(cache, monkeypatch), await on_disk_only(cache, prompt(4 * CHUNK_TOKENS))
        returning.rows = [row_of(cache, keys[-1])]
        await anyio.sleep(0.2)
        assert returning.rows, "nobody has asked"
