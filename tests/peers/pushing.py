"""Two real instances, of which one pushes to the other; nothing of either may be left afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from kvtier import Settings
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.instance import Instance
from kvtier.keys import ChunkKey
from kvtier.peers.handing import HandOver
from kvtier.pipeline.found import FoundChunk, LookUp
from kvtier.plugins import Plugins
from kvtier.testing.backend import make_key, same

from .peer_process import SECRET, payload_of, store
from .scripted import until

PAYLOAD = 20_000
CHUNK = object_bytes(PAYLOAD)
PLUGINS = Plugins.load(())
"""Here, since importing what they stand on blocks."""


def keys_of(numbers: Sequence[int]) -> list[ChunkKey]:
    return [make_key(number) for number in numbers]


def settings_of(
    kind: str,
    chunks: int,
    folder: Path | None = None,
    hand_over: dict[str, Any] | None = None,
    checksum: bool = True,
    **peer: Any,
) -> Settings:
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": chunks * CHUNK}]
    if folder is not None:
        tiers.append({"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": str(folder)})
    return Settings(
        tiers=tiers,
        checksum=checksum,
        hand_over=hand_over or {},
        peer={"listen": "127.0.0.1:0", "secret": SECRET, "transport": {"type": kind, "deadline": 20}, **peer},
    )


class Host:
    """One instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.cache = instance.cache

    @property
    def address(self) -> str:
        assert self.instance.server is not None
        return f"127.0.0.1:{self.instance.server.address[1]}"

    def compute(self, numbers: Sequence[int], payload: int = PAYLOAD) -> None:
        """Chunks become READY, as engines leave them there."""
        store(self.instance, numbers, payload)

    async def compute_many(self, numbers: Sequence[int], payload: int) -> None:
        """Large ones, and others get their turn meanwhile."""
        for number in numbers:
            self.compute([number], payload)
            await checkpoint()

    def hand_over(self, to: Host, numbers: Sequence[int]) -> HandOver:
        return self.instance.hand_over(to.address, keys_of(numbers))

    def look_up(self, numbers: Sequence[int], expect: float = 60.0, **more: Any) -> LookUp:
        return self.cache.look_up(keys_of(numbers), expect=expect, **more)

    async def settled(self, found: LookUp, seconds: float = 30) -> int:
        """How many chunks came, their bytes checked, and released."""
        with anyio.fail_after(seconds):
            await self.cache.settle(found)
        count = len(found.chunks)
        assert await to_thread.run_sync(lambda: all(map(_is_right, found.chunks)))
        found.release()
        return count

    def held(self, numbers: Sequence[int]) -> list[int]:
        """Which chunks are READY in memory."""
        catalog = self.cache.hierarchy.catalog
        return [number for number in numbers if 0 in catalog.tiers(make_key(number))]

    @property
    def reserving(self) -> dict[str, Any]:
        status: Any = self.instance.status()["serving"]
        reserving: dict[str, Any] = status["reserving"]
        return reserving

    @property
    def counts(self) -> dict[str, int]:
        """Of what was pushed here."""
        counts: dict[str, int] = self.reserving["counts"]
        return counts

    async def at_rest(self) -> None:
        """No lease, no reservation, no announcement, no hand-over, nothing PENDING."""
        cache, server = self.cache, self.instance.server
        assert server is not None
        await until(lambda: not self.instance.status()["hand_overs"]["open"])  # type: ignore[index]
        await until(lambda: not cache.pending_bytes)
        await until(lambda: cache.arena.leases == cache.hierarchy.catalog.count(0))
        await until(lambda: not self.reserving["announcements"])
        handing: Any = self.instance.status()["hand_overs"]
        assert (handing["open"], handing["leased_bytes"], handing["awaited"]) == (0, 0, 0)
        assert (self.reserving["reserved_bytes"], self.reserving["reservations"]) == (0, 0)
        serving: Any = server.status()
        assert (serving["grants"], serving["promised_bytes"]) == (0, 0)
        assert cache.status()["pushed"] == {"coming": 0, "waiting": 0}
        catalog = cache.hierarchy.catalog
        assert all(not pending for _, pending in catalog.places(list(catalog.keys(0))))


@asynccontextmanager
async def hosts(
    kind: str, *chunks: int, folder: Path | None = None, **more: Any
) -> AsyncIterator[list[Host]]:
    """As many as there are capacities, in chunks; the last one has a disk where there is a folder."""
    async with AsyncExitStack() as stack:
        found = []
        for index, capacity in enumerate(chunks):
            its = settings_of(kind, capacity, folder if index == len(chunks) - 1 else None, **more)
            found.append(Host(await stack.enter_async_context(Instance.open(its, plugins=PLUGINS))))
        yield found
        for host in found:
            await host.at_rest()


def _is_right(chunk: FoundChunk) -> bool:
    length = ChunkHeader.parse(chunk.lease.view).payload_bytes
    return same(chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length], payload_of(chunk.key, length))
