"""An instance in a process of its own, which holds chunks and serves them until it is killed.

As a program it reads one line of JSON, its settings and what to hold, and answers each further line with one
of its own: its status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from kvtier import Settings
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.instance import Instance
from kvtier.keys import ChunkKey
from kvtier.testing.backend import make_key, noise

SECRET = "what the processes of these tests know"
ROOT = Path(__file__).parents[2]


def payload_of(key: ChunkKey, length: int) -> bytes:
    """Bytes that only this chunk has; a MiB of them repeated, so that gigabytes take no seconds to make."""
    pattern = noise(b"payload" + key, min(length, 1 << 20))
    return (pattern * (-(-length // len(pattern))))[:length]


def store(instance: Instance, numbers: Sequence[int], payload: int) -> None:
    """Chunks in memory, as engines leave them there."""
    for number in numbers:
        key = make_key(number)
        reservation = instance.cache.reserve(ChunkHeader(key, make_key(number - 1), bytes(32), payload))
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
    """One such process, started, stopped, killed and started again on the same port."""

    def __init__(
        self, numbers: Sequence[int], payload: int = 20_000, folder: str | None = None, **peer: Any
    ) -> None:
        """With ``folder``, memory holds half of them at once and a disk tier there all."""
        self.numbers = list(numbers)
        self.payload = payload
        self.port = 0
        self._folder = folder
        self._peer = peer
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = _started()
        wanted = {
            "listen": self.address,
            "numbers": self.numbers,
            "payload": self.payload,
            "folder": self._folder,
            "peer": self._peer,
        }
        self.port = (await self._ask(json.dumps(wanted)))["port"]

    async def status(self) -> dict[str, Any]:
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

    async def _ask(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        with anyio.fail_after(60):
            answer = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert answer, "the process has ended"
        decoded: dict[str, Any] = json.loads(answer)
        return decoded


def _started() -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.peers.peer_process"]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    numbers, length, folder = wanted["numbers"], object_bytes(wanted["payload"]), wanted["folder"]
    capacity = length * (len(numbers) // 2 if folder else 2 * len(numbers) + 2)
    settings = settings_of(wanted["listen"], [], capacity, folder, **wanted["peer"])
    async with Instance.open(settings) as instance:
        assert instance.server is not None
        for number in numbers:
            store(instance, [number], wanted["payload"])
            await instance.cache.drain(60)
        print(json.dumps({"port": instance.server.address[1]}), flush=True)
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(instance.status(), default=str), flush=True)


if __name__ == "__main__":
    anyio.run(main)
