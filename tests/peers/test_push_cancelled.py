"""Pushing that is cancelled wherever it can be: nothing of it is left on either side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from kvtier.backends.sealer import Sealer
from kvtier.peers.push import Pushed, Target
from kvtier.testing.cancelling import Through, cancelled_at

from .pushing import Host, hosts, keys_of
from .scripted import until

pytestmark = pytest.mark.anyio

Pair = list[Host]
COUNT = 4


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with hosts(request.param, 32, 32) as pair:
        pair[0].compute(range(1, COUNT + 1))
        yield pair


async def emptied(there: Host) -> None:
    """Nothing is on its way, and it holds nothing."""
    serving: Any = there.instance.server
    await until(lambda: not there.reserving["reservations"] and not serving.status()["grants"])
    await there.cache.clear(keys_of(range(1, COUNT + 1)))
    await until(lambda: not there.cache.arena.leases)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_a_push_at_every_await(pair: Pair, through: Through) -> None:
    here, there = pair
    assert here.instance._handing is not None
    async with here.instance._handing.peers.lend(there.address) as source:
        target = Target(source, Sealer())
        await source._linked()
        for lag in (0, 1, 3):
            step = 1
            while True:
                found = here.cache.look_up(keys_of(range(1, COUNT + 1)))
                chunks = here.cache.hierarchy.shares([chunk.key for chunk in found.chunks])
                found.release()
                try:
                    cancelled = await cancelled_at(
                        step, lambda chunks=chunks: target.push(chunks, 30), through=through, lag=lag
                    )
                finally:
                    for chunk in chunks:
                        chunk.lease.release()
                held = there.held(range(1, COUNT + 1))
                assert await there.settled(there.cache.look_up(keys_of(held))) == len(held)
                await emptied(there)
                if not cancelled:
                    break
                step += 1
            assert step > 3, "it waits for a checksum, for room, for the bytes, and for the verdict"
        assert not source.over


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_a_finish_at_every_await(pair: Pair, through: Through) -> None:
    here, there = pair
    step = 1
    while True:
        handing = here.hand_over(there, range(1, COUNT + 2))
        cancelled = await cancelled_at(step, handing.finish, through=through)
        await handing.ended.wait()
        outcomes = set(handing.result.outcomes.values())
        assert outcomes <= {Pushed.OK, Pushed.ABSENT, Pushed.HELD}
        await until(lambda: not there.cache.expecting.coming)
        await emptied(there)
        if not cancelled:
            break
        step += 1


async def test_a_hand_over_that_is_aborted_after_any_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for what is announced at once, and short, since some of it never is.
    monkeypatch.setattr("kvtier.pipeline.expect.UNANNOUNCED_SECONDS", 0.3)
    here, there = pair
    for turns in range(60):
        # Else no look-up would wait for what was aborted before, until it is announced anew.
        there.cache.expecting._ended.clear()
        handing = here.hand_over(there, range(1, COUNT + 1))
        found = there.look_up(range(1, COUNT + 1), expect=30)
        for _ in range(turns):
            await checkpoint()
        handing.abort()
        await handing.ended.wait()
        came = await there.settled(found)
        assert came >= sum(outcome is Pushed.OK for outcome in handing.result.outcomes.values())
        await until(lambda: not there.cache.expecting.coming)
        await emptied(there)


async def test_a_look_up_that_waits_at_every_await(pair: Pair) -> None:
    here, there = pair
    handing = here.hand_over(there, [1, 2, 90])
    await until(lambda: there.held([1, 2]) == [1, 2])
    for step in range(1, 4):
        found = there.look_up([1, 2, 90], expect=0.3)
        if await cancelled_at(step, lambda found=found: there.cache.settle(found), through="scope"):
            found.release()
        else:
            assert await there.settled(found) == 2
    handing.abort()
    await handing.ended.wait()
