"""Lanes: connections to one server, and their cleanup."""

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

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("implementation")]

SECONDS = 20.0
LARGE = 4 * SMALL_BYTES


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_closed_lane_is_released_with_its_last_connection(is_cancelled: bool) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        dialer = Dialer(*listener.getsockname(), make=Connection)
        await dialer.find(Deadline(SECONDS))
        threads, descriptors = count("task"), count("fd")
        lane = Lane(2, dialer.connect)
        answer = memoryview(bytearray(LARGE))

        async def converse() -> Progress:
            async with lane.acquire(Deadline(SECONDS)) as connection:
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


async def test_name_resolution_timeout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(lanes, "getaddrinfo", never)
    with pytest.raises(TimeoutError, match="timed out resolving"):
        await Dialer("a.host", 1, make=Connection).find(Deadline(0.01))


def count(kind: str) -> int:
    """Return the number of threads (``task``) or descriptors (``fd``) of this process."""
    return sum(1 for _ in Path("/proc/self", kind).iterdir())
