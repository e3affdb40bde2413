"""Key locks and bounded threads of the Mooncake backend: order, sharing and timeouts."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.backends.mooncake.backend import Threads
from kvtier.concurrency.locks import LockManager, LockRequest
from kvtier.testing.backend import make_key

pytestmark = pytest.mark.anyio

A, B, C = (make_key(number) for number in range(3))


def of(keys: list[bytes], *, exclusive: bool) -> LockRequest:
    return LockRequest(frozenset(keys), frozenset(), exclusive=exclusive)


class Log:
    """Batches that hold their key locks until released."""

    def __init__(self, locks: LockManager) -> None:
        self.holding: list[str] = []
        self._locks = locks
        self._done: dict[str, anyio.Event] = {}

    async def hold(self, name: str, keys: list[bytes], *, exclusive: bool) -> None:
        self._done[name] = anyio.Event()
        async with self._locks.held(of(keys, exclusive=exclusive)):
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
async def batches(*specs: tuple[str, list[bytes], bool]) -> AsyncIterator[Log]:
    """Start batches in this order. At the end, cancel those that still wait; no key may stay locked."""
    locks = LockManager()
    log = Log(locks)
    async with anyio.create_task_group() as group:
        for name, keys, exclusive in specs:
            group.start_soon(lambda n=name, k=keys, e=exclusive: log.hold(n, k, exclusive=e))
            await settle()
        yield log
        group.cancel_scope.cancel()
    assert locks.is_free(of([A, B, C], exclusive=True))


async def test_readers_share_and_a_writer_is_exclusive() -> None:
    async with batches(("r1", [A], False), ("r2", [A, B], False), ("w", [A], True)) as log:
        assert log.holding == ["r1", "r2"]
        await log.release("r1")
        assert log.holding == ["r2"]
        await log.release("r2")
        assert log.holding == ["w"]


async def test_reader_does_not_overtake_a_waiting_writer() -> None:
    async with batches(("r1", [A], False), ("w", [A], True), ("r2", [A], False), ("r3", [B], False)) as log:
        assert log.holding == ["r1", "r3"]
        await log.release("r1")
        assert log.holding == ["r3", "w"]
        await log.release("w")
        assert log.holding == ["r3", "r2"]


async def test_overlapping_batches_do_not_deadlock() -> None:
    async with batches(("ab", [A, B], True), ("bc", [B, C], True), ("ca", [C, A], True)) as log:
        for name in ("ab", "bc", "ca"):
            assert log.holding == [name]
            await log.release(name)
        assert log.holding == []


async def test_duplicate_key_in_a_batch() -> None:
    async with batches(("w", [A, A], True), ("r", [A, A], False)) as log:
        assert log.holding == ["w"]
        await log.release("w")
        assert log.holding == ["r"]


async def test_cancelled_waiter_does_not_block_others() -> None:
    locks = LockManager()
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
    async with locks.held(of([A, B, C], exclusive=True), 0.01):  # At once: nothing is locked.
        pass


async def test_waiting_for_a_key_times_out() -> None:
    locks = LockManager()
    async with locks.held(of([A], exclusive=True), 0.01):
        with pytest.raises(TimeoutError):
            async with locks.held(of([A, B], exclusive=False), 0.01):
                pass
        async with locks.held(of([B], exclusive=True), 0.01):
            pass
    async with locks.held(of([A, B, C], exclusive=True), 0.01):  # At once: nothing is locked.
        pass


async def test_waiting_for_a_thread_times_out() -> None:
    threads = Threads(2, 0.01)
    resume = threading.Event()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(threads.run, resume.wait)
        await settle()
        with pytest.raises(TimeoutError):
            await threads.run(lambda: 1)
        resume.set()
    assert await threads.run(lambda: 1) == 1


async def test_thread_is_reusable_after_an_exception() -> None:
    threads = Threads(1, 0.01)

    def fail() -> None:
        raise ConnectionError("on purpose")

    for _ in range(3):
        with pytest.raises(ConnectionError, match="on purpose"):
            await threads.run(fail)
    assert await threads.run(lambda: 1) == 1
