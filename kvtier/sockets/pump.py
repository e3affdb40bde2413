"""Conversations over sockets that go on while the event loop does something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier import native
from kvtier.sockets.buffers import advance, buffers_of
from kvtier.sockets.connection import Connection
from kvtier.sockets.conversation import EXPECT, SEND, Operation, Progress, progress_of
from kvtier.sockets.waiting import until_readable, until_writable
from kvtier.threads import WorkerThreads, all_done

if TYPE_CHECKING:
    from kvtier import _native

ResultT = TypeVar("ResultT")

SMALL_BYTES = 1 << 16
"""So much is moved in the loop, where the socket takes or gives it: a thread would take longer to start."""


class Pump:
    """Has conversations carried out: by native threads where they are there, else by worker threads.

    At most as many at once as ``hop`` has threads. The loop is told once of all that native threads have
    ended meanwhile. Used from one event loop.
    """

    def __init__(self, most: int) -> None:
        self.hop = WorkerThreads(most)
        """Into a worker thread, for whatever else blocks."""
        self._most = most
        self._core: _native.Pump | None = None
        self._loop: asyncio.AbstractEventLoop
        self._waiting: dict[int, asyncio.Future[tuple[int, int, int]]] = {}

    def close(self) -> None:
        """Let the threads end. Nothing may be under way any more. Harmless when repeated."""
        self.hop.close()
        if self._core is not None:
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.remove_reader(self._core.fileno())
            self._core.close()
            self._core = None

    async def converse(self, connection: Connection, operations: Sequence[Operation]) -> Progress:
        """See :meth:`Connection.exchange`. A small conversation stays in the loop.

        Where this is cancelled, ``connection`` is interrupted, and the memory let go of before it ends.
        """
        if connection.buffered or not connection.is_plain or not native.available():
            return await self._exchange(connection, operations)
        if sum(len(buffer) for _, buffers in operations for buffer in buffers) <= SMALL_BYTES:
            return await self._in_loop(connection, operations)
        try:
            seconds = connection.deadline.remaining()
        except TimeoutError as error:
            return Progress(0, 0, error.with_traceback(None))
        kinds = [kind for kind, _ in operations]
        ended = self.start(connection.fileno(), operations, connection.scratch, seconds)
        # A task that is cancelled may keep this frame for longer than the memory is the caller's to lend.
        del operations
        progress = progress_of(*await finished(ended, connection.interrupt))
        if kinds[progress.operations :][:1] == [EXPECT]:
            connection.put_back(progress.received)
        return progress

    def start(
        self, fd: int, operations: Sequence[Operation], unread: bytearray, seconds: float
    ) -> asyncio.Future[tuple[int, int, int]]:
        """Have a native thread do what :func:`_native.exchange` does, and hold the memory until then."""
        core = self._core or self._open()
        ended = self._loop.create_future()
        self._waiting[core.start(fd, operations, unread, seconds)] = ended
        return ended

    def _open(self) -> _native.Pump:
        self._core = native.core.Pump(self._most)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._core.fileno(), self._collect)
        return self._core

    def _collect(self) -> None:
        assert self._core is not None
        for ticket, operations, received, error in self._core.collect():
            ended = self._waiting.pop(ticket)
            if not ended.done():
                ended.set_result((operations, received, error))

    async def _exchange(self, connection: Connection, operations: Sequence[Operation]) -> Progress:
        """In a worker thread."""
        said: list[Progress] = []
        hop = self.hop(lambda: said.append(connection.exchange(operations)))
        await finished(hop, connection.interrupt)
        return said[0]

    async def _in_loop(self, connection: Connection, operations: Sequence[Operation]) -> Progress:
        loop = asyncio.get_running_loop()
        fd, scratch = connection.fileno(), connection.scratch
        timer = loop.call_later(connection.deadline.left, connection.interrupt)
        done = received = 0
        rest = list(operations)
        try:
            while True:
                progress = progress_of(*native.core.exchange_now(fd, rest, scratch))
                done += progress.operations
                received = progress.received + (0 if progress.operations else received)
                del rest[: progress.operations]
                expects = bool(rest) and rest[0][0] == EXPECT
                if expects:
                    connection.put_back(progress.received)
                if not isinstance(progress.error, BlockingIOError):
                    return Progress(done, received, progress.error)
                if connection.buffered:
                    # Half an answer, which native code does not go on with.
                    return (await self._exchange(connection, rest)).after(-done)
                kind, buffers = rest[0]
                left = buffers_of(buffers)
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
    """What a thread's work comes to. Where this is cancelled, it is interrupted, and then waited for."""
    threads: list[asyncio.Future[Any]] = [work]
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        interrupt()
        await all_done(threads)
        if not work.cancelled():
            work.exception()  # Whatever it was interrupted with is nobody's concern.
        raise
