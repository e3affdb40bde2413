"""Pools of connections to one server, and their cleanup."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import anyio
import pytest

from kvtier.concurrency.sockets import pool as connection_pool
from kvtier.concurrency.sockets.connection import RECEIVE, Connection, Deadline, Progress
from kvtier.concurrency.sockets.executor import SMALL_BYTES
from kvtier.concurrency.sockets.pool import ConnectionPool, Dialer
from tests.rigs.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("implementation")]

SECONDS = 20.0
LARGE = 4 * SMALL_BYTES


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_closed_pool_is_released_with_its_last_connection(is_cancelled: bool) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        dialer = Dialer(*listener.getsockname(), make=Connection)
        await dialer.find(Deadline(SECONDS))
        threads, descriptors = count("task"), count("fd")
        pool = ConnectionPool(2, dialer.connect)
        answer = memoryview(bytearray(LARGE))

        async def converse() -> Progress:
            async with pool.acquire(Deadline(SECONDS)) as connection:
                return await pool.executor.converse(connection, [(RECEIVE, [answer])])

        conversation = asyncio.create_task(converse())
        server, _ = await loop.sock_accept(listener)
        with server:
            pool.close()
            if is_cancelled:
                conversation.cancel()
                await asyncio.wait([conversation])
                assert conversation.cancelled()
            else:
                await loop.sock_sendall(server, b"x" * LARGE)
                assert await conversation == Progress(1)
                assert bytes(answer) == b"x" * LARGE
        await until(lambda: not (count("task") > threads or count("fd") > descriptors))


async def test_name_resolution_timeout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(connection_pool, "getaddrinfo", never)
    with pytest.raises(TimeoutError, match="timed out resolving"):
        await Dialer("a.host", 1, make=Connection).find(Deadline(0.01))


def count(kind: str) -> int:
    """Return the number of threads (``task``) or descriptors (``fd``) of this process."""
    return sum(1 for _ in Path("/proc/self", kind).iterdir())
