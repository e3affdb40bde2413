"""Executes blocking socket operations while the event loop continues.

Small ones stay in the event loop, which waits for the socket with ``add_reader`` and ``add_writer``: a
quarter of the cost of anyio, paid once for each part of a transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier import native
from kvtier.concurrency.sockets.connection import (
    EXPECT,
    POLL_SECONDS,
    SEND,
    Connection,
    Operation,
    Progress,
    advance,
    peer_closed,
    progress_of,
    to_buffers,
)
from kvtier.concurrency.threads import WorkerThreads, wait_all

if TYPE_CHECKING:
    import kvtier._native as _native

ResultT = TypeVar("ResultT")

SMALL_BYTES = 1 << 16
"""Up to this size, I/O stays in the event loop: starting a thread would take longer."""


class IoExecutor:
    """Executes operations in native threads if available, otherwise in worker threads.

    At most ``limit`` run concurrently. Native threads wake the event loop once for all operations that have
    completed meanwhile. Used from one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.threads = WorkerThreads(limit)
        """Worker threads for other blocking calls."""
        self._limit = limit
        self._core: _native.Pump | None = None
        self._loop: asyncio.AbstractEventLoop
        self._waiting: dict[int, asyncio.Future[tuple[int, int, int]]] = {}

    def close(self) -> None:
        """Stop the threads. No operation may be in flight. Idempotent."""
        self.threads.close()
        if self._core is not None:
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.remove_reader(self._core.fileno())
            self._core.close()
            self._core = None

    async def converse(
        self, connection: Connection, operations: Sequence[Operation], hashes: _native.Hashes | None = None
    ) -> Progress:
        """Execute operations; see :meth:`Connection.exchange`. Small ones run in the event loop.

        Native code gives what it moves to ``hashes``. Cancellation interrupts ``connection``, and returns
        only when the memory is unused.
        """
        if connection.buffered or not connection.is_plain or not native.available():
            return await self._exchange(connection, operations)
        if sum(len(buffer) for _, buffers in operations for buffer in buffers) <= SMALL_BYTES:
            return await self._in_loop(connection, operations, hashes)
        try:
            seconds = connection.deadline.remaining()
        except TimeoutError as error:
            return Progress(0, 0, error.with_traceback(None))
        kinds = [kind for kind, _ in operations]
        ended = self.start(connection.fileno(), operations, connection.scratch, seconds, hashes)
        # A cancelled task may keep this frame alive for longer than the memory is valid.
        del operations
        progress = progress_of(*await finished(ended, connection.interrupt))
        if kinds[progress.operations :][:1] == [EXPECT]:
            connection.put_back(progress.received)
        return progress

    def start(
        self,
        fd: int,
        operations: Sequence[Operation],
        unread: bytearray,
        seconds: float,
        hashes: _native.Hashes | None = None,
    ) -> asyncio.Future[tuple[int, int, int]]:
        """Run :func:`_native.exchange` in a native thread, which holds the memory until it completes."""
        if self._core is None:
            self._core = native.core.Pump(self._limit)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._core.fileno(), self._collect)
        ended = self._loop.create_future()
        self._waiting[self._core.start(fd, operations, unread, seconds, hashes)] = ended
        return ended

    def _collect(self) -> None:
        assert self._core is not None
        for ticket, operations, received, error in self._core.collect():
            ended = self._waiting.pop(ticket)
            if not ended.done():
                ended.set_result((operations, received, error))

    async def _exchange(self, connection: Connection, operations: Sequence[Operation]) -> Progress:
        """Run :meth:`Connection.exchange` in a worker thread."""
        results: list[Progress] = []
        work = self.threads(lambda: results.append(connection.exchange(operations)))
        await finished(work, connection.interrupt)
        return results[0]

    async def _in_loop(
        self, connection: Connection, operations: Sequence[Operation], hashes: _native.Hashes | None
    ) -> Progress:
        loop = asyncio.get_running_loop()
        fd, scratch = connection.fileno(), connection.scratch
        timer = loop.call_later(connection.deadline.left, connection.interrupt)
        done = received = 0
        rest = list(operations)
        try:
            while True:
                progress = progress_of(*native.core.exchange_now(fd, rest, scratch, hashes))
                done += progress.operations
                received = progress.received + (0 if progress.operations else received)
                del rest[: progress.operations]
                expects = bool(rest) and rest[0][0] == EXPECT
                if expects:
                    connection.put_back(progress.received)
                if not isinstance(progress.error, BlockingIOError):
                    return Progress(done, received, progress.error)
                if connection.buffered:
                    # A partial reply, which native code cannot resume.
                    return (await self._exchange(connection, rest)).after(-done)
                kind, buffers = rest[0]
                left = to_buffers(buffers)
                advance(left, progress.received)
                rest[0] = kind, list(left)
                await (until_writable if kind == SEND else until_readable)(fd)
        except OSError as error:
            return Progress(done, received, error.with_traceback(None))
        except asyncio.CancelledError:
            connection.interrupt()
            raise
        finally:
            timer.cancel()


async def finished(work: asyncio.Future[ResultT], interrupt: Callable[[], None]) -> ResultT:
    """Wait for a thread's result. Cancellation interrupts the work, and waits until it has ended."""
    threads: list[asyncio.Future[Any]] = [work]
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        interrupt()
        await wait_all(threads)
        if not work.cancelled():
            work.exception()  # Retrieve the exception of the interrupt, so that it is not logged.
        raise


async def until_readable(fd: int) -> None:
    """Wait until the socket is readable or the other side has closed."""
    loop = asyncio.get_running_loop()
    await _until(loop.add_reader, loop.remove_reader, fd, loop.create_future())


async def until_writable(fd: int) -> None:
    """Wait until the socket is writable.

    Raises ``ConnectionResetError`` if the other side has closed (:func:`peer_closed`), which the event loop
    does not report.
    """
    loop = asyncio.get_running_loop()
    is_writable = False
    while not is_writable:
        done = loop.create_future()
        timer = loop.call_later(POLL_SECONDS, _settle, done, False)
        try:
            is_writable = await _until(loop.add_writer, loop.remove_writer, fd, done)
        finally:
            timer.cancel()
        if not is_writable and peer_closed(fd):
            raise ConnectionResetError("the other side closed the connection")


async def _until(
    add: Callable[..., object], remove: Callable[[int], object], fd: int, done: asyncio.Future[bool]
) -> bool:
    add(fd, _settle, done, True)
    try:
        return await done
    finally:
        remove(fd)


def _settle(done: asyncio.Future[bool], is_possible: bool) -> None:
    if not done.done():
        done.set_result(is_possible)
