"""An instance in its own process, which holds chunks and serves them until it is killed.

The program reads one line of JSON: settings and chunk numbers. It answers every further line with its status.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from kvtier import Settings
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import make_key, noise
from tests.rigs.forks import Forked, python

SECRET = "what the processes of these tests know"


def payload_of(key: ChunkKey, length: int) -> bytes:
    """Bytes unique to this chunk: 1 MiB of noise repeated, since gigabytes of noise take seconds to make."""
    pattern = noise(b"payload" + key, min(length, 1 << 20))
    return (pattern * (-(-length // len(pattern))))[:length]


def store(instance: Instance, numbers: Sequence[int], payload: int) -> None:
    """Store chunks in memory, as an engine does."""
    for number in numbers:
        key = make_key(number)
        header = ChunkHeader(key, make_key(number - 1), bytes(32), payload, key, 37)  # As two block hashes.
        reservation = instance.cache.reserve(header)
        assert reservation is not None, "no room"
        reservation.lease.view[HEADER_BYTES : HEADER_BYTES + payload] = payload_of(key, payload)
        instance.cache.commit([reservation])


def settings_of(
    listen: str | None, others: Sequence[str], capacity: int, folder: str | None = None, **peer: Any
) -> Settings:
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": capacity}]
    if folder:
        tiers.append({"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": folder})
    return Settings(
        tiers=tiers,
        peer={"listen": listen, "others": list(others), "secret": SECRET, **peer},
    )


class PeerProcess:
    """The test's handle of the process, which can be restarted on the same port."""

    def __init__(
        self, numbers: Sequence[int], payload: int = 20_000, folder: str | None = None, **peer: Any
    ) -> None:
        """With ``folder``, memory holds half of the chunks, and a disk tier in that folder all of them."""
        self.numbers = list(numbers)
        self.payload = payload
        self.port = 0
        self._folder = folder
        self._peer = peer
        self._process: Forked | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = await python_in_thread("tests.peers.peer_process")
        config = {
            "listen": self.address,
            "numbers": self.numbers,
            "payload": self.payload,
            "folder": self._folder,
            "peer": self._peer,
        }
        self.port = (await self._request(json.dumps(config)))["port"]

    async def status(self) -> dict[str, Any]:
        return await self._request("")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process with SIGKILL and reap it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    async def _request(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        with anyio.fail_after(60):
            reply = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert reply, "the process has ended"
        decoded: dict[str, Any] = json.loads(reply)
        return decoded


async def python_in_thread(module: str) -> Forked:
    """Run a module with pipes. In a thread, since the first start waits for the parent of all."""
    start = partial(python, module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return await anyio.to_thread.run_sync(start)


async def main() -> None:
    config = json.loads(sys.stdin.readline())
    numbers, length, folder = config["numbers"], object_bytes(config["payload"]), config["folder"]
    capacity = length * (len(numbers) // 2 if folder else 2 * len(numbers) + 2)
    settings = settings_of(config["listen"], [], capacity, folder, **config["peer"])
    async with Instance.open(settings) as instance:
        assert instance.server is not None
        for number in numbers:
            store(instance, [number], config["payload"])
            await instance.cache.drain(60)
        print(json.dumps({"port": instance.server.address[1]}), flush=True)
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(instance.status(), default=str), flush=True)


if __name__ == "__main__":
    anyio.run(main)
