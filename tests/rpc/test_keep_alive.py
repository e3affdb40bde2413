from __future__ import annotations

import anyio
import pytest

from kvtier.rpc.frames import FrameReader, Ping, Pong, encode
from kvtier.rpc.keep_alive import KeepAlive, Timeouts
from tests.rigs.waiting import until
from tests.rpc.endpoints import connected, decode, sides

pytestmark = pytest.mark.anyio

TIMEOUTS = Timeouts(ping=0.02, unresponsive=0.1, disconnect=0.5)


async def test_answered_pings_go_on() -> None:
    trips: list[float] = []
    async with connected() as (ours, _), anyio.create_task_group() as tasks:
        keep_alive = KeepAlive(ours.endpoint, TIMEOUTS, on_round_trip=trips.append)
        tasks.start_soon(keep_alive.run)
        await until(lambda: len(trips) >= 3)
        assert not keep_alive.unresponsive
        assert await keep_alive.probe(5.0)
        tasks.cancel_scope.cancel()
    assert min(trips) > 0


async def test_unanswered_ping_is_unresponsive_and_then_over() -> None:
    ours, _ = sides()
    changes: list[bool] = []
    keep_alive = KeepAlive(ours.endpoint, TIMEOUTS, on_unresponsive=changes.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run)
        await keep_alive.run()
        tasks.cancel_scope.cancel()
    assert changes == [True]
    assert keep_alive.unresponsive


async def test_late_answer_ends_the_outage() -> None:
    ours, theirs = sides()
    changes: list[bool] = []
    keep_alive = KeepAlive(
        ours.endpoint, Timeouts(ping=0.02, unresponsive=0.05, disconnect=30.0), on_unresponsive=changes.append
    )
    reader = FrameReader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run)
        tasks.start_soon(keep_alive.run)
        await until(lambda: keep_alive.unresponsive)
        [body] = reader.feed(theirs.wire.frames.socket.recv(1000))
        ping = decode(body)
        assert isinstance(ping, Ping)
        theirs.send_bytes(encode(Pong(ping.ticket)))
        await until(lambda: not keep_alive.unresponsive)
        tasks.cancel_scope.cancel()
    assert changes[:2] == [True, False]


async def test_end_of_the_connection_ends_it() -> None:
    async with connected() as (ours, theirs):
        keep_alive = KeepAlive(ours.endpoint, TIMEOUTS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_alive.run)
            theirs.endpoint.close()
        assert ours.endpoint.closed


async def test_probe_that_times_out() -> None:
    ours, _ = sides()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run)
        assert not await KeepAlive(ours.endpoint, TIMEOUTS).probe(0.01)
        tasks.cancel_scope.cancel()
