"""Connections to one server, and what is left of them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import anyio
import pytest

from kvtier.sockets import lanes
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.conversation import RECEIVE, Progress
from kvtier.sockets.lanes import Dialer, Lane
from kvtier.sockets.pump import SMALL_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way")]

SECONDS = 20.0
LARGE = 4 * SMALL_BYTES


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_lane_closed_while_it_is_used_ends_with_its_last_connection(is_cancelled: bool) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        dialer = Dialer(*listener.getsockname(), make=Connection)
        await dialer.find(Deadline(SECONDS))
        threads, descriptors = count("task"), count("fd")
        lane = Lane(2, dialer.connect)
        answer = memoryview(bytearray(LARGE))

        async def converse() -> Progress:
            async with lane.taken(Deadline(SECONDS)) as connection:
                return await lane.pump.converse(connection, [(RECEIVE, [answer])])

        conversation = asyncio.create_task(converse())
        server, _ = await loop.sock_accept(listener)
        with server:
            lane.close()
            if is_cancelled:
                conversation.cancel()
                await asyncio.wait([conversation])
                assert conversation.cancelled()
            else:
                await loop.sock_sendall(server, b"x" * LARGE)
                assert await conversation == Progress(1)
                assert bytes(answer) == b"x" * LARGE
        with anyio.fail_after(SECONDS):
            while count("task") > threads or count("fd") > descriptors:
                await anyio.sleep(0.01)


async def test_a_name_that_is_not_resolved_in_time_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(lanes, "getaddrinfo", never)
    with pytest.raises(TimeoutError, match="not resolved in time"):
        await Dialer("a.host", 1, make=Connection).find(Deadline(0.01))


def count(what: str) -> int:
    """How many threads (``task``) or descriptors (``fd``) this process has."""
    return sum(1 for _ in Path("/proc/self", what).iterdir())
