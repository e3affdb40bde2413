"""Chunks that several lower tiers hold: read from the cheapest. And what others hold is not relied on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.costs import HALF_LIFE_SECONDS, ReadCost
from kvtier.testing.faults import Fault

from .conftest import CHUNK_OBJECT_BYTES, rows
from .house import MakeSettings, costs, opened, until

pytestmark = pytest.mark.anyio
Prompt = Callable[..., list[int]]


@pytest.mark.parametrize(
    ("seconds", "source"),
    [({}, "ssd"), ({"ssd": 1.0, "peers": 0.9}, "ssd"), ({"ssd": 1.0, "peers": 0.1}, "peers")],
    ids=["unmeasured", "alike", "clearly cheaper"],
)
async def test_a_prompt_comes_from_the_cheapest(
    settings: MakeSettings, prompt: Prompt, seconds: dict[str, float], source: str
) -> None:
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, **seconds)
        found = house.cache.look_up(house.model.keys(tokens))
        assert [chunk.source for chunk in found.chunks] == [house.tier(source).index] * 4
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert house.reads == [(source, 4)]
        assert house.cache.hierarchy.counts[f"found_{source}"] == 4


async def test_costs_are_learnt_from_reads(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        house.sources["near"].delays.delay = 0.05
        assert house.tier("near").cost(CHUNK_OBJECT_BYTES) is None
        assert await house.retrieve(tokens) == 1024
        cost = house.tier("near").cost(4 * CHUNK_OBJECT_BYTES)
        assert cost is not None
        assert cost >= 0.05
        assert house.tier("far").cost(CHUNK_OBJECT_BYTES) is None
        costs(house, far=1e-6)
        house.cache.hierarchy.drop(house.model.keys(tokens))
        assert await house.retrieve(tokens) == 1024
        assert house.reads == [("near", 4), ("far", 4)]


async def test_failures_and_time_outs_make_a_source_dearer(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near")
        near = house.sources["near"]
        costs(house, near=1.0)
        near.faults.fault, near.faults.only = Fault.FAIL, frozenset(house.model.keys(tokens))
        assert await house.retrieve(tokens) == 0
        failed = house.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert failed is not None
        assert failed > 1.0
        house.hang("near")
        assert await house.retrieve(tokens) == 0
        out_of_time = house.tier("near").cost(CHUNK_OBJECT_BYTES)
        assert out_of_time is not None
        assert out_of_time > 1.2 * failed


async def test_what_was_slow_once_is_tried_again(settings: MakeSettings, prompt: Prompt) -> None:
    now = 0.0
    async with opened(settings, "near", "far") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "near", "far")
        costs(house, far=0.001)
        house.tier("near").reading = ReadCost(lambda: now)
        house.tier("near").reading.succeeded(CHUNK_OBJECT_BYTES, 10.0)
        for later, source in [(0.0, "far"), (HALF_LIFE_SECONDS, "far"), (10 * HALF_LIFE_SECONDS, "near")]:
            now += later
            assert await house.retrieve(tokens) == 1024
            assert house.reads.pop() == (source, 4)
            house.cache.hierarchy.drop(house.model.keys(tokens))


async def test_a_prompt_that_three_sources_hold_together(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", "far", "peers") as house:
        tokens = prompt(3072)
        await house.fill(tokens, "near", "far", "peers")
        house.lose(tokens, "near", range(4, 12))
        house.lose(tokens, "far", [*range(4), *range(8, 12)])
        house.lose(tokens, "peers", range(8))
        assert await house.retrieve(tokens) == 3072
        assert sorted(house.reads) == [("far", 4), ("near", 4), ("peers", 4)]


# What peers hold.


async def test_what_only_peers_hold_is_demoted_and_not_dropped(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "peers", ssd=64, ram=8, disk={"write": "on_evict"}) as house:
        tokens, more = prompt(1024), prompt(2048, 1)
        await house.fill(tokens, "peers")
        assert await house.retrieve(tokens) == 1024
        assert house.holds(tokens, "ssd") == []
        assert await house.model.store(more, rows(more)) > 0
        await until(lambda: bool(house.holds(tokens, "ssd")))


async def test_a_move_to_peers_takes_nothing_away(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "peers") as house:
        tokens = prompt(1024)
        await house.fill(tokens, "peers")
        assert await house.retrieve(tokens) == 1024
        assert await house.model.move(tokens, "ram", "peers") == 1024
        assert house.holds(tokens, "ram") == [0, 1, 2, 3]


async def test_a_look_up_for_others_reads_from_this_host_alone(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, ssd=1.0, peers=0.001)
        found = house.cache.look_up(house.model.keys(tokens), local=True)
        await found.settle(None)
        assert found.ready == 4
        found.release()
        assert house.reads == [("ssd", 4)]


async def test_a_look_up_for_others_waits_for_no_other_host(settings: MakeSettings, prompt: Prompt) -> None:
    """Two hosts that fetch the same chunk from each other would wait for each other."""
    async with opened(settings, "peers", ssd=64) as house:
        tokens = prompt(1024)
        await house.fill(tokens, "ssd", "peers")
        costs(house, ssd=1.0, peers=0.001)
        house.sources["peers"].delays.hang()
        ours = house.cache.look_up(house.model.keys(tokens))
        theirs = house.cache.look_up(house.model.keys(tokens), local=True)
        assert (len(ours.chunks), len(theirs.chunks)) == (4, 0)
        house.sources["peers"].delays.resume()
        await ours.settle(None)
        assert ours.ready == 4
        ours.release()


async def test_what_peers_ask_for_is_not_what_engines_ask_for(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(1024)
    async with opened(settings) as house:
        await house.model.store(tokens, rows(tokens))
        keys = house.model.keys(tokens)
        house.cache.look_up(keys, local=True).release()
        counts = house.cache.hierarchy.counts
        assert (counts["looked_up"], counts["found_ram"]) == (0, 0)
        house.cache.look_up(keys).release()
        assert (counts["looked_up"], counts["found_ram"]) == (4, 4)
