"""Instances of :mod:`benchmarks.controller_instances`, run as ``python -m … PORT INSTANCES``.

Each speaks the protocol of a cache process, over a connection of its own, and reconnects as one does. It
holds :data:`CHUNKS` chunks, and stores and removes :data:`CHANGES` of them a second.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import anyio
from blake3 import blake3
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from benchmarks.controller_process import MODEL
from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.processes import raise_file_limit
from kvtier.errors import ChannelError
from kvtier.fleet.member.controller_client import CLOSE_SECONDS, CONNECT_SECONDS, STEADY_SECONDS
from kvtier.fleet.member.protocol import (
    CONNECT_PATH,
    VERSION,
    Changed,
    Heartbeat,
    Hello,
    Serves,
    TierDescription,
    TierState,
    UpToDate,
    Welcome,
    decode_from_controller,
)
from kvtier.fleet.member.session import GREETING_SECONDS
from kvtier.memory.keys import KEY_BYTES
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message
from kvtier.rpc.keep_alive import KeepAlive, Timeouts
from kvtier.rpc.websocket import ClientWire

CHUNKS = 1000
CHANGES = 16
TIERS = [TierDescription("ram", "cpu", 1 << 34, False), TierDescription("ssd", "disk", 1 << 38, False)]


def keys(instance: int, part: int, chunks: int) -> bytes:
    """Return the keys of that many chunks, joined."""
    return blake3(f"{instance} {part}".encode()).digest(KEY_BYTES * chunks)


async def stay_connected(port: int, number: int) -> None:
    """Stay registered, as :class:`kvtier.fleet.member.controller_client.ControllerClient` does."""
    backoff = Backoff()
    while True:
        began = anyio.current_time()
        try:
            async with connect(
                f"ws://127.0.0.1:{port}{CONNECT_PATH}",
                compression=None,
                proxy=None,
                open_timeout=CONNECT_SECONDS,
                close_timeout=CLOSE_SECONDS,
                ping_interval=None,
            ) as connection:
                await run(connection, number)
        except (OSError, TimeoutError, ChannelError, WebSocketException) as error:
            print(f"instance {number}: {error!r}", file=sys.stderr)
        if anyio.current_time() - began > STEADY_SECONDS:
            backoff.reset()
        await anyio.sleep(backoff.next())


async def run(connection: ClientConnection, number: int) -> None:
    """Register, and report until the connection ends."""
    endpoint = Endpoint(ClientWire(connection), decode_from_controller)
    name, host = f"instance-{number:04}", f"host-{number}"
    hello = Hello(VERSION, name, number, "benchmark", host, 1, f"{host}:8200", "tcp", TIERS)
    welcome = await endpoint.greet(hello, Welcome, VERSION, GREETING_SECONDS)
    timeouts = Timeouts(welcome.heartbeat, welcome.idle_timeout, welcome.idle_timeout)

    async def send(message: Message) -> None:
        await endpoint.drain()
        endpoint.send(message)

    async def beat() -> None:
        for turn in count():
            ram, ssd = TierState(turn << 20, CHUNKS, True, turn, turn), TierState(1 << 36, 0, True, 0, 0)
            await send(Heartbeat([ram, ssd], 2 * turn, ["vllm"], 0, 0, 2 * turn))
            await anyio.sleep(welcome.heartbeat)

    async def report() -> None:
        await send(Serves([MODEL]))
        await send(Changed(0, keys(number, -1, CHUNKS), b""))
        await send(UpToDate())
        for turn in count():
            removed = keys(number, turn - 1, CHANGES) if turn else b""
            await send(Changed(0, keys(number, turn, CHANGES), removed))
            await anyio.sleep(1)

    async def do(part: Callable[[], Awaitable[None]]) -> None:
        with suppress(ChannelError):  # The endpoint has the reason.
            await part()

    async def ignore(_: object) -> None:
        return None

    async with anyio.create_task_group() as tasks:
        for part in (beat, report, KeepAlive(endpoint, timeouts).run):
            tasks.start_soon(do, part)
        error = await endpoint.run(ignore, drains=False)
        tasks.cancel_scope.cancel()
    raise error


async def main() -> None:
    raise_file_limit()
    port, instances = map(int, sys.argv[1:])
    async with anyio.create_task_group() as tasks:
        for number in range(instances):
            tasks.start_soon(stay_connected, port, number)


if __name__ == "__main__":
    anyio.run(main)
