"""Reservations of an engine that loses one of its connections, or whose process disconnects and lives on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, status
from kvtier.bridge.protocol import Commit, Leave, Reserved
from kvtier.plugins import Plugins
from tests.rigs.bridges import KEYS as REAL_KEYS
from tests.rigs.bridges import ROOT as REAL_ROOT
from tests.rigs.bridges import Start, connect, lose_connection, reserve
from tests.rigs.bridges import hello as real_hello
from tests.rigs.scripted_engine import KEYS, Host, Peer, open_host, store
from tests.rigs.waiting import until, wait_until
from tests.rigs.worker_process import WorkerProcess

pytestmark = pytest.mark.anyio

Plugins.load([])
TWO = KEYS[:2]


async def ask(scheduler: Peer, ticket: int = 1) -> Reserved:
    """Reserve room for two chunks."""
    return await scheduler.reserve(TWO, ticket=ticket)


async def is_held(scheduler: Peer) -> bool:
    found = await scheduler.look_up(TWO, 9)
    await scheduler.send(protocol.Cancel(9))
    return bool(found.leases)


def reservations(host: Host) -> list[int]:
    """Return the number of reservations of each engine."""
    status: Any = host.server.status()
    return [engine["reservations"] for engine in status["engines"]]


async def until_left(host: Host, connections: int) -> None:
    """Wait until the host has this many connections."""
    await until(lambda: host.connections == connections)


async def test_scheduler_that_leaves_does_not_keep_others_from_storing(tmp_path: Path) -> None:
    async with (
        open_host(tmp_path) as host,
        host.engine() as (scheduler, _),
        host.engine("other") as (other, _),
    ):
        epoch = host.server.epoch
        first = await ask(scheduler)
        assert (await ask(other)).leases == [0, 0], "the other engine is storing them"
        await scheduler.stream.aclose()
        await until_left(host, 5)
        second = await ask(other)
        assert all(second.leases)
        assert not set(first.offsets) & set(second.offsets), "workers may be writing there"
        assert reservations(host) == [2, 2]
        async with host.peer("scheduler", epoch=epoch, seen=0) as again:
            await again.status()
            assert reservations(host) == [0, 2], "the answer was lost: nobody fills them"


async def test_scheduler_that_returns_keeps_what_workers_may_fill(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        reserved = await ask(scheduler)
        # Before the end of the first connection is noticed.
        async with host.peer("scheduler", epoch=host.server.epoch, seen=max(reserved.leases)) as again:
            assert reservations(host) == [2]
            for worker in workers:
                await worker.commit(reserved.leases)
            assert reservations(host) == [0]
            assert not await is_held(again), "void, as no scheduler was connected"
            assert all((await ask(again)).leases)


@pytest.mark.parametrize("filling", [False, True], ids=["fills-nothing", "still-fills"])
@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "later"])
async def test_worker_that_leaves_after_another_rank_has_committed(
    tmp_path: Path, *, filling: bool, noticed: bool
) -> None:
    """Its commit may be lost with its connection."""
    async with (
        open_host(tmp_path) as host,
        host.engine() as (scheduler, workers),
        host.engine("other") as (other, _),
    ):
        reserved = await ask(scheduler)
        await workers[0].commit(reserved.leases)
        if noticed:
            await workers[1].stream.aclose()
            await until_left(host, 5)
            second = await ask(other)
            assert all(second.leases)
            assert not set(second.offsets) & set(reserved.offsets), "this process may still be writing"
        async with host.peer() as again:
            holding = reserved.leases if filling else []
            welcome = await again.greet("worker", 1, epoch=host.server.epoch, holding=holding, client=2)
            assert welcome.first_lease > max(reserved.leases)
            assert reservations(host)[0] == (2 if filling else 0)
            if filling:
                await again.commit(reserved.leases)
            assert reservations(host)[0] == 0
            assert not await is_held(scheduler), "it has left: what it has written is void"
            await again.send(Leave())


async def test_replaced_connection_is_not_heard_any_more(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        reserved = await ask(scheduler)
        async with host.peer(
            "worker", 1, epoch=host.server.epoch, holding=reserved.leases, client=2
        ) as again:
            with suppress(anyio.BrokenResourceError):
                await workers[1].send(Commit(reserved.leases))
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await workers[1].receive()
            await again.status()
            assert reservations(host) == [2]
            await again.send(Leave())


async def test_another_process_does_not_free_what_the_first_may_write_to(tmp_path: Path) -> None:
    """Such as a worker that was restarted while the one before is stopped."""
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await ask(scheduler)
        await workers[1].stream.aclose()
        await until_left(host, 2)
        await workers[0].send(Leave())
        async with host.peer("worker", 1, client=3) as again:
            await again.status()
            assert reservations(host) == [2]
            await again.send(Leave())
            await again.status()
            assert reservations(host) == [2], "this process has not been asked"
        async with host.peer("worker", 1, epoch=host.server.epoch, client=2) as first:
            await first.status()
            assert reservations(host) == [0]


@pytest.mark.parametrize("in_memory", [0, 2], ids=["nothing-granted", "two-granted"])
@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "later"])
async def test_lookup_in_flight_ends_with_its_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_memory: int, noticed: bool
) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        cache = host.server.cache
        assert await cache.drain(5)
        assert await cache.move(KEYS[in_memory:], "ram", "ssd") == len(KEYS) - in_memory

        async def never(*_: object) -> None:
            await anyio.sleep_forever()

        with monkeypatch.context() as patch:
            patch.setattr(cache, "settle", never)
            found = await scheduler.look_up(KEYS)
            assert (len(found.leases), found.fetching) == (in_memory, len(KEYS) - in_memory)
            if noticed:
                await scheduler.stream.aclose()
                await until_left(host, 2)
        async with host.peer("scheduler", epoch=host.server.epoch, holding=found.leases, seen=0):
            await until(lambda: host.engine_status()["tickets"] == bool(in_memory))
            assert host.engine_status()["leases"] == in_memory, "blocks may still be copied from them"
            async with host.peer("scheduler", epoch=host.server.epoch, seen=0) as later:
                await later.status()
                assert host.engine_status()["tickets"] == 0


def test_memory_is_kept_until_the_process_of_a_disconnected_engine_exits(
    tmp_path: Path, start: Start
) -> None:
    socket = tmp_path / "socket"
    start()
    with WorkerProcess(socket, real_hello("worker")) as process:
        process.await_connected()
        scheduler = SchedulerBridge(real_hello("scheduler"), socket)
        scheduler.connect()
        other, _ = connect(socket, "other")
        reserved = reserve(scheduler, REAL_ROOT, list(REAL_KEYS[:4]))
        assert len(reserved.granted) == 4
        process.disconnect()
        scheduler.close()
        wait_until(lambda: [engine["name"] for engine in status(socket)["engines"]] == ["other"])
        assert status(socket)["reservations"]["departed_engines"] == 1
        again = reserve(other, REAL_ROOT, list(REAL_KEYS[:4]))
        assert all(again.leases), "others store the chunks"
        assert set(again.offsets).isdisjoint(reserved.offsets)
    wait_until(lambda: status(socket)["reservations"]["departed_engines"] == 0)
    other.abandon(again.granted)
    wait_until(lambda: status(socket)["arena"]["leases"] == 0)


def test_worker_refuses_reservations_from_before_it_has_returned(tmp_path: Path, start: Start) -> None:
    socket = tmp_path / "socket"
    start()
    scheduler, worker = connect(socket)
    filling, unknown = (reserve(scheduler, REAL_ROOT, [key]).granted for key in REAL_KEYS[:2])
    assert worker.fill(filling) == [True]
    lose_connection(worker)
    wait_until(worker.ready)
    assert worker.fill(unknown) == [False], "another engine may have its memory"
    assert status(socket)["engines"][0]["reservations"] == 1
    later = reserve(scheduler, REAL_ROOT, [REAL_KEYS[2]]).granted
    assert worker.fill(later) == [True]
    assert worker.commit(filling + later)
    wait_until(lambda: status(socket)["engines"][0]["reservations"] == 0)
    assert status(socket)["counts"]["stored"] == 1
