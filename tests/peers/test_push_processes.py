"""Whoever pushes, or is pushed to, is a process that is killed, stopped and resumed in the middle of it."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest

from kvtier.peers.push import Pushed

from .peer_process import PeerProcess
from .push_process import PushProcess
from .pushing import Host, hosts, keys_of
from .scripted import until
from .test_backend_processes import started

pytestmark = pytest.mark.anyio

MIB = 1 << 20
BOTH = ["tcp", pytest.param("nixl", marks=pytest.mark.slow)]
FITS = 256 * MIB // 24_576
"""Chunks of the size that hosts count in."""


async def half_there(there: Host) -> None:
    """Some have come, and others are half written."""
    await until(lambda: there.counts.get("committed") and there.reserving["reservations"] > 1)


@pytest.mark.parametrize("kind", BOTH)
async def test_who_pushes_is_killed_in_the_middle(kind: str) -> None:
    async with hosts(kind, FITS) as (there,):
        async with PushProcess(kind, 2 * MIB, stops_after=1) as pusher:
            await pusher.hand_over(there.address, range(1, 61))
            found = there.look_up(range(1, 61))
            await pusher.compute(range(1, 51))
            await half_there(there)
            await pusher.kill()
        came = await there.settled(found)
        held = there.held(range(1, 61))
        assert 0 < len(held) < 60
        # Batches are written side by side: the second may have come before the first.
        assert held[:came] == list(range(1, came + 1))
        assert came + 1 not in held
        # Who comes after it is not hindered by what it left.
        async with PushProcess(kind, 2 * MIB) as another:
            await another.compute(range(1, 61))
            await another.hand_over(there.address, range(1, 61))
            assert await another.finish() == 60
        assert await there.settled(there.look_up(range(1, 61))) == 60


@pytest.mark.parametrize("kind", BOTH)
async def test_who_pushes_stands_still_until_its_time_is_over(kind: str) -> None:
    async with (
        PushProcess(kind, 2 * MIB, stops_after=1) as pusher,
        hosts(kind, FITS, hand_over={"reserve": 3}) as (there,),
    ):
        await pusher.hand_over(there.address, range(1, 61))
        await pusher.compute(range(1, 51))
        await half_there(there)
        pusher.signal(signal.SIGSTOP)
        await until(lambda: not there.reserving["reservations"])
        found = there.look_up(range(1, 61), expect=0.5)
        assert await there.settled(found) < 60, "who waits does so no longer than it wants to"
        pusher.signal(signal.SIGCONT)
        await pusher.go_on()
        assert await pusher.finish() == 50, "what was late was pushed again"
        await until(lambda: not there.cache.expecting.coming)
        await until(lambda: not there.instance.server.status()["grants"])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", BOTH)
async def test_who_is_pushed_to_is_killed_in_the_middle_and_started_anew(kind: str) -> None:
    target = PeerProcess([], payload=100 * MIB, transport={"type": kind, "deadline": 5})
    async with started(target), hosts(kind, FITS) as (here,):
        handing = here.instance.hand_over(target.address, keys_of(range(1, 61)))
        await here.compute_many(range(1, 51), 2 * MIB)
        await until(lambda: handing.progress.pushed >= 4)
        await target.kill()
        with anyio.fail_after(60):
            await handing.ended.wait()
        assert handing.result.trouble
        assert handing.result.leading < 60
        await target.start()
        again = here.instance.hand_over(target.address, keys_of(range(1, 51)))
        assert (await again.finish(60)).leading == 50


@pytest.mark.parametrize("kind", BOTH)
async def test_who_is_pushed_to_stands_still_for_a_while(kind: str) -> None:
    target = PeerProcess([], payload=100 * MIB, transport=kind)
    async with started(target), hosts(kind, FITS) as (here,):
        handing = here.instance.hand_over(target.address, keys_of(range(1, 51)))
        await here.compute_many(range(1, 41), 2 * MIB)
        await until(lambda: handing.progress.pushed >= 4)
        target.signal(signal.SIGSTOP)
        await here.compute_many(range(41, 51), 2 * MIB)
        await until(lambda: any(client.source is None for client in clients_of(here)))
        target.signal(signal.SIGCONT)
        assert (await handing.finish(60)).leading == 50
        await until_nothing_reserved(target)


@pytest.mark.parametrize("kind", BOTH)
async def test_who_is_pushed_to_stands_still_for_good(kind: str) -> None:
    target = PeerProcess([], payload=100 * MIB, transport={"type": kind, "deadline": 2})
    async with started(target), hosts(kind, FITS) as (here,):
        handing = here.instance.hand_over(target.address, keys_of(range(1, 51)))
        await here.compute_many(range(1, 41), 2 * MIB)
        await until(lambda: handing.progress.pushed >= 4)
        target.signal(signal.SIGSTOP)
        with anyio.fail_after(60):
            handed = await handing.finish(1)
            assert handed.leading < 50
            assert set(handed.outcomes.values()) <= {Pushed.OK, Pushed.ABSENT, Pushed.FAILED}
            await handing.ended.wait()
        target.signal(signal.SIGKILL)


@pytest.mark.slow
async def test_a_late_write_over_nixl_never_lands_in_memory_that_is_anothers() -> None:
    """Its writer stands still when it is cut off, and goes on when the memory belongs to somebody else."""
    async with hosts("nixl", FITS, hand_over={"reserve": 1}) as (there,):
        async with PushProcess("nixl", 2 * MIB, stops_after=1) as pusher:
            await pusher.hand_over(there.address, range(1, 61))
            await pusher.compute(range(1, 51))
            await half_there(there)
            pusher.signal(signal.SIGSTOP)
            await until(lambda: not there.reserving["reservations"])
            overdue: Any = there.instance.server.status()  # type: ignore[union-attr]
            assert overdue["grants"], "its memory is kept"
            await pusher.kill()
            await until(lambda: not there.instance.server.status()["grants"])  # type: ignore[union-attr]
        await there.compute_many(range(101, 151), 2 * MIB)
        assert await there.settled(there.look_up(range(101, 151))) == 50


def clients_of(host: Host) -> Any:
    assert host.instance._handing is not None
    return host.instance._handing.peers.clients


async def until_nothing_reserved(target: PeerProcess) -> None:
    with anyio.fail_after(30):
        while True:
            serving = (await target.status())["serving"]
            if not serving["grants"] and not serving["reserving"]["announcements"]:
                return
            await anyio.sleep(0.05)
