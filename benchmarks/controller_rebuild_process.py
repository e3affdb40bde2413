"""Instances of :mod:`benchmarks.controller_rebuild`, run as ``… PORT INSTANCES CHUNKS HOLDERS``.

Registers all of them, prints ``connected``, and after a line of its input sends what they hold: frames over
plain sockets, without a library for WebSockets, so that this costs little next to the controller. The mask of
frames is zero, which leaves their bytes as they are. Prints ``done`` once the controller has answered a
question of each instance, which it sends last.
"""

from __future__ import annotations

import struct
import sys

import anyio
import anyio.to_thread
from anyio.abc import SocketStream
from blake3 import blake3

from benchmarks.controller_process import MODEL, PROMPT_TOKENS
from kvtier.concurrency.processes import raise_file_limit
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.settings import HEARTBEAT_SECONDS
from kvtier.fleet.member.inventory_report import KEYS_A_PART
from kvtier.fleet.member.protocol import (
    CONNECT_PATH,
    VERSION,
    Changed,
    Heartbeat,
    HeldBy,
    Hello,
    Serves,
    TierDescription,
    TierState,
    UpToDate,
    WhoHolds,
)
from kvtier.memory.keys import KEY_BYTES, join_keys
from kvtier.rpc.frames import Message, encode_body

CONNECTING = 32
HANDSHAKE = (
    f"GET {CONNECT_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()


def frame(message: Message) -> bytes:
    """Return a message as a masked binary frame (RFC 6455, 5.2)."""
    body = encode_body(message)
    if len(body) < 126:
        head = struct.pack("!BB", 0x82, 0x80 | len(body))
    elif len(body) < 1 << 16:
        head = struct.pack("!BBH", 0x82, 0x80 | 126, len(body))
    else:
        head = struct.pack("!BBQ", 0x82, 0x80 | 127, len(body))
    return head + bytes(4) + body


class Instance:
    """An instance with one tier, which holds the chunks of its group of ``holders`` instances."""

    def __init__(self, number: int, chunks: int, holders: int) -> None:
        self._number = number
        self._chunks = chunks
        self._holders = holders
        self._stream: SocketStream
        self._sending = anyio.Lock()

    async def register(self, port: int, connecting: anyio.CapacityLimiter) -> None:
        """Connect, and say hello."""
        tier = TierDescription("ram", "cpu", 1 << 40, False)
        name, host = f"instance-{self._number:04}", f"host-{self._number}"
        hello = Hello(VERSION, name, self._number, "benchmark", host, 1, f"{host}:8200", "tcp", [tier])
        async with connecting:
            self._stream = await anyio.connect_tcp("127.0.0.1", port)
            await self._stream.send(HANDSHAKE)
            await self._until(b"\r\n\r\n")
            await self._send(hello, Serves([MODEL]), WhoHolds(1, b""))
            await self._until(encode_body(HeldBy(1, [], [])))

    async def report(self) -> None:
        """Report all chunks, and wait until the controller has indexed them."""
        group = self._number // self._holders
        held = PromptChunks.of(MODEL, PROMPT_TOKENS).keys if group == 0 else []
        for start in range(0, self._chunks, KEYS_A_PART):
            count = min(KEYS_A_PART, self._chunks - start)
            own, held = held[:count], held[count:]
            others = blake3(f"{group} {start}".encode()).digest(KEY_BYTES * (count - len(own)))
            await self._send(Changed(0, join_keys(own) + others, b""))
        await self._send(UpToDate(), WhoHolds(2, b""))
        await self._until(encode_body(HeldBy(2, [], [])))

    async def beat(self) -> None:
        """Send heartbeats, until cancelled."""
        while True:
            await self._send(Heartbeat([TierState(0, self._chunks, True, 0, 0)], 0, ["vllm"], 0, 0, 0))
            await anyio.sleep(HEARTBEAT_SECONDS)

    async def _send(self, *messages: Message) -> None:
        async with self._sending:
            await self._stream.send(b"".join(map(frame, messages)))

    async def _until(self, end: bytes) -> None:
        """Read until the bytes are there."""
        received = b""
        while end not in received:
            received += await self._stream.receive()


async def main() -> None:
    raise_file_limit()
    port, count, chunks, holders = map(int, sys.argv[1:])
    instances = [Instance(number, chunks, holders) for number in range(count)]
    connecting = anyio.CapacityLimiter(CONNECTING)
    async with anyio.create_task_group() as tasks:
        for instance in instances:
            tasks.start_soon(instance.register, port, connecting)
    async with anyio.create_task_group() as beating:
        for instance in instances:
            beating.start_soon(instance.beat)
        print("connected", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        async with anyio.create_task_group() as tasks:
            for instance in instances:
                tasks.start_soon(instance.report)
        print("done", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
