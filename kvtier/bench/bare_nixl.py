"""NIXL by hand, in a busy loop, between two processes that map the two arenas: the limit of that transport.

Run as a program, with an arena's path, its capacity and whether it serves, it answers each line of JSON with
one: ``{"reach": [metadata, address]}``, ``{"move": [write, spans]}``, ``{"one_by_one": [span, runs]}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from kvtier.bench.errors import BenchFailed
from kvtier.bench.raw_sockets import Span
from kvtier.transports.base import Access
from kvtier.transports.nixl.carrier import map_shared


class BareNixl:
    """Two processes with an agent each. Not those of the transport, which would be aborted with them."""

    def __init__(
        self, here: Path, there: Path, capacities: tuple[int, int], environment: Mapping[str, str]
    ) -> None:
        self._asks = _Process(here, capacities[0], False, environment)
        self._serves = _Process(there, capacities[1], True, environment)
        self._asks.do(reach=[self._serves.metadata, self._serves.address])

    @property
    def processes(self) -> list[int]:
        """Who works while bytes are moved."""
        return [self._asks.number, self._serves.number]

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans in one transfer; the seconds that it took."""
        seconds: float = await anyio.to_thread.run_sync(
            lambda: self._asks.do(move=[access is Access.WRITE, spans])
        )
        return seconds

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        """Read one span so many times; the seconds of each."""
        seconds: list[float] = await anyio.to_thread.run_sync(lambda: self._asks.do(one_by_one=[span, runs]))
        return seconds

    def close(self) -> None:
        """End both. Not tidily: that is where they would be aborted."""
        self._asks.kill()
        self._serves.kill()


class _Process:
    def __init__(self, arena: Path, capacity: int, serves: bool, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", __name__, str(arena), str(capacity), str(int(serves))]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.number = self._process.pid
        self.metadata, self.address = self._answer()

    def do(self, **command: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Have it carry out a command, and its answer. Blocks."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 - what JSON can hold
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"a bare NIXL has ended: {self._process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.communicate()


class _Agent:
    """NIXL's, as its own examples use it, and without the thread that a busy loop only competes with."""

    def __init__(self, arena: str, capacity: int, *, serves: bool) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # It is imported for nothing.
        from nixl import _api

        with open(arena, "r+b") as file:  # noqa: PTH123 - a descriptor of another process
            self.address = map_shared(file.fileno(), capacity)
        self._peer = ""
        self._peer_address = 0
        self._agent = _api.nixl_agent(
            f"bare-{os.getpid()}", _api.nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
        )
        self._agent.register_memory([(self.address, capacity, 0, "")], "DRAM")

    @property
    def metadata(self) -> str:
        """What the other agent needs to know of this one."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata.hex()

    def reach(self, metadata: str, address: int) -> None:
        """Get to know the other agent, and where its arena lies."""
        loaded = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._peer = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._peer_address = address

    def move(self, write: bool, spans: Sequence[Sequence[int]]) -> float:
        """Read or write all spans in one transfer; the seconds that it took."""
        agent = self._agent
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE" if write else "READ",
            agent.get_xfer_descs([(self.address + ours, length, 0) for ours, _, length in spans], "DRAM"),
            agent.get_xfer_descs(
                [(self._peer_address + theirs, length, 0) for _, theirs, length in spans], "DRAM"
            ),
            self._peer,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise BenchFailed("a bare transfer has failed")
        agent.release_xfer_handle(handle)
        return time.perf_counter() - started

    def one_by_one(self, span: Sequence[int], runs: int) -> list[float]:
        """Read one span so many times; the seconds of each."""
        return [self.move(False, [span]) for _ in range(runs)]


def main() -> None:
    """Answer every line of standard input, until its end."""
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arena, capacity, serves = sys.argv[1:]
    agent = _Agent(arena, int(capacity), serves=bool(int(serves)))
    answer: object = [agent.metadata, agent.address]
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        ((name, arguments),) = json.loads(line).items()
        answer = getattr(agent, name)(*arguments)


if __name__ == "__main__":
    main()
