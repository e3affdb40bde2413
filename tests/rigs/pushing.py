"""Real instances that push to each other, and a check that they leak nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from kvtier import Settings
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.peers.kv_transfer import KVTransfer
from kvtier.pipeline.found import FoundChunk, FoundPrefix
from kvtier.pipeline.query import Expected, Query
from kvtier.plugins import Plugins
from kvtier.testing.backend import make_key, same
from tests.rigs.instance_process import SECRET, payload_of, store
from tests.rigs.waiting import until

PAYLOAD = 20_000
CHUNK = object_bytes(PAYLOAD)
PLUGINS = Plugins.load(())
"""Loaded at import time, because importing the plugins blocks."""


def keys_of(numbers: Sequence[int]) -> list[ChunkKey]:
    return [make_key(number) for number in numbers]


def settings_of(
    kind: str,
    chunks: int,
    folder: Path | None = None,
    kv_transfer: dict[str, Any] | None = None,
    checksum: bool = True,
    **peer: Any,
) -> Settings:
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": chunks * CHUNK}]
    if folder is not None:
        tiers.append({"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": str(folder)})
    return Settings(
        tiers=tiers,
        checksum=checksum,
        kv_transfer=kv_transfer or {},
        peer={"listen": "127.0.0.1:0", "secret": SECRET, "transport": {"type": kind, "deadline": 20}, **peer},
    )


class Host:
    """An instance, with helpers for tests."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.cache = instance.cache

    @property
    def peers(self) -> PeersBackend:
        """The connections that KV transfers push over."""
        assert self.instance._kv_transfers is not None
        return self.instance._kv_transfers.peers

    @property
    def address(self) -> str:
        assert self.instance.server is not None
        return f"127.0.0.1:{self.instance.server.address[1]}"

    def compute(self, numbers: Sequence[int], payload: int = PAYLOAD) -> None:
        """Make chunks READY, as an engine does."""
        store(self.instance, numbers, payload)

    async def compute_many(self, numbers: Sequence[int], payload: int) -> None:
        """Make large chunks READY, and yield to other tasks in between."""
        for number in numbers:
            self.compute([number], payload)
            await checkpoint()

    def transfer_kv(self, to: Host, numbers: Sequence[int]) -> KVTransfer:
        return self.instance.transfer_kv(to.address, keys_of(numbers))

    def look_up(
        self,
        numbers: Sequence[int],
        expect: float = 60.0,
        expect_chunks: int | None = None,
        expected: Expected | None = None,
    ) -> FoundPrefix:
        chunks = len(numbers) if expect_chunks is None else expect_chunks
        return self.cache.look_up(
            Query(keys_of(numbers), expect_seconds=expect, expect_chunks=chunks), expected
        )

    async def settle(self, found: FoundPrefix, seconds: float = 30) -> int:
        """Wait for a lookup, check its bytes, release it, and return the number of chunks."""
        with anyio.fail_after(seconds):
            await self.cache.settle(found)
        count = len(found.chunks)
        assert await to_thread.run_sync(lambda: all(map(_is_intact, found.chunks)))
        found.release()
        return count

    def held(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the chunks that are READY in memory."""
        catalog = self.cache.catalog
        return [number for number in numbers if 0 in catalog.tiers(make_key(number))]

    @property
    def serving(self) -> Any:
        """What it serves to peers."""
        return self.instance.status()["serving"]

    @property
    def reserving(self) -> dict[str, Any]:
        return dict(self.serving["reserving"])

    @property
    def counts(self) -> dict[str, int]:
        """Counters of the chunks that were pushed to this instance."""
        return dict(self.reserving["counts"])

    async def wait_until_idle(self) -> None:
        """Wait until there is no lease, reservation, announcement, KV transfer or PENDING chunk."""
        cache = self.cache
        await until(lambda: not self.instance.status()["kv_transfers"]["open"])  # type: ignore[index]
        await until(lambda: not cache.pending_bytes)
        await until(lambda: cache.arena.leases == cache.catalog.count(0))
        await until(lambda: not self.reserving["announcements"])
        transfer: Any = self.instance.status()["kv_transfers"]
        assert (transfer["open"], transfer["leased_bytes"], transfer["awaited"]) == (0, 0, 0)
        assert (self.reserving["reserved_bytes"], self.reserving["reservations"]) == (0, 0)
        assert (self.serving["grants"], self.serving["granted_bytes"]) == (0, 0)
        assert cache.status()["pushed"] == {"announced": 0, "waiting": 0}
        catalog = cache.catalog
        assert all(not pending for _, pending in catalog.places(list(catalog.keys(0))))


@asynccontextmanager
async def hosts(
    kind: str, *chunks: int, folder: Path | None = None, **more: Any
) -> AsyncIterator[list[Host]]:
    """Open one instance per capacity in ``chunks``. The last one gets a disk tier if ``folder`` is set."""
    async with AsyncExitStack() as stack:
        instances = []
        for index, capacity in enumerate(chunks):
            settings = settings_of(kind, capacity, folder if index == len(chunks) - 1 else None, **more)
            instances.append(Host(await stack.enter_async_context(Instance.open(settings, plugins=PLUGINS))))
        yield instances
        for host in instances:
            await host.wait_until_idle()


def _is_intact(chunk: FoundChunk) -> bool:
    length = ChunkHeader.parse(chunk.lease.view).payload_bytes
    return same(chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length], payload_of(chunk.key, length))
