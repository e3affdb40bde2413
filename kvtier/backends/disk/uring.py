"""The io_uring half of the disk backend: reads and writes objects from one native thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from kvtier import native
from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.disk.folder import ObjectFolder
from kvtier.concurrency.threads import wait_all
from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES

OUTCOMES = {0: Outcome.OK, -1: Outcome.MISS, -2: Outcome.VERIFIED}
"""Outcomes by engine result. Otherwise it is an ``errno``."""

PART_OBJECTS = 512
"""Maximum objects per submission: each takes the event loop some microseconds."""


class UringTransfers:
    """Batch version of :meth:`ObjectFolder.write` and :meth:`ObjectFolder.read`, with a single native thread.

    Use it from the event loop that created it, which it never blocks. The kernel owns the memory until a
    call returns: a cancelled call returns only after all its I/O has stopped.
    """

    def __init__(self, folder: ObjectFolder, depth: int) -> None:
        """Transfer at most ``depth`` objects at once. Raises ``OSError`` if io_uring is unavailable."""
        if not native.available():
            raise OSError(native.missing_reason())
        self.folder = folder
        self._engine = native.core.DiskEngine(depth)
        self._in_flight: dict[int, asyncio.Future[list[int]]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._engine.event_fd, self._settle)

    def register(self, arena: Arena) -> None:
        """Have the kernel pin the arena once, part by part as it comes into use, instead of per object.

        Commits at most 256 MiB of unused memory at a time. An arena of huge pages gains nothing from it.
        """
        if arena.page_bytes == PAGE_BYTES:
            self._engine.register_memory(arena.view(0, arena.capacity))

    def wait(self) -> None:
        """Wait for I/O in flight and refuse new I/O. Blocks: call it from another thread."""
        self._engine.close()

    def close(self) -> None:
        """Detach from the event loop. Call it after :meth:`wait`."""
        # The results of the last batches: the event loop may not have seen their event yet.
        self._settle()
        self._loop.remove_reader(self._engine.event_fd)

    async def write(self, items: Sequence[PutItem]) -> list[Outcome]:
        """Write each object to a temporary file and rename it over the one it replaces."""
        codes = await self._in_parts(self._submit_writes, items)
        return [self.folder.write_failed(_error(code)) if code else Outcome.OK for code in codes]

    async def read(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Fill each view with an object of exactly its length, and update its time of last use."""
        codes = await self._in_parts(self._submit_reads, items)
        return [OUTCOMES.get(code) or self.folder.read_failed(_error(code)) for code in codes]

    def _submit_writes(self, items: Sequence[PutItem]) -> int:
        files = []
        for key, view in items:
            path = self.folder.path_of(key)
            files.append((os.fsencode(path), os.fsencode(self.folder.temporary_of(path)), view))
        return self._engine.write(files, self.folder.direct)

    def _submit_reads(self, items: Sequence[GetItem]) -> int:
        files = [(os.fsencode(self.folder.path_of(key)), view) for key, view in items]
        return self._engine.read(files, self.folder.direct)

    async def _in_parts(
        self, submit: Callable[[Sequence[GetItem]], int], items: Sequence[GetItem]
    ) -> list[int]:
        codes: list[int] = []
        for start in range(0, len(items), PART_OBJECTS):
            codes += await self._result_of(submit(items[start : start + PART_OBJECTS]))
        return codes

    async def _result_of(self, batch: int) -> list[int]:
        """Return the result code of each object. Even if cancelled, returns only when the batch has ended."""
        done: asyncio.Future[list[int]] = self._loop.create_future()
        self._in_flight[batch] = done
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            self._engine.cancel(batch)
            await wait_all([done])
            raise
        return done.result()

    def _settle(self) -> None:
        for batch, codes in self._engine.finished():
            self._in_flight.pop(batch).set_result(codes)


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
