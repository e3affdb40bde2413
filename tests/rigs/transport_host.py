"""One side of a transport on its own network host: a program driven through :mod:`tests.rigs.hosts`."""

from __future__ import annotations

import anyio

from kvtier.memory.slices import Lease
from kvtier.testing.backend import is_poisoned, poison, same
from kvtier.testing.transport_sides import Commands, pattern, serve_commands
from kvtier.transports.base import RemoteSpan
from tests.rigs.hosts import LEAK_TIMEOUT_SECONDS, LeakCheck


class HostCommands(Commands, LeakCheck):
    """The commands that a test can run. Patterns are those of ``transport_sides``, given by their seeds."""

    def __init__(self) -> None:
        super().__init__()
        self._poisoned: list[Lease] = []

    async def clear(self) -> None:
        """End all grants."""
        self.side.grants.clear()

    async def holds(self, spans: list[list[int]], seed: int) -> bool:
        """Whether the spans of this arena hold the patterns from a seed on."""
        return all(
            same(self.side.arena.view(offset, length), pattern(seed + index, length))
            for index, (_, offset, length) in enumerate(spans)
        )

    async def read(self, spans: list[list[int]], seed: int = 0) -> dict[str, object]:
        """Read spans; return the outcomes, and whether each span has the pattern of its grant.

        The memory of a failed read is poisoned and kept; see :meth:`untouched`.
        """
        leases = self.side.allocate([length for _, _, length in spans])
        items = [(RemoteSpan(*span), lease.view) for span, lease in zip(spans, leases, strict=True)]
        outcomes = [outcome.value for outcome in await self.link.read(items)]
        intact = [same(view, pattern(seed + at, len(view))) for at, (_, view) in enumerate(items)]
        for outcome, lease in zip(outcomes, leases, strict=True):
            if outcome == "ok":
                lease.release()
            else:
                poison(lease.view)
                self._poisoned.append(lease)
        return {"outcomes": outcomes, "intact": intact}

    async def write(self, spans: list[list[int]], seed: int) -> list[str]:
        leases = self.side.allocate([length for _, _, length in spans])
        for at, lease in enumerate(leases):
            lease.view[:] = pattern(seed + at, lease.length)
        items = [(lease.view, RemoteSpan(*span)) for span, lease in zip(spans, leases, strict=True)]
        outcomes = await self.link.write(items)
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
            while self.side.transfer_leases:
                await anyio.sleep(0.02)
            return True
        return False


if __name__ == "__main__":
    anyio.run(serve_commands, HostCommands())
