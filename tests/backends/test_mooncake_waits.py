"""Turns on keys and threads: who goes with whom, who waits for whom, and for how long."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.backends.mooncake.waits import KeyLocks, Threads
from kvtier.testing.backend import make_key

pytestmark = pytest.mark.anyio

A, B, C = (make_key(number) for number in range(3))
LONG = 60.0


class Log:
    """Batches that hold their keys until they are told to go."""

    def __init__(self, locks: KeyLocks) -> None:
        self.holding: list[str] = []
        self._locks = locks
        self._done: dict[str, anyio.Event] = {}

    async def hold(self, name: str, keys: list[bytes], *, exclusive: bool) -> None:
        self._done[name] = anyio.Event()
        async with self._locks.held(keys, exclusive=exclusive):
            self.holding.append(name)
            await self._done[name].wait()
        self.holding.remove(name)

    async def release(self, name: str) -> None:
        self._done[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await checkpoint()


@asynccontextmanager
async def batches(*wanted: tuple[str, list[bytes], bool]) -> AsyncIterator[Log]:
    """Come in this order; at the end, whoever still waits is cancelled, and nothing may stay locked."""
    locks = KeyLocks(LONG)
    log = Log(locks)
    async with anyio.create_task_group() as group:
        for name, keys, exclusive in wanted:
            group.start_soon(lambda n=name, k=keys, e=exclusive: log.hold(n, k, exclusive=e))
            await settle()
        yield log
        group.cancel_scope.cancel()
    assert not locks._queues


async def test_readers_go_together_and_a_writer_alone() -> None:
    async with batches(("r1", [A], False), ("r2", [A, B], False), ("w", [A], True)) as log:
        assert log.holding == ["r1", "r2"]
        await log.release("r1")
        assert log.holding == ["r2"]
        await log.release("r2")
        assert log.holding == ["w"]


async def test_a_reader_does_not_overtake_a_writer_that_waits() -> None:
    async with batches(("r1", [A], False), ("w", [A], True), ("r2", [A], False), ("r3", [B], False)) as log:
        assert log.holding == ["r1", "r3"]
        await log.release("r1")
        assert log.holding == ["r3", "w"]
        await log.release("w")
        assert log.holding == ["r3", "r2"]


async def test_batches_that_share_keys_in_any_order_come_through() -> None:
    async with batches(("ab", [A, B], True), ("bc", [B, C], True), ("ca", [C, A], True)) as log:
        for name in ("ab", "bc", "ca"):
            assert log.holding == [name]
            await log.release(name)
        assert log.holding == []


async def test_a_key_that_is_named_twice() -> None:
    async with batches(("w", [A, A], True), ("r", [A, A], False)) as log:
        assert log.holding == ["w"]
        await log.release("w")
        assert log.holding == ["r"]


async def test_one_that_is_cancelled_is_in_nobodys_way() -> None:
    locks = KeyLocks(LONG)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            log = Log(locks)
            group.start_soon(lambda: log.hold("r1", [A], exclusive=False))
            await settle()

            async def wait_as_writer() -> None:
                with scopes["w"]:
                    await log.hold("w", [A], exclusive=True)

            scopes = {"w": anyio.CancelScope()}
            group.start_soon(wait_as_writer)
            await settle()
            group.start_soon(lambda: log.hold("r2", [A], exclusive=False))
            await settle()
            assert log.holding == ["r1"]
            scopes["w"].cancel()
            await settle()
            assert log.holding == ["r1", "r2"]
            scope.cancel()
    assert not locks._queues


async def test_nobody_waits_for_a_key_without_end() -> None:
    locks = KeyLocks(0.01)
    async with locks.held([A], exclusive=True):
        with pytest.raises(TimeoutError):
            async with locks.held([A, B], exclusive=False):
                pass
        async with locks.held([B], exclusive=True):
            pass
    assert not locks._queues


async def test_nobody_waits_for_a_thread_without_end() -> None:
    threads = Threads(2, 0.01)
    go_on = threading.Event()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(threads.run, go_on.wait)
        await settle()
        with pytest.raises(TimeoutError):
            await threads.run(lambda: 1)
        go_on.set()
    assert await threads.run(lambda: 1) == 1


async def test_a_thread_that_raises_is_free_again() -> None:
    threads = Threads(1, 0.01)

    def fail() -> None:
        raise ConnectionError("on purpose")

    for _ in range(3):
        with pytest.raises(ConnectionError, match="on purpose"):
            await threads.run(fail)
    assert await threads.run(lambda: 1) == 1
