"""What an engine computes again is compared with what is held, and what differs is in quarantine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

from kvtier import Settings
from kvtier.bridge.protocol import Lookup, Reserve, Run
from kvtier.bridge.session import EngineSession
from kvtier.cache import TieredCache
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import chunk_keys, join_keys, state_key
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout, GroupValues
from kvtier.pipeline.verify import Recomputation
from tests.rigs.engine_sessions import BUILT_IN, NAMESPACE, ROOT, session
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

LAYOUT = ChunkLayout(4, (GroupLayout(4, (4096,) * 3),))
KEYS = chunk_keys(ROOT, bytes(48), 4)
"""Three chunks."""
AGAIN = Recomputation("request", 0, "float32")


@asynccontextmanager
async def engine_with_disk(
    folder: Path, capacity: str = "1MiB", layout: ChunkLayout = LAYOUT
) -> AsyncIterator[tuple[EngineSession, TieredCache]]:
    disk = {"name": "ssd", "type": "disk", "path": str(folder), "capacity": "8MiB"}
    memory = {"name": "ram", "type": "cpu", "capacity": capacity}
    settings = Settings(chunk_tokens=4, tiers=[memory, disk], verify=1.0, reserve_share=1.0)
    async with TieredCache.open(settings, plugins=BUILT_IN) as cache:
        engine = session(cache, layout)
        yield engine, cache
        await cache.drain(10)
        engine.close()
        assert cache.arena.leases == cache.catalog.count(0)


def store(
    engine: EngineSession,
    cache: TieredCache,
    values: Sequence[float],
    again: Recomputation | None = None,
    *,
    canary: bool = False,
) -> int:
    """Let an engine fill each chunk with a value. Return how many have got room."""
    run = Run(ROOT, join_keys(KEYS), 4, recomputes=again, canary=canary)
    reserved = engine.reserve(Reserve(1, [run]))
    for lease, offset, value in zip(reserved.leases, reserved.offsets, values, strict=True):
        if lease:
            payload = np.full(3 * 1024, value, np.float32).tobytes()
            cache.arena.view(offset + HEADER_BYTES, len(payload))[:] = payload
    engine.commit(reserved.granted, 0)
    return len(reserved.granted)


async def compared(cache: TieredCache, chunks: int) -> dict[str, int]:
    """Wait until chunks have been compared; return the results."""
    with anyio.fail_after(10):
        while True:
            found = {name: count for name, count in cache.counts.items() if name.startswith("verified_")}
            if sum(found.values()) == chunks:
                await anyio.sleep(0.05)  # What follows a difference.
                return found
            await anyio.sleep(0.01)


async def found(engine: EngineSession, cache: TieredCache) -> int:
    """Return how many chunks a lookup finds."""
    answer, lookup = engine.look_up(Lookup(7, join_keys(KEYS), 12))
    total = len(answer.leases)
    if lookup is not None:
        await cache.settle(lookup)
        last = engine.fetched(7, lookup)
        total += 0 if last is None else len(last.leases)
    engine.reads.cancel(7)
    return total


async def test_a_difference_of_what_came_from_disk(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        assert store(engine, cache, [1, 2, 3]) == 3
        await cache.drain(10)
        await cache.clear(KEYS, tiers=["ram"])
        assert await found(engine, cache) == 3
        assert store(engine, cache, [1, 2, -3], AGAIN) == 3
        assert await compared(cache, 3) == {"verified_equal_ssd": 2, "verified_different_ssd": 1}
        assert list(cache.verifying.status().values()) == [["ssd"]]
        # Neither from disk, nor what was read from there; the wrong one is deleted.
        assert cache.catalog.count(0) == 0
        assert cache.catalog.count(1) == 2
        assert await found(engine, cache) == 0
        assert await cache.move(KEYS, "ssd", "ram") == 0
        # Memory is used, and writes nothing to disk.
        assert store(engine, cache, [1, 2, -3]) == 3
        await cache.drain(10)
        assert await found(engine, cache) == 3
        assert cache.catalog.count(1) == 2
        await cache.clear(namespace=NAMESPACE, tiers=["ssd"])
        assert not cache.verifying.status()
        await cache.clear(KEYS)
        assert store(engine, cache, [1, 2, -3]) == 3
        await cache.drain(10)
        assert cache.catalog.count(1) == 3


async def test_a_difference_of_what_an_engine_has_stored(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [1, 2, 3])
        await cache.drain(10)
        assert store(engine, cache, [1, 2, -3], AGAIN) == 3
        assert await compared(cache, 3) == {"verified_equal_ram": 2, "verified_different_ram": 1}
        assert list(cache.verifying.status().values()) == [["ram", "ssd"]]
        assert store(engine, cache, [1, 2, -3]) == 0
        assert await found(engine, cache) == 0
        await cache.clear(tiers=["ram"])
        assert store(engine, cache, [1, 2, -3]) == 3
        assert await found(engine, cache) == 3
        await cache.drain(10)
        assert list(cache.verifying.status().values()) == [["ssd"]]
        assert cache.catalog.count(1) == 2
        await cache.clear()
        assert not cache.verifying.status()


async def test_a_few_small_differences_cost_these_chunks_and_many_the_namespace(tmp_path: Path) -> None:
    """A batch of another size may change single chunks a little; other weights change most of them."""
    async with engine_with_disk(tmp_path) as (engine, cache):
        for turn in range(3):
            store(engine, cache, [1, 2, 3])
            assert store(engine, cache, [1.01, 2, 3], AGAIN) == 3
            assert (await compared(cache, 3 * turn + 3))["verified_different_ram"] == turn + 1
            assert bool(cache.verifying.status()) == (turn == 2)
            assert await found(engine, cache) == 0


async def test_one_small_difference_among_many_chunks_is_no_reason_for_quarantine(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [1, 2, 3])
        for turn in range(8):
            store(engine, cache, [1, 2, 3], AGAIN)
            await compared(cache, 3 * turn + 3)
        for turn in range(8, 13):
            store(engine, cache, [1, 2, 3])
            store(engine, cache, [1, 2, 3.01], AGAIN)
            assert (await compared(cache, 3 * turn + 3))["verified_different_ram"] == turn - 7
        assert not cache.verifying.status()


async def test_what_was_stored_with_loss_may_differ(tmp_path: Path) -> None:
    """Also what was computed from it; but it is not that of other tokens."""
    lossy = ChunkLayout(4, LAYOUT.groups, values=(GroupValues("float32"),))
    async with engine_with_disk(tmp_path, layout=lossy) as (engine, cache):
        store(engine, cache, [1, 2, 3])
        assert store(engine, cache, [1.3, 2, -3], AGAIN) == 3
        results = {"verified_equal_ram": 1, "verified_tolerable_ram": 1, "verified_different_ram": 1}
        assert await compared(cache, 3) == results
        assert cache.verifying.status()


async def test_what_a_canary_has_computed_twice_measures_the_tolerance(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [1, 2, 3], canary=True)
        assert store(engine, cache, [1.01, 2, 3], AGAIN, canary=True) == 3
        await until(lambda: cache.arena.leases == 3)
        assert not [name for name in cache.counts if name.startswith("verified_")]
        assert store(engine, cache, [1.015, 2, 3], AGAIN) == 3
        assert await compared(cache, 3) == {"verified_equal_ram": 2, "verified_tolerable_ram": 1}
        # However much these differ, other tokens are found.
        assert store(engine, cache, [1, -2, 3], AGAIN, canary=True) == 3
        await until(lambda: cache.arena.leases == 3)
        assert store(engine, cache, [1, -2, 3], AGAIN) == 3
        assert (await compared(cache, 6))["verified_different_ram"] == 1
        assert cache.verifying.status()


async def test_what_is_no_number_on_both_sides_is_equal(tmp_path: Path) -> None:
    """A model that overflows does so each time. What follows the last whole page is never the same."""
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [np.nan, np.inf, 3])
        assert store(engine, cache, [-np.nan, np.inf, np.nan], AGAIN) == 3
        assert await compared(cache, 3) == {"verified_equal_ram": 2, "verified_different_ram": 1}


async def test_states(tmp_path: Path) -> None:
    layout = ChunkLayout(4, (GroupLayout(4, (4096,)), GroupLayout(4, (4096,), state=True)))
    async with engine_with_disk(tmp_path) as (_, cache):
        engine = session(cache, layout, first_lease=1000)
        key = state_key(KEYS[0])
        for again, value in ((None, 1), (AGAIN, 1), (AGAIN, -1)):
            reserved = engine.reserve(Reserve(1, [Run(KEYS[0], key, STATE_TOKENS, recomputes=again)]))
            payload = np.full(1024, value, np.float32).tobytes()
            cache.arena.view(reserved.offsets[0] + HEADER_BYTES, len(payload))[:] = payload
            engine.commit(reserved.granted, 0)
        assert await compared(cache, 2) == {"verified_equal_ram": 1, "verified_different_ram": 1}
        assert cache.verifying.status()
        engine.close()


async def test_only_free_memory_is_used(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path, capacity="64KiB") as (engine, cache):
        assert store(engine, cache, [1, 2, 3]) == 3
        await cache.drain(10)
        assert store(engine, cache, [1, 2, 3], AGAIN) == 1  # Of four chunks, three are held.
        assert await compared(cache, 1) == {"verified_equal_ram": 1}
        assert cache.catalog.count(0) == 3


async def test_without_numpy_what_is_not_equal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [1, 2, 3])
        reserved = engine.reserve(Reserve(1, [Run(ROOT, join_keys(KEYS), 4, recomputes=AGAIN)]))
        monkeypatch.setitem(sys.modules, "numpy", None)
        engine.commit(reserved.granted, 0)
        assert await compared(cache, 3) == {"verified_unknown_ram": 3}
        monkeypatch.undo()
        assert not cache.verifying.status()
        assert await found(engine, cache) == 3


async def test_an_engine_that_leaves_meanwhile(tmp_path: Path) -> None:
    async with engine_with_disk(tmp_path) as (engine, cache):
        store(engine, cache, [1, 2, 3])
        await cache.drain(10)
        reserved = engine.reserve(Reserve(1, [Run(ROOT, join_keys(KEYS), 4, recomputes=AGAIN)]))
        assert engine.writes.reserved_bytes
        assert len(reserved.granted) == 3
        engine.writes.void_all()
        assert await found(engine, cache) == 3  # They are held, whatever becomes of the comparison.
        engine.writes.give_up(reserved.granted, 0)
        assert not engine.writes.reserved_bytes
        assert cache.arena.leases == 3


async def test_a_type_that_does_not_fit_the_layout_harms_nothing(tmp_path: Path) -> None:
    layout = ChunkLayout(4, (GroupLayout(4, (4095,) * 3),))
    async with engine_with_disk(tmp_path) as (_, cache):
        engine = session(cache, layout, first_lease=1000)
        for again in (None, AGAIN):
            reserved = engine.reserve(Reserve(1, [Run(ROOT, join_keys(KEYS), 4, recomputes=again)]))
            for offset in reserved.offsets:
                cache.arena.view(offset + HEADER_BYTES, 8)[:] = bytes([again is None] * 8)
            engine.commit(reserved.granted, 0)
        assert await compared(cache, 3) == {"verified_unknown_ram": 3}
        engine.close()
