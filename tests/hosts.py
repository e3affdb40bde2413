"""A program on a host of a test's network, told what to do line by line.

The test's side is :class:`HostProcess`. The program's module ends with ``obey(commands)``: a line of JSON,
``[name, arguments]``, has the method of that name carried out, and what it returns is the answer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from kvtier.testing.network import Host

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 60.0
LEAK_PATIENCE_SECONDS = 30.0


class HostProcess:
    """Starts a module's program on a host. Calls block; the network's end kills it at the latest."""

    def __init__(self, host: Host, module: str) -> None:
        self.host = host
        self._process = host.popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def do(self, name: str, **arguments: object) -> Any:
        """Have it carry out a command, and its answer."""
        self.begin(name, **arguments)
        return self.answer()

    def begin(self, name: str, **arguments: object) -> None:
        """Have it begin; its :meth:`answer` is due before the next command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process on the host has ended"
        answer = json.loads(line)
        assert "failed" not in answer, f"on the host {self.host.address}: {answer['failed']}"
        return answer["answer"]

    @property
    def has_answered(self) -> bool:
        """Whether :meth:`answer` need not wait."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        """``kill -9``, and gone. Harmless when repeated."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class LeakCheck:
    """Commands by which a program is asked whether anything is left."""

    async def resources(self) -> list[int]:
        """How many descriptors, threads and tasks there are, without what is only to be collected."""
        gc.collect()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return [descriptors, len(self._threads()), len(asyncio.all_tasks())]

    @staticmethod
    def _threads() -> list[str]:
        # Those in which asyncio looks names up are few, and stay.
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if not name.startswith("asyncio_")]

    async def comes_back_to(self, before: list[int]) -> str | None:
        """Wait until there are no more than before; what there is where that does not come about."""
        with anyio.move_on_after(LEAK_PATIENCE_SECONDS):
            while any(now > then for now, then in zip(await self.resources(), before, strict=True)):
                await anyio.sleep(0.02)
            return None
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        there = await self.resources()
        return f"{there} where there were {before}: {links}, {self._threads()}, {asyncio.all_tasks()}"


def obey(commands: object) -> None:
    """Carry out what comes, one after the other, until there is no more."""
    asyncio.run(_obey(commands))


async def _obey(commands: object) -> None:
    # Whatever a library prints must not be taken for an answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            name, arguments = json.loads(line)
            try:
                answer = {"answer": await getattr(commands, name)(**arguments)}
            except Exception as error:
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer, default=str) + "\n")
            answers.flush()


def wait_for(condition: Callable[[], bool]) -> None:
    """Ask again and again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
