"""One side of a transport on its own network host: a program driven through :mod:`tests.rigs.hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio

from kvtier.memory.slices import Lease
from kvtier.plugins import Plugins
from kvtier.testing.backend import is_poisoned, poison, same
from kvtier.testing.transport_side import Side, dial_nowhere, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan, SupportsConnections
from tests.rigs.hosts import LEAK_TIMEOUT_SECONDS, LeakCheck, serve_commands

CAPACITY = 128 << 20


class Commands(LeakCheck):
    """The commands that a test can run. Patterns are those of ``transport_side``, given by their seeds."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._poisoned: list[Lease] = []

    async def open(self, settings: dict[str, Any], address: str) -> dict[str, object]:
        kind = Plugins.load([]).transport(settings["type"])
        self._side = await self._stack.enter_async_context(
            Side.open(kind, settings, CAPACITY, address=address)
        )
        return {"endpoint": self._side.transport.endpoint.hex(), "port": self._side.port}

    async def close(self) -> None:
        """Close everything. Fails if anything is still leased."""
        await self._stack.aclose()
        # An arena that is closed while garbage holds a view of it is unmapped only with its object.
        del self._side

    async def connect(self, endpoint: str, address: str, port: int) -> None:
        transport = self._side.transport
        dial = dial_to(port, address=address) if isinstance(transport, SupportsConnections) else dial_nowhere
        self._link: Link = await transport.connect(bytes.fromhex(endpoint), dial)
        self._stack.push_async_callback(self._link.close)

    async def grant(self, lengths: list[int], access: str, seed: int = 0) -> list[RemoteSpan]:
        return self._side.grants.grant(lengths, Access(access), seed)

    async def clear(self) -> None:
        """End all grants."""
        self._side.grants.clear()

    async def holds(self, spans: list[list[int]], seed: int) -> bool:
        """Whether the spans of this arena hold the patterns from a seed on."""
        return all(
            same(self._side.arena.view(offset, length), pattern(seed + index, length))
            for index, (_, offset, length) in enumerate(spans)
        )

    async def read(self, spans: list[list[int]], seed: int = 0) -> dict[str, object]:
        """Read spans; return the outcomes, and whether each span has the pattern of its grant.

        The memory of a failed read is poisoned and kept; see :meth:`untouched`.
        """
        leases = self._room(spans)
        items = [(RemoteSpan(*span), lease.view) for span, lease in zip(spans, leases, strict=True)]
        outcomes = [outcome.value for outcome in await self._link.read(items)]
        intact = [same(view, pattern(seed + at, len(view))) for at, (_, view) in enumerate(items)]
        for outcome, lease in zip(outcomes, leases, strict=True):
            if outcome == "ok":
                lease.release()
            else:
                poison(lease.view)
                self._poisoned.append(lease)
        return {"outcomes": outcomes, "intact": intact}

    async def write(self, spans: list[list[int]], seed: int) -> list[str]:
        leases = self._room(spans)
        for at, lease in enumerate(leases):
            lease.view[:] = pattern(seed + at, lease.length)
        items = [(lease.view, RemoteSpan(*span)) for span, lease in zip(spans, leases, strict=True)]
        outcomes = await self._link.write(items)
        for lease in leases:
            lease.release()
        return [outcome.value for outcome in outcomes]

    async def untouched(self) -> bool:
        """Release the memory of failed reads. Return whether it was never written again."""
        poisoned = all(is_poisoned(lease.view) for lease in self._poisoned)
        while self._poisoned:
            self._poisoned.pop().release()
        return poisoned

    async def is_idle(self) -> bool:
        """Wait until no transfer holds a lease. Return ``False`` on a timeout."""
        with anyio.move_on_after(LEAK_TIMEOUT_SECONDS):
            while self._side.transfer_leases:
                await anyio.sleep(0.02)
            return True
        return False

    def _room(self, spans: Sequence[Sequence[int]]) -> list[Lease]:
        leases = [self._side.arena.allocate(length) for _, _, length in spans]
        assert None not in leases, "the arena of the test is too small"
        return [lease for lease in leases if lease is not None]


if __name__ == "__main__":
    serve_commands(Commands())
