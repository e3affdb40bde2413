"""An instance on its own network host: a program that a test drives through :mod:`tests.rigs.hosts`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio

from kvtier.catalog.catalog import State
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.pipeline.query import Expected, Query
from kvtier.testing.backend import make_key, same
from tests.peers.peer_process import payload_of, settings_of, store
from tests.rigs.hosts import LEAK_TIMEOUT_SECONDS, LeakCheck, serve_commands

NAMESPACE = bytes(32)
CAPACITY = 128 << 20


class Commands(LeakCheck):
    """The commands that a test can run."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(self, listen: str, others: Sequence[str], peer: dict[str, Any]) -> None:
        settings = settings_of(listen, others, CAPACITY, **peer)
        self._instance = await self._stack.enter_async_context(Instance.open(settings))

    async def close(self) -> None:
        await self._stack.aclose()
        # An arena that is closed while garbage holds a view of it is unmapped only with its object.
        del self._instance

    async def store(self, start: int, count: int, payload: int) -> None:
        store(self._instance, range(start, start + count), payload)

    async def fetch(self, start: int, count: int, payload: int) -> tuple[int, float]:
        """Look a prompt up; return the number of leading chunks that arrive intact, and the seconds taken.

        Waits for every leased chunk, as a request does. Clears the chunks afterwards.
        """
        cache = self._instance.cache
        keys = [make_key(number) for number in range(start, start + count)]
        started = time.monotonic()
        found = cache.look_up(Query(keys), Expected(NAMESPACE, [object_bytes(payload)] * count))
        await found.settle(None)
        seconds = time.monotonic() - started
        for chunk in found.chunks:
            payload_view = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + payload]
            assert same(payload_view, payload_of(chunk.key, payload)), "wrong bytes"
        ready = found.ready
        found.release()
        await cache.clear(keys)
        return ready, seconds

    async def transfer_kv(self, to: str, start: int, count: int) -> None:
        """Start the KV transfer of a prompt."""
        keys = [make_key(number) for number in range(start, start + count)]
        self._kv_transfers = self._instance.transfer_kv(to, keys)

    async def finish(self, seconds: float) -> int:
        """Finish the KV transfer; return the number of leading chunks that the receiver holds."""
        leading = (await self._kv_transfers.finish(seconds)).leading
        await self._kv_transfers.ended.wait()
        return leading

    async def await_pushed(self, start: int, count: int, seconds: float) -> tuple[int, float]:
        """Like :meth:`fetch`, for pushed chunks, which are kept."""
        cache = self._instance.cache
        started = time.monotonic()
        keys = [make_key(number) for number in range(start, start + count)]
        found = cache.look_up(Query(keys, expect_seconds=seconds, expect_chunks=count))
        await cache.settle(found)
        taken = time.monotonic() - started
        for chunk in found.chunks:
            length = ChunkHeader.verify(chunk.lease.view, chunk.key).payload_bytes
            payload_view = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length]
            assert same(payload_view, payload_of(chunk.key, length)), "wrong bytes"
        ready = found.ready
        found.release()
        return ready, taken

    async def status(self) -> dict[str, object]:
        return self._instance.status()

    async def is_idle(self) -> bool:
        """Wait until no chunk is pending and only READY chunks are leased. Return ``False`` on a timeout."""
        cache = self._instance.cache
        catalog = cache.catalog
        with anyio.move_on_after(LEAK_TIMEOUT_SECONDS):
            while (
                cache.pending_bytes
                or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                or cache.arena.leases != catalog.count(0)
            ):
                await anyio.sleep(0.02)
            return True
        return False


if __name__ == "__main__":
    serve_commands(Commands())
