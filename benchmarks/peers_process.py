"""An instance that serves chunks in its memory to peers until its standard input ends.

Reads one line of JSON: ``[settings, chunk sets]``. Writes one line: the port of an echo server for plain
round trips. Peers may connect and disconnect at any time.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from benchmarks.common import MIB, filled
from kvtier.cache import TieredCache
from kvtier.concurrency.placement import shorten_slices
from kvtier.instance import Instance
from kvtier.lab.bench.raw_resp import fill
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.settings import Settings
from kvtier.testing.backend import make_key

SECRET = "shared by the processes of this benchmark"
NAMESPACE = bytes(32)
NUMBER_BYTES = 8
PATTERN_BYTES = 8 * MIB
LENGTHS = struct.Struct("<QQ")
"""Begins a plain round trip: the bytes of the request, and of the answer."""


class ChunkSet(NamedTuple):
    """The chunks of one prompt."""

    first: int
    amount: int
    length: int
    """Length of a chunk object."""

    @property
    def keys(self) -> list[ChunkKey]:
        return [make_key(number) for number in self.numbers]

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.amount)

    @property
    def total(self) -> int:
        """Total bytes of all chunks."""
        return self.amount * self.length


def number_in(view: memoryview) -> int:
    """Return the number of a chunk, which is in its payload."""
    return int.from_bytes(view[HEADER_BYTES : HEADER_BYTES + NUMBER_BYTES], "little")


def store(cache: TieredCache, chunks: ChunkSet) -> None:
    """Store chunks without a checksum, as engines do."""
    payload = chunks.length - HEADER_BYTES
    pattern = filled(min(payload, PATTERN_BYTES))
    for number in chunks.numbers:
        reservation = cache.reserve(ChunkHeader(make_key(number), make_key(number - 1), NAMESPACE, payload))
        assert reservation is not None, "no room"
        view = reservation.lease.view[HEADER_BYTES:]
        for start in range(0, payload, len(pattern)):
            view[start : start + len(pattern)] = pattern[: payload - start]
        view[:NUMBER_BYTES] = number.to_bytes(NUMBER_BYTES, "little")
        cache.commit([reservation])


def settings_of(
    transport: str, port: int, others: Sequence[int], capacity: int, *, checksum: bool
) -> dict[str, Any]:
    """Return the settings of one of several instances on this host. ``others``: ports of its peers."""
    return {
        "tiers": [{"name": "ram", "type": "cpu", "capacity": capacity}],
        "checksum": checksum,
        "peer": {
            "listen": address(port),
            "others": [address(other) for other in others],
            "secret": SECRET,
            "transport": {"type": transport, "deadline": 30},
            "lease": 60,
            "share": 1,
            # High enough that a short load peak does not end the benchmark.
            "timeout": 5,
        },
    }


def address(port: int) -> str:
    return f"127.0.0.1:{port}"


class PeerProcess(NamedTuple):
    process: int
    echo_port: int


@contextmanager
def peer_process(settings: dict[str, Any], sets: Sequence[ChunkSet]) -> Iterator[PeerProcess]:
    """Run an instance that holds these chunks."""
    command = [sys.executable, "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([settings, sets]).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a peer exited with code {process.wait()}")
        yield PeerProcess(process.pid, int(line))
    finally:
        process.communicate()  # Closes its input, which ends it.


@asynccontextmanager
async def opened(settings: dict[str, Any]) -> AsyncIterator[Instance]:
    """Run an instance that ignores the environment, and does not log warnings about lost peers.

    Its event loop has short time slices, like that of a cache process.
    """
    shorten_slices()
    logging.getLogger("kvtier").setLevel(logging.ERROR)
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        del os.environ[name]
    async with Instance.open(Settings.model_validate(settings)) as instance:
        yield instance


def answer_all(listener: socket.socket) -> None:
    """Answer plain round trips, with a thread for each connection, until the listener is shut down."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Reply to each request, which begins with both lengths, with as many bytes as it asks for."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = memoryview(bytearray(MIB))
    with connection, suppress(ConnectionError):
        while lengths := connection.recv(LENGTHS.size, socket.MSG_WAITALL):
            request_bytes, answer_bytes = LENGTHS.unpack(lengths)
            fill(connection, scratch[:request_bytes])
            connection.sendall(scratch[:answer_bytes])


async def main() -> None:
    # Output of libraries goes to standard error, so that it is not read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings, sets = json.loads(sys.stdin.readline())
    async with opened(settings) as instance:
        for chunks in sets:
            store(instance.cache, ChunkSet(*chunks))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=answer_all, args=(listener,), daemon=True).start()
            answers.write(f"{listener.getsockname()[1]}\n")
            answers.flush()
            await anyio.to_thread.run_sync(sys.stdin.read)
            listener.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    anyio.run(main)
