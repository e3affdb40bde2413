"""Run a program on a host of a test network, and call its methods over stdin and stdout.

The test uses :class:`HostProcess`. The program's module ends with a call of
:func:`kvtier.testing.transport_sides.serve_commands`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import select
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.rigs.forks import Forked
from tests.rigs.network import Host, Network

TIMEOUT_SECONDS = 60.0
LEAK_TIMEOUT_SECONDS = 30.0


class CommandProcess:
    """A process that serves commands. Calls block."""

    def __init__(self, process: Forked) -> None:
        self._process = process
        self.send_signal = process.send_signal

    def call(self, name: str, /, **arguments: object) -> Any:
        """Call a method and return its result."""
        self.send(name, **arguments)
        return self.result()

    def send(self, name: str, /, **arguments: object) -> None:
        """Start a call. Read its :meth:`result` before sending the next one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    @property
    def has_result(self) -> bool:
        """Whether :meth:`result` returns without blocking."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        """Send SIGKILL and reap the process. May be called repeatedly."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class HostProcess(CommandProcess):
    """A Python module that runs on a host. Closing the network kills the process."""

    def __init__(self, host: Host, module: str) -> None:
        super().__init__(host.python(module))
        self.host = host


ON_HOSTS: dict[str, dict[str, Any]] = {
    "tcp": {},
    # All hosts are one machine, where UCX would prefer shared memory.
    "nixl": {"ucx": {"TLS": "tcp,self", "NET_DEVICES": Host.device}},
}
"""Settings of transports between the hosts of a network."""


def transport_on_hosts(name: str) -> str:
    """Return the name of a transport. Skips the test if it or a network of hosts cannot be used here."""
    if reason := Network.missing():
        pytest.skip(reason)
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed: pip install kvtier[nixl]")
    return name


class LeakCheck:
    """Commands that check a program for leaked descriptors, threads and tasks."""

    async def resources(self) -> list[int]:
        """Return the number of open descriptors, threads and tasks after a garbage collection."""
        gc.collect()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return [descriptors, len(self._threads()), len(asyncio.all_tasks())]

    @staticmethod
    def _threads() -> list[str]:
        # asyncio keeps a few threads for name resolution.
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if not name.startswith("asyncio_")]

    async def wait_for_baseline(self, before: list[int]) -> str | None:
        """Wait until no count exceeds ``before``. After a timeout, return a description of the leak."""
        with anyio.move_on_after(LEAK_TIMEOUT_SECONDS):
            while any(now > limit for now, limit in zip(await self.resources(), before, strict=True)):
                await anyio.sleep(0.02)
            return None
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        current = await self.resources()
        return f"{current}, expected {before}: {links}, {self._threads()}, {asyncio.all_tasks()}"
