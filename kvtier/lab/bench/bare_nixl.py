"""Limit of the NIXL transport: plain NIXL calls in a busy loop, between two processes that map both arenas.

As a program, it takes an arena's path, its capacity and whether it is the target, and replies to each line of
JSON with one line: ``{"reach": [metadata, address]}``, ``{"move": [write, spans]}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

import anyio.to_thread

from kvtier.lab.bench.mirror import Helper, Mirror
from kvtier.lab.bench.sides import BenchFailed, Chunk, Side
from kvtier.memory.keys import ChunkKey
from kvtier.transports.nixl.worker import map_shared


class BareNixl(Side):
    """Two processes with one NIXL agent each, because an agent aborts its process on shutdown."""

    title = "bare NIXL"

    def __init__(self, mirror: Mirror, environment: Mapping[str, str]) -> None:
        self._mirror = mirror
        self._initiator, self._target = (
            Helper(__name__, path, mirror.capacity, serves, environment=environment)
            for path, serves in ((mirror.own_path, 0), (mirror.path, 1))
        )
        self.helpers = [self._initiator.number, self._target.number]
        self._initiator.do(reach=self._target.started)

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        return await self._move(True, chunks)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        return await self._move(False, chunks)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        self._mirror.clear(keys)

    async def close(self) -> None:
        """Kill both processes, because NIXL aborts during an orderly shutdown."""
        self._initiator.kill()
        self._target.kill()

    async def _move(self, write: bool, chunks: Sequence[Chunk]) -> float:
        spans = [(self._mirror.offset(view), len(view)) for _, view in chunks]
        seconds: float = await anyio.to_thread.run_sync(lambda: self._initiator.do(move=[write, spans]))
        return seconds


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
        """Read or write all spans, offsets and lengths, in one transfer; return its duration in seconds."""
        agent = self._agent
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE" if write else "READ",
            *(
                agent.get_xfer_descs([(start + offset, length, 0) for offset, length in spans], "DRAM")
                for start in (self.address, self._peer_address)
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
