"""Gathering a prompt into one tier from all others, also with cancellation at any await."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from kvtier.catalog.catalog import State
from kvtier.errors import ChannelClosed
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline import move as move_module
from kvtier.pipeline.move import ChunkProvider, Gathering
from kvtier.pipeline.query import Expected
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.faults import Fault
from tests.rigs.faulty_sources import CacheHarness, opened
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, MakeSettings, Prompt

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 0.2)


def gathering(harness: CacheHarness, tokens: list[int], target: str) -> Gathering:
    keys = harness.model.keys(tokens)
    expected = Expected(harness.model.namespace, [CHUNK_OBJECT_BYTES] * len(keys))
    return harness.cache.gather(keys, expected, target)


def provider(harness: CacheHarness, name: str) -> ChunkProvider:
    """Return a source that reports its chunks when queried."""

    async def ask(keys: Sequence[ChunkKey]) -> list[int]:
        await anyio.lowlevel.checkpoint()
        return [at for at, key in enumerate(keys) if key in harness.sources[name].pool.held]

    return ChunkProvider(harness.tier(name), ask, f"the {name}")


async def test_prompt_from_three_tiers_and_a_provider(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(8 * 256)
    async with opened(settings, "near", "far", ssd=64) as harness:
        await harness.fill(tokens, "ssd", "near", "far")
        keys = harness.model.keys(tokens)
        harness.lose_chunks(tokens, "near", range(4))
        await harness.cache.clear(keys[2:], tiers=["ssd"])
        # The catalog does not know the chunks that remain in the far tier.
        harness.lose_chunks(tokens, "near", [6, 7])
        for key in keys:
            harness.cache.catalog.remove(key, harness.tier("far").index)
        whole = gathering(harness, tokens, "ram")
        assert whole.is_incomplete()
        await whole.run(provider(harness, "far"))
        assert (whole.held(), whole.reason) == (keys, None)
        assert whole.transferred_bytes == 8 * CHUNK_OBJECT_BYTES
        assert harness.held_chunks(tokens, "far") == [], (
            "chunks of the provider are removed from the catalog afterwards"
        )
        assert await harness.retrieve(tokens) == len(tokens)


async def test_chunks_lost_by_a_tier_come_from_the_next(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near", "far", ssd=64, disk={"write": "never"}) as harness:
        await harness.fill(tokens, "near", "far")
        harness.sources["near"].pool.held.clear()
        below = gathering(harness, tokens, "ssd")
        await below.run()
        assert (len(below.held()), below.reason) == (4, None)
        assert harness.held_chunks(tokens, "near") == [], "lost chunks are removed from the catalog"
        assert harness.held_chunks(tokens, "ram") == []


async def test_failing_source_is_reported(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near") as harness:
        await harness.fill(tokens, "near")
        harness.sources["near"].faults.fault = Fault.FAIL
        failed = gathering(harness, tokens, "ram")
        await failed.run()
        assert failed.held() == []
        assert failed.reason


async def test_only_what_stays_in_the_target_is_gathered(settings: MakeSettings, prompt: Prompt) -> None:
    """Room up to the high watermark, 0.95 of the capacity: more would be evicted at once."""
    tokens = prompt(24 * 256)
    async with opened(settings, "near", ssd=20, disk={"write": "never"}) as harness:
        await harness.fill(tokens, "near")
        fitting = gathering(harness, tokens, "ssd")
        await fitting.run()
        assert fitting.held() == harness.model.keys(tokens)[:19]
        assert "ssd" in str(fitting.reason)


async def test_exception_of_a_provider_propagates(settings: MakeSettings, prompt: Prompt) -> None:
    async def ask(keys: Sequence[ChunkKey]) -> list[int]:
        raise ChannelClosed("closed")

    async with opened(settings, "near") as harness:
        lost = gathering(harness, prompt(1024), "ram")
        with pytest.raises(ChannelClosed, match="closed"):
            await lost.run(ChunkProvider(harness.tier("near"), ask, "a provider"))
        assert lost.held() == []


@pytest.mark.parametrize("through", ["scope", "task"])
@pytest.mark.parametrize("target", ["ram", "ssd"])
async def test_cancelled_at_every_await(
    target: str, through: Through, settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near", ssd=64, disk={"write": "never"}) as harness:
        await harness.fill(tokens, "near")
        keys = harness.model.keys(tokens)
        catalog = harness.cache.catalog
        near, tier = harness.tier("near"), harness.tier(target).index

        async def gather() -> None:
            await gathering(harness, tokens, target).run(provider(harness, "near"))

        async def forget() -> None:
            """Wait for pending work, and remove all copies from the target and the catalog."""
            await harness.wait_until_idle()
            await until(lambda: not any(catalog.state(key, tier) is State.PENDING for key in keys))
            await harness.cache.clear(keys, tiers=[target])
            for key in keys:
                if near.index in catalog.tiers(key):
                    catalog.remove(key, near.index)

        await forget()
        step = 1
        while await cancelled_at(step, gather, through=through):
            await forget()
            step += 1
        assert step > 2
        assert harness.held_chunks(tokens, target) == [0, 1, 2, 3]
        assert harness.held_chunks(tokens, "near") == []
