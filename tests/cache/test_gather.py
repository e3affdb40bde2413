"""A prompt is gathered into one tier from wherever it is; whenever it is cancelled nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import pytest

from kvtier import Settings
from kvtier.catalog import State
from kvtier.errors import ChannelClosed
from kvtier.keys import ChunkKey
from kvtier.pipeline import gather as gather_module
from kvtier.pipeline.discover import Expected
from kvtier.pipeline.gather import Gathering, Lender
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.faults import Fault

from .conftest import CHUNK_OBJECT_BYTES
from .house import House, opened

pytestmark = pytest.mark.anyio
MakeSettings = Callable[..., Settings]
Prompt = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 0.2)


def gathering(house: House, tokens: list[int], target: str) -> Gathering:
    keys = house.model.keys(tokens)
    expected = Expected(house.model._namespace, [CHUNK_OBJECT_BYTES] * len(keys))
    return house.cache.gather(keys, expected, target)


def lender(house: House, name: str) -> Lender:
    """A source that is asked, and says what it holds."""

    async def ask(keys: Sequence[ChunkKey]) -> list[int]:
        await anyio.lowlevel.checkpoint()
        return [at for at, key in enumerate(keys) if key in house.sources[name].shelf.held]

    return Lender(house.tier(name), ask, f"the {name}")


async def test_one_prompt_from_three_tiers_and_a_lender(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(8 * 256)
    async with opened(settings, "near", "far", ssd=64) as house:
        await house.fill(tokens, "ssd", "near", "far")
        keys = house.model.keys(tokens)
        house.lose(tokens, "near", range(4))
        await house.cache.clear(keys[2:], tiers=["ssd"])
        # What is left of the far one is not known here.
        house.lose(tokens, "near", [6, 7])
        for key in keys:
            house.cache.hierarchy.catalog.remove(key, house.tier("far").index)
        whole = gathering(house, tokens, "ram")
        assert whole.lacking()
        await whole.run(lender(house, "far"))
        assert (whole.held(), whole.reason) == (keys, None)
        assert whole.transferred_bytes == 8 * CHUNK_OBJECT_BYTES
        assert house.holds(tokens, "far") == [], "it was believed for as long as it was needed"
        assert await house.retrieve(tokens) == len(tokens)


async def test_what_a_tier_has_lost_comes_from_the_next(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near", "far", ssd=64, disk={"write": "never"}) as house:
        await house.fill(tokens, "near", "far")
        house.sources["near"].shelf.held.clear()
        below = gathering(house, tokens, "ssd")
        await below.run()
        assert (len(below.held()), below.reason) == (4, None)
        assert house.holds(tokens, "near") == [], "it is not believed to be there any longer"
        assert house.holds(tokens, "ram") == []


async def test_a_source_that_fails_is_said(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near") as house:
        await house.fill(tokens, "near")
        house.sources["near"].faults.fault = Fault.FAIL
        failed = gathering(house, tokens, "ram")
        await failed.run()
        assert failed.held() == []
        assert failed.reason


async def test_what_a_lender_raises_comes_out(settings: MakeSettings, prompt: Prompt) -> None:
    async def ask(keys: Sequence[ChunkKey]) -> list[int]:
        raise ChannelClosed("gone")

    async with opened(settings, "near") as house:
        lost = gathering(house, prompt(1024), "ram")
        with pytest.raises(ChannelClosed, match="gone"):
            await lost.run(Lender(house.tier("near"), ask, "nobody"))
        assert lost.held() == []


@pytest.mark.parametrize("through", ["scope", "task"])
@pytest.mark.parametrize("target", ["ram", "ssd"])
async def test_it_is_cancelled_at_every_await(
    target: str, through: Through, settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(4 * 256)
    async with opened(settings, "near", ssd=64, disk={"write": "never"}) as house:
        await house.fill(tokens, "near")
        keys = house.model.keys(tokens)
        catalog = house.cache.hierarchy.catalog
        near, tier = house.tier("near"), house.tier(target).index

        async def gather() -> None:
            await gathering(house, tokens, target).run(lender(house, "near"))

        async def forget() -> None:
            """Until nobody knows any longer what the lender has."""
            await house.at_rest()
            with anyio.fail_after(60):
                while any(catalog.state(key, tier) is State.PENDING for key in keys):
                    await anyio.sleep(0.005)
            await house.cache.clear(keys, tiers=[target])
            for key in keys:
                if near.index in catalog.tiers(key):
                    catalog.remove(key, near.index)

        await forget()
        step = 1
        while await cancelled_at(step, gather, through=through):
            await forget()
            step += 1
        assert step > 2
        assert house.holds(tokens, target) == [0, 1, 2, 3]
        assert house.holds(tokens, "near") == []
