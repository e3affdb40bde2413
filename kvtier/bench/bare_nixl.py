"""Limit of the NIXL transport: plain NIXL calls in a busy loop, between two processes that map both arenas.

As a program, it takes an arena's path, its capacity and whether it is the target, and replies to each line of
JSON with one line: ``{"reach": [metadata, address]}``, ``{"move": [write, spans]}``,
``{"read_repeatedly": [span, runs]}``.
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
from kvtier.transports.nixl.worker import map_shared


class BareNixl:
    """Two processes with one NIXL agent each, because an agent aborts its process on shutdown."""

    def __init__(
        self, here: Path, there: Path, capacities: tuple[int, int], environment: Mapping[str, str]
    ) -> None:
        self._initiator = _Process(here, capacities[0], False, environment)
        self._target = _Process(there, capacities[1], True, environment)
        self._initiator.do(reach=[self._target.metadata, self._target.address])

    @property
    def processes(self) -> list[int]:
        """Processes that use CPU time during a transfer."""
        return [self._initiator.number, self._target.number]

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans in one transfer; return its duration in seconds."""
        seconds: float = await anyio.to_thread.run_sync(
            lambda: self._initiator.do(move=[access is Access.WRITE, spans])
        )
        return seconds

    async def read_repeatedly(self, span: Span, runs: int) -> list[float]:
        """Read one span ``runs`` times; return the seconds of each."""
        seconds: list[float] = await anyio.to_thread.run_sync(
            lambda: self._initiator.do(read_repeatedly=[span, runs])
        )
        return seconds

    def close(self) -> None:
        """Kill both processes, because NIXL aborts during an orderly shutdown."""
        self._initiator.kill()
        self._target.kill()


class _Process:
    def __init__(self, arena: Path, capacity: int, serves: bool, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", __name__, str(arena), str(capacity), str(int(serves))]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.number = self._process.pid
        self.metadata, self.address = self._reply()

    def do(self, **command: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Execute a command in the process and return its reply. Blocks."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:  # noqa: ANN401 - what JSON can hold
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"a NIXL process exited with status {self._process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


class _Agent:
    """A NIXL agent, used as in its own examples; the initiator has no progress thread, as it polls itself."""

    def __init__(self, arena: str, capacity: int, *, serves: bool) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Avoids a slow import that is not needed.
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
        """Agent metadata for the other process, in hexadecimal."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata.hex()

    def reach(self, metadata: str, address: int) -> None:
        """Add the other agent, whose arena is mapped at ``address``."""
        loaded = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._peer = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._peer_address = address

    def move(self, write: bool, spans: Sequence[Sequence[int]]) -> float:
        """Read or write all spans in one transfer; return its duration in seconds."""
        agent = self._agent
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE" if write else "READ",
            agent.get_xfer_descs([(self.address + local, length, 0) for local, _, length in spans], "DRAM"),
            agent.get_xfer_descs(
                [(self._peer_address + remote, length, 0) for _, remote, length in spans], "DRAM"
            ),
            self._peer,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise BenchFailed(f"a plain NIXL transfer failed: state {state}")
        agent.release_xfer_handle(handle)
        return time.perf_counter() - started

    def read_repeatedly(self, span: Sequence[int], runs: int) -> list[float]:
        """Read one span ``runs`` times; return the seconds of each."""
        return [self.move(False, [span]) for _ in range(runs)]


def main() -> None:
    """Reply to each line of standard input, until its end."""
    # Libraries print to stdout: redirect it to stderr, and keep the original for replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arena, capacity, serves = sys.argv[1:]
    agent = _Agent(arena, int(capacity), serves=bool(int(serves)))
    reply: object = [agent.metadata, agent.address]
    while True:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        ((name, arguments),) = json.loads(line).items()
        reply = getattr(agent, name)(*arguments)


if __name__ == "__main__":
    main()
