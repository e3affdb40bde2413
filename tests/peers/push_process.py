"""An instance in a process of its own, which pushes what it is told to until it is killed.

As a program it reads one line of JSON, its settings, and then one command a line, each answered with a line:
``compute`` has chunks become READY, ``hand_over`` begins to push a prompt, ``finish`` ends that.
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

from kvtier.instance import Instance
from kvtier.peers.handing import HandOver
from kvtier.peers.source import Read, Source
from kvtier.testing.backend import make_key

from .peer_process import settings_of, store

ROOT = Path(__file__).parents[2]
CAPACITY = 256 << 20


class PushProcess:
    """One such process, killed or stopped at any time."""

    def __init__(self, kind: str, payload: int, stops_after: int | None = None) -> None:
        """``stops_after`` so many batches it gets stuck in the middle of the next, until it is to go on."""
        self._wanted = {"payload": payload, "peer": {"transport": kind}, "stops_after": stops_after}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    async def __aenter__(self) -> PushProcess:
        self._process = _started()
        self.address = f"127.0.0.1:{await self._say(self._wanted)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def compute(self, numbers: Sequence[int]) -> None:
        await self._say({"do": "compute", "numbers": list(numbers)})

    async def hand_over(self, to: str, numbers: Sequence[int]) -> None:
        """Returns when it is announced."""
        await self._say({"do": "hand_over", "to": to, "numbers": list(numbers)})

    async def go_on(self) -> None:
        """Get stuck no longer."""
        await self._say({"do": "go_on"})

    async def finish(self) -> int:
        """How many leading chunks the other has."""
        leading: int = await self._say({"do": "finish"})
        return leading

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

    async def _say(self, message: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        with anyio.fail_after(60):
            answer = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert answer, "the process has ended"
        return json.loads(answer)


def _started() -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.peers.push_process"]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def get_stuck(batches: int) -> anyio.Event:
    """What lets it go on."""
    honest, left, go_on = Source.write, iter(range(batches)), anyio.Event()

    async def write(self: Source, writes: list[Read]) -> Any:
        if next(left, None) is None and not go_on.is_set():
            await honest(self, writes[: len(writes) // 2])
            await go_on.wait()
        return await honest(self, writes)

    Source.write = write  # type: ignore[assignment, method-assign]
    return go_on


async def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    settings = settings_of("127.0.0.1:0", [], CAPACITY, **wanted["peer"])
    go_on = anyio.Event()
    if wanted["stops_after"] is not None:
        go_on = get_stuck(wanted["stops_after"])
    handing: HandOver | None = None
    async with Instance.open(settings) as instance:
        assert instance.server is not None
        answer: Any = instance.server.address[1]
        while True:
            print(json.dumps(answer, default=str), flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline)
            if not line:
                return
            answer, command = None, json.loads(line)
            match command["do"]:
                case "compute":
                    store(instance, command["numbers"], wanted["payload"])
                case "hand_over":
                    keys = [make_key(number) for number in command["numbers"]]
                    handing = instance.hand_over(command["to"], keys)
                    await handing.announced.wait()
                case "go_on":
                    go_on.set()
                case "finish":
                    assert handing is not None
                    answer = (await handing.finish(60)).leading


if __name__ == "__main__":
    anyio.run(main)
