"""A scripted peer in a process of its own, and the plainest transport that reads from it.

What a peer does when it is killed, stopped and resumed is done here by a real process, without the real
server and transports, whose own tests are elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from kvtier.arena import Arena
from kvtier.backends.base import Outcome
from kvtier.keys import ChunkKey
from kvtier.sockets.channel import Channel
from kvtier.sockets.connection import Connection, Deadline
from kvtier.testing.backend import make_key, noise
from kvtier.threads import WorkerThreads, spread
from kvtier.transports.base import Dial, Grants, Link, ReadItem, Transport, TransportSettings, WriteItem

from .scripted import ScriptedPeer

ROOT = Path(__file__).parents[2]
_SPAN = struct.Struct("<QQQ")


def value(number: int, length: int) -> bytes:
    """Bytes that only this chunk has; a MiB of them repeated, so that many are soon made."""
    pattern = noise(b"value" + make_key(number), min(length, 1 << 20))
    return (pattern * (-(-length // len(pattern))))[:length]


class WireTransport(Transport):
    """Asks for one span after the other, over one connection for each batch."""

    def __init__(self) -> None:
        super().__init__(TransportSettings(type="wire"))
        self.links = 0

    async def open(self, arena: Arena, grants: Grants) -> None:
        pass

    async def close(self) -> None:
        assert not self.links, "links are open"

    @property
    def endpoint(self) -> bytes:
        return b""

    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        self.links += 1
        return _WireLink(self, dial)


class _WireLink(Link):
    def __init__(self, transport: WireTransport, dial: Dial) -> None:
        self._transport = transport
        self._dial = dial
        self._threads = WorkerThreads(16)

    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        deadline = Deadline(20)
        (outcomes,) = await spread(
            lambda batch: self._read(batch, deadline),
            [items],
            parts=1,
            hop=self._threads,
            on_cancel=deadline.cut_short,
        )
        return outcomes

    def _read(self, items: Sequence[ReadItem], deadline: Deadline) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        try:
            connection = self._dial(deadline)
            try:
                with deadline.bounds(connection):
                    for span, view in items:
                        outcomes.append(_read_one(connection, _SPAN.pack(*span), view))
            finally:
                connection.close()
        except OSError:
            outcomes += [Outcome.FAILED] * (len(items) - len(outcomes))
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        raise NotImplementedError

    async def close(self) -> None:
        self._threads.close()
        self._transport.links -= 1


def _read_one(connection: Connection, question: bytes, view: memoryview) -> Outcome:
    connection.send([question])
    held = bytearray(1)
    connection.take(memoryview(held))
    if not held[0]:
        return Outcome.MISS
    connection.take(view)
    return Outcome.OK


class WirePeer(ScriptedPeer):
    """Serves data connections, too. Its chunks are made when they are read."""

    def __init__(self, numbers: Sequence[int], length: int, lease: float) -> None:
        super().__init__(instance=f"process {os.getpid()}", transport="wire", lease=lease)
        self._length = length
        self._numbers_held = list(numbers)
        self.chunks = {make_key(number): b"" for number in numbers}

    def length_of(self, key: ChunkKey) -> int:
        return self._length

    async def serve_data(self, channel: Channel) -> None:
        asked = bytearray()
        while True:
            asked += await channel.receive()
            while len(asked) >= _SPAN.size:
                grant, offset, length = _SPAN.unpack_from(asked)
                del asked[: _SPAN.size]
                number = self._numbers_held[offset >> 24]
                if make_key(number) in self.granted.get(grant, {}).values() and length == self._length:
                    await channel.send(b"\1")
                    await channel.send(value(number, length))
                else:
                    await channel.send(b"\0")


class WireProcess:
    """Such a peer in a process of its own, started, killed and started again on the same port."""

    def __init__(self, numbers: Sequence[int], length: int = 20_000, lease: float = 10.0) -> None:
        self.port = 0
        self._wanted = [list(numbers), length, lease]
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = _started()
        self.port = await self._ask(json.dumps([self.port, *self._wanted]))

    async def open_chunks(self) -> int:
        """How many chunks it has granted."""
        return await self._ask("")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """``kill -9``, and gone. Harmless when repeated."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    async def _ask(self, line: str) -> int:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        with anyio.fail_after(60):
            answer = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert answer, "the process has ended"
        return int(answer)


def _started() -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.peers.wire"]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def main() -> None:
    port, numbers, length, lease = json.loads(sys.stdin.readline())
    peer = WirePeer(numbers, length, lease)
    peer.port = port
    async with peer.serving():
        print(peer.port, flush=True)
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            print(peer.open_chunks, flush=True)


if __name__ == "__main__":
    anyio.run(main)
