"""The native half of the disk backend: objects read and written through io_uring, by one native thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from kvtier import native
from kvtier.arena import Arena
from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.disk_folder import ObjectFolder
from kvtier.slices import PAGE_BYTES
from kvtier.threads import all_done

MISS = -1
"""What the engine says of a file that is not there or is of another length; 0: done; else an ``errno``."""

PART_OBJECTS = 512
"""So many are handed over at once: it takes the event loop some microseconds each."""


class ObjectRing:
    """Writes and reads as :class:`ObjectFolder` does, but whole batches, and with one thread for all of them.

    Called from the event loop that it was made in, and never blocks it. Memory belongs to the kernel until
    the call has ended: a cancelled one ends when nothing moves any longer.
    """

    def __init__(self, folder: ObjectFolder, depth: int) -> None:
        """Move at most ``depth`` objects at once. Raises ``OSError`` where there is no io_uring to be had."""
        if not native.available():
            raise OSError(native.why_not())
        self._folder = folder
        self._engine = native.core.DiskEngine(depth)
        self._under_way: dict[int, asyncio.Future[list[int]]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._engine.event_fd, self._settle)

    def keep(self, arena: Arena) -> None:
        """Have the kernel pin the arena once instead of for every object, as its parts come into use.

        Costs memory that is not yet used at most 256 MiB at a time. One of huge pages gains nothing by it.
        """
        if arena.page_bytes == PAGE_BYTES:
            self._engine.keep(arena.view(0, arena.capacity))

    def wait(self) -> None:
        """Let what is under way finish, and nothing new begin. Blocks: called from another thread."""
        self._engine.close()

    def close(self) -> None:
        """Let go of the loop. Called after :meth:`wait`."""
        self._settle()
        self._loop.remove_reader(self._engine.event_fd)

    async def write(self, items: Sequence[PutItem]) -> list[Outcome]:
        """Write each object beside the one it replaces, then put it in its place."""
        said = await self._in_parts(self._begin_to_write, items)
        return [self._folder.write_failed(_error(code)) if code else Outcome.OK for code in said]

    async def read(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Fill each view with an object of exactly its length, and note that it was used."""
        said = await self._in_parts(self._begin_to_read, items)
        return [self._read_outcome(code) if code else Outcome.OK for code in said]

    def _begin_to_write(self, items: Sequence[PutItem]) -> int:
        files = []
        for key, view in items:
            path = self._folder.path_of(key)
            files.append((os.fsencode(path), os.fsencode(self._folder.temporary_of(path)), view))
        return self._engine.write(files, self._folder.direct)

    def _begin_to_read(self, items: Sequence[GetItem]) -> int:
        files = [(os.fsencode(self._folder.path_of(key)), view) for key, view in items]
        return self._engine.read(files, self._folder.direct)

    def _read_outcome(self, code: int) -> Outcome:
        return Outcome.MISS if code == MISS else self._folder.read_failed(_error(code))

    async def _in_parts(
        self, begin: Callable[[Sequence[GetItem]], int], items: Sequence[GetItem]
    ) -> list[int]:
        said: list[int] = []
        for start in range(0, len(items), PART_OBJECTS):
            said += await self._done(begin(items[start : start + PART_OBJECTS]))
        return said

    async def _done(self, batch: int) -> list[int]:
        """What became of each object of a batch. It ends with the batch, be it cancelled meanwhile or not."""
        done: asyncio.Future[list[int]] = self._loop.create_future()
        self._under_way[batch] = done
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            self._engine.cancel(batch)
            await all_done([done])
            raise
        return done.result()

    def _settle(self) -> None:
        for batch, said in self._engine.finished():
            self._under_way.pop(batch).set_result(said)


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
