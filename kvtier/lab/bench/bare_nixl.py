"""Limit of the NIXL transport: plain NIXL calls in a busy loop, between two processes that map both arenas.

As a program, it serves the commands of one agent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

import anyio

from kvtier.lab.bench.mirror import Helper, Mirror
from kvtier.lab.bench.sides import BenchFailed, Chunk, Side
from kvtier.memory.keys import ChunkKey
from kvtier.testing.transport_sides import serve_commands
from kvtier.transports.nixl.worker import map_shared


class BareNixl(Side):
    """Two processes with one NIXL agent each, because an agent aborts its process on shutdown."""

    title = "bare NIXL"

    def __init__(self, mirror: Mirror, environment: Mapping[str, str]) -> None:
        self._mirror = mirror
        self._initiator, self._target = (Helper(__name__, environment) for _ in range(2))
        for helper in (self._initiator, self._target):
            helper.start()
        self.helpers = [self._initiator.pid, self._target.pid]
        capacity = mirror.capacity
        self._initiator.call("open", arena=str(mirror.own_path), capacity=capacity, serves=False)
        target = self._target.call("open", arena=str(mirror.path), capacity=capacity, serves=True)
        self._initiator.call("reach", **target)

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
        seconds: float = await self._initiator.do("move", write=write, spans=spans)
        return seconds


class _Agent:
    """A NIXL agent, used as in its own examples; the initiator has no progress thread, as it polls itself."""

    async def open(self, arena: str, capacity: int, serves: bool) -> dict[str, object]:
        """Create it, for an arena. Return the arguments of :meth:`reach` for the other agent."""
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Avoids a slow import that is not needed.
        from nixl import _api

        with open(arena, "r+b") as file:  # noqa: ASYNC230, PTH123 - a descriptor of another process
            self._address = map_shared(file.fileno(), capacity)
        self._agent = _api.nixl_agent(
            f"bare-{os.getpid()}", _api.nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
        )
        self._agent.register_memory([(self._address, capacity, 0, "")], "DRAM")
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self._address}

    async def reach(self, metadata: str, address: int) -> None:
        """Add the other agent, whose arena is mapped at ``address``."""
        loaded = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._peer = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._peer_address = address

    async def move(self, write: bool, spans: Sequence[Sequence[int]]) -> float:
        """Read or write all spans, offsets and lengths, in one transfer; return its duration in seconds."""
        agent = self._agent
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE" if write else "READ",
            *(
                agent.get_xfer_descs([(start + offset, length, 0) for offset, length in spans], "DRAM")
                for start in (self._address, self._peer_address)
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


async def _main() -> None:
    await serve_commands(_Agent())
    os._exit(0)  # An orderly shutdown of NIXL aborts.


if __name__ == "__main__":
    anyio.run(_main)
