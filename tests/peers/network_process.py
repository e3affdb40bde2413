"""An instance on a host of its own: a program that a test drives by :mod:`tests.hosts`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio

from kvtier.catalog import State
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.instance import Instance
from kvtier.pipeline.discover import Expected
from kvtier.testing.backend import make_key, same
from tests.hosts import LEAK_PATIENCE_SECONDS, LeakCheck, obey
from tests.peers.peer_process import payload_of, settings_of, store

NAMESPACE = bytes(32)
CAPACITY = 128 << 20


class Commands(LeakCheck):
    """What it can be told to do."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(self, listen: str, others: Sequence[str], peer: dict[str, Any]) -> None:
        settings = settings_of(listen, others, CAPACITY, **peer)
        self._instance = await self._stack.enter_async_context(Instance.open(settings))

    async def close(self) -> None:
        await self._stack.aclose()
        # An arena that was closed while garbage held a view of it is unmapped with its object.
        del self._instance

    async def store(self, start: int, count: int, payload: int) -> None:
        store(self._instance, range(start, start + count), payload)

    async def fetch(self, start: int, count: int, payload: int) -> tuple[int, float]:
        """How many leading chunks of a prompt come, all of them right, and the seconds until that was known.

        As a request does that waits for all that is promised. It is forgotten afterwards.
        """
        cache = self._instance.cache
        keys = [make_key(number) for number in range(start, start + count)]
        began = time.monotonic()
        found = cache.look_up(keys, Expected(NAMESPACE, [object_bytes(payload)] * count))
        await found.settle(None)
        seconds = time.monotonic() - began
        for chunk in found.chunks:
            payload_view = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + payload]
            assert same(payload_view, payload_of(chunk.key, payload)), "wrong bytes"
        ready = found.ready
        found.release()
        await cache.clear(keys)
        return ready, seconds

    async def hand_over(self, to: str, start: int, count: int) -> None:
        """Begin to push a prompt."""
        keys = [make_key(number) for number in range(start, start + count)]
        self._handing = self._instance.hand_over(to, keys)

    async def finish(self, seconds: float) -> int:
        """End that; how many leading chunks the other is known to have."""
        leading = (await self._handing.finish(seconds)).leading
        await self._handing.ended.wait()
        return leading

    async def await_pushed(self, start: int, count: int, seconds: float) -> tuple[int, float]:
        """Like :meth:`fetch`, of what is pushed here. It is kept."""
        cache = self._instance.cache
        began = time.monotonic()
        found = cache.look_up([make_key(number) for number in range(start, start + count)], expect=seconds)
        await cache.settle(found)
        taken = time.monotonic() - began
        for chunk in found.chunks:
            length = ChunkHeader.verify(chunk.lease.view, chunk.key).payload_bytes
            payload_view = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length]
            assert same(payload_view, payload_of(chunk.key, length)), "wrong bytes"
        ready = found.ready
        found.release()
        return ready, taken

    async def status(self) -> dict[str, object]:
        return self._instance.status()

    async def is_at_rest(self) -> bool:
        """Wait until nothing is on its way, granted or leased but what memory holds; whether so."""
        cache = self._instance.cache
        catalog = cache.hierarchy.catalog
        with anyio.move_on_after(LEAK_PATIENCE_SECONDS):
            while (
                cache.pending_bytes
                or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                or cache.arena.leases != catalog.count(0)
            ):
                await anyio.sleep(0.02)
            return True
        return False


if __name__ == "__main__":
    obey(Commands())
