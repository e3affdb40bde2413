"""The other process of the transport conformance suite: a program that the tests control.

Requests and answers are lines of JSON: ``{"do": name, ...}``, and ``{"answer": ...}`` or ``{"failed": why}``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from xxhash import xxh3_128_hexdigest

from kvtier.backends.base import Outcome
from kvtier.testing.transport_side import Certificate, Side, dial_nowhere, dial_to
from kvtier.transports.base import Access, Link, RemoteSpan, Transport


class OtherProcess:
    """A handle on the process. Calls wait in a worker thread. Make none while the process is paused."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it is running. Blocks only while spawning it."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Transports are passed by module name, so everything the tests can import must be importable.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C must not end it before the links to it are closed.
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not killed."""
        return self._process is not None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the process was not started"
        return self._process

    async def do(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Run one of :class:`_Commands` in the process, and return its result."""
        return await anyio.to_thread.run_sync(self._do, json.dumps({"do": name, **arguments}).encode())

    def _do(self, line: bytes) -> Any:  # noqa: ANN401 - what JSON can hold
        process = self._running
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        if not reply:
            raise ConnectionError(f"the other process exited with code {process.wait()}")
        answer = json.loads(reply)
        if "failed" in answer:
            raise AssertionError(f"in the other process: {answer['failed']}")
        return answer["answer"]

    async def open(
        self,
        kind: type[Transport],
        settings: dict[str, Any],
        capacity: int,
        certificate: Certificate | None,
    ) -> tuple[bytes, int]:
        """Open a side in the process. Return its endpoint, and the port that it listens on."""
        kind_name = f"{kind.__module__}:{kind.__qualname__}"
        answer = await self.do(
            "open", kind=kind_name, settings=settings, capacity=capacity, certificate=certificate
        )
        return bytes.fromhex(answer["endpoint"]), answer["port"]

    async def grant(
        self, lengths: Sequence[int], *, access: Access | None = Access.READ, seed: int = 0
    ) -> list[RemoteSpan]:
        """Grant slices in the process; see ``SimpleGrants.grant``."""
        spans = await self.do("grant", lengths=lengths, access=access and access.value, seed=seed)
        return [RemoteSpan(*span) for span in spans]

    async def digest(self, offset: int, length: int) -> str:
        """Return the 128-bit XXH3 digest of a range of the process's arena."""
        digest: str = await self.do("digest", offset=offset, length=length)
        return digest

    def pause(self) -> None:
        """Send SIGSTOP, and wait until the process is stopped."""
        self._running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._running.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has exited. Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


class _Commands:
    """The commands of the other process."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._stack = AsyncExitStack()
        self._tasks = tasks

    async def open(
        self, kind: str, settings: dict[str, Any], capacity: int, certificate: Sequence[str] | None
    ) -> dict[str, object]:
        module, _, name = kind.partition(":")
        transport: Any = importlib.import_module(module)
        for part in name.split("."):
            transport = getattr(transport, part)
        self._certificate = Certificate(*certificate) if certificate else None
        self._side = await self._stack.enter_async_context(
            Side.open(transport, settings, capacity, self._certificate)
        )
        return {"endpoint": self._side.transport.endpoint.hex(), "port": self._side.port}

    async def close(self) -> None:
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    async def grant(self, lengths: list[int], access: str | None, seed: int) -> list[RemoteSpan]:
        return self._side.grants.grant(lengths, Access(access) if access else None, seed)

    async def revoke(self, grant: int) -> None:
        self._side.grants.revoke(grant)

    async def transfer_leases(self) -> int:
        return self._side.transfer_leases

    async def arena_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._side.arena.fd}"

    async def digest(self, offset: int, length: int) -> str:
        return xxh3_128_hexdigest(self._side.arena.view(offset, length))

    async def resources(self) -> list[int]:
        return resources()

    async def connect(self, endpoint: str, port: int) -> None:
        dial = dial_to(port, self._certificate) if port else dial_nowhere
        self._link: Link = await self._side.transport.connect(bytes.fromhex(endpoint), dial)
        self._stack.push_async_callback(self._link.close)

    async def read(self, spans: list[list[int]]) -> dict[str, list[str]]:
        """Read spans into this arena. Return the outcomes, and the digests of the memory."""
        leases = [self._side.arena.allocate(length) for _, _, length in spans]
        assert all(lease is not None for lease in leases), "the test's arena is too small"
        items = [
            (RemoteSpan(*span), lease.view)
            for span, lease in zip(spans, leases, strict=True)
            if lease is not None
        ]
        try:
            outcomes = await self._link.read(items)
            digests = [xxh3_128_hexdigest(view) for _, view in items]
        finally:
            del items
            for lease in leases:
                if lease is not None:
                    lease.release()
        return {"outcomes": [outcome.value for outcome in outcomes], "digests": digests}

    async def read_repeatedly(self, spans: list[list[int]]) -> None:
        """Start a task that reads the spans in a loop, and return at once."""

        async def read() -> None:
            while True:
                outcomes = (await self.read(spans))["outcomes"]
                assert set(outcomes) <= {Outcome.OK.value, Outcome.FAILED.value}, outcomes

        self._tasks.start_soon(read)


def resources() -> list[int]:
    """Return the numbers of file descriptors, threads and tasks of this process."""
    tasks = len(anyio.get_running_tasks())
    return [len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), tasks]


async def _main() -> None:
    async with anyio.create_task_group() as tasks:
        await _answer(_Commands(tasks))
        os._exit(0)


async def _answer(commands: _Commands) -> None:
    """Run commands until standard input ends."""
    # Library output on stdout must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        command = json.loads(line)
        try:
            execute: Callable[..., Any] = getattr(commands, command.pop("do"))
            answer = {"answer": await execute(**command)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    anyio.run(_main)
