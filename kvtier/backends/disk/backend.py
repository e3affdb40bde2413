"""Disk backend: one file per object in a folder, written atomically and kept across restarts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, Literal, TypeVar

import anyio
from pydantic import Field

from kvtier import native
from kvtier.backends.base import (
    Backend,
    Capabilities,
    GetItem,
    Outcome,
    PutItem,
    StoredObject,
    SupportsCheck,
    SupportsRegistration,
    SupportsScan,
    SupportsSealing,
)
from kvtier.backends.disk.folder import ObjectFolder, lock_holder, object_path
from kvtier.backends.disk.scan import walk
from kvtier.backends.disk.uring import UringTransfers
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import MediumReplaced, TierError
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalPath, LocalTierSettings, TierSettings
from kvtier.units import KIB, Integer

logger = logging.getLogger("kvtier")

__all__ = ["DiskBackend", "DiskSettings", "lock_holder", "object_path", "walk"]

QUICK_CALLS_PER_THREAD = 64
"""Existence checks and deletes per thread. Each takes microseconds, so fewer do not justify a wake-up."""

COPIED_BYTES = 256 * KIB
"""From this size on, objects are copied to the page cache by threads of this process."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class DiskSettings(LocalTierSettings):
    """Settings of a tier of type ``disk``."""

    path: LocalPath = Field(
        description="Folder for the chunks. Created if missing. Two processes cannot share it.",
        examples=["/var/cache/kvtier"],
    )
    direct: bool = Field(
        default=True,
        description=(
            "Bypass the page cache (O_DIRECT) if the file system supports it: faster, and it leaves the "
            "host's memory to the memory tiers."
        ),
        examples=[False],
    )
    concurrency: Integer = Field(
        default=4,
        ge=1,
        le=256,
        description="Maximum number of batches in flight, and of files read or written at once.",
        examples=[8],
    )
    io: Literal["auto", "uring", "threads"] = Field(
        default="auto",
        description=(
            "I/O engine. `uring`: the kernel's io_uring. `threads`: one thread per file in flight. "
            "`auto`: io_uring if the native core is built and the kernel allows it, otherwise threads."
        ),
        examples=["threads"],
    )


class DiskBackend(Backend, SupportsScan, SupportsRegistration, SupportsCheck, SupportsSealing):
    """Objects as files ``DIR/<first 3 hex digits>/<64 hex digits>.kv``, which contain nothing else.

    At most ``concurrency`` objects are read or written at once, through io_uring or as many threads. A
    write goes to a temporary file that is then renamed over the old one, so a killed process leaves only
    complete objects. Nothing is fsynced: after a power failure a file may be torn or empty, which its
    header and checksum detect (:class:`~kvtier.tiers.seal.Seal`), at the cost of a miss.
    The modification time of a file is the time of its last use. One process at a time locks the folder.
    """

    settings_type: ClassVar[type[TierSettings]] = DiskSettings

    def __init__(self, settings: DiskSettings) -> None:
        self._settings = settings
        self._ring: UringTransfers | None = None
        self._seals = False
        """Whether objects are copied to the page cache, and can be hashed meanwhile."""
        self._gone: list[ObjectFolder] = []
        """Folders that were removed. Their descriptors stay open while anything may be in flight."""
        self._replacing = anyio.Lock()

    async def open(self) -> None:
        """Lock the folder.

        Raises :class:`TierError` if the folder is not writable, if another process has locked it, or if
        ``io: uring`` is set and io_uring is unavailable.
        """
        settings = self._settings
        self._executor = WorkerThreads(settings.concurrency)
        async with AsyncExitStack() as undo:
            undo.callback(self._executor.close)
            self._folder = await ObjectFolder.open(settings.name, settings.path, direct=settings.direct)
            undo.push_async_callback(self._folder.close)
            self._ring = self._make_ring()
            self._seals = not self._folder.direct and native.available()
            undo.pop_all()

    async def close(self) -> None:
        """Unlock the folder for the next process."""
        if self._ring is not None:
            await self._spread(lambda ring: ring.wait(), [self._ring])
            self._ring.close()
            self._ring = None  # Closes its descriptors and unpins the arena.
        for folder in (*self._gone, self._folder):
            await folder.close()
        self._executor.close()

    async def register(self, arena: Arena) -> None:
        """Register the arena with io_uring, because most objects are read into or written from it."""
        if self._ring is not None:
            self._ring.register(arena)

    async def check(self) -> str:
        """Return the I/O engine in use and whether it bypasses the page cache."""
        medium = "io_uring" if self._ring is not None else "threads"
        return f"{medium}, {'O_DIRECT' if self._folder.direct else 'through the page cache'}"

    def capabilities(self) -> Capabilities:
        """Return those of its protocols. It seals what it copies to the page cache."""
        found = super().capabilities()
        return found if self._seals else found._replace(sealing=None)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key has a file."""
        return await self._spread(self._folder.holds, keys, QUICK_CALLS_PER_THREAD)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view to a file. ``FULL`` if the disk is full or a quota is reached.

        If the folder was removed or moved, creates it again, and raises :class:`MediumReplaced`.
        """
        folder, copied = self._folder, any(len(view) >= COPIED_BYTES for _, view in items)
        # The kernel's own threads, to which io_uring leaves long copies, often share one core.
        in_ring = self._ring if folder.direct or not copied else None
        return await self._put(in_ring.write if in_ring else partial(self._spread, folder.write), items)

    async def put_sealed(
        self, items: Sequence[PutItem], checksums: dict[ChunkKey, bytes]
    ) -> Sequence[Outcome]:
        """Write each chunk object to a file through the page cache, and hash it while it is copied."""
        write = partial(self._folder.write, checksums=checksums)
        return await self._put(partial(self._spread, write), items)

    async def _put(
        self, write: Callable[[Sequence[PutItem]], Awaitable[list[Outcome]]], items: Sequence[PutItem]
    ) -> Sequence[Outcome]:
        folder = self._folder
        outcomes = await write(items)
        await self._replace_if_gone(folder)
        return outcomes

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each file into its view."""
        if self._ring is not None:
            return await self._ring.read(items)
        return await self._spread(self._folder.read, items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each file. Raises :class:`IncompleteScan` if some cannot be deleted."""
        folder = self._folder
        await folder.scan.keep(await self._spread(folder.remove, keys, QUICK_CALLS_PER_THREAD))

    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield every object in the folder, and delete the temporary files of interrupted writes.

        Reads one page of each file. Ignores files whose name is not a key, and logs them. Raises
        :class:`IncompleteScan` if something could not be read; only that is listed by the next scan.
        """
        scan = self._folder.scan
        async for paths in scan.objects():
            described = await self._spread(scan.describe, paths)
            found = [stored for stored in described if stored is not None]
            scan.count(found)
            yield found
        await scan.check()

    async def _replace_if_gone(self, gone: ObjectFolder) -> None:
        """Continue in a new folder if this one was removed or moved. Raises :class:`TierError`."""
        if not await gone.is_gone():
            return
        async with self._replacing:
            if self._folder is not gone:  # Another put has replaced it meanwhile.
                return
            settings = self._settings
            self._folder = await ObjectFolder.open(settings.name, settings.path, direct=settings.direct)
            self._gone.append(gone)
            if self._ring is not None:
                self._ring.folder = self._folder
        raise MediumReplaced(f"{settings.path} was removed or moved while in use: its chunks are lost")

    def _make_ring(self) -> UringTransfers | None:
        """Create the io_uring that the settings ask for, or return ``None`` to use threads."""
        settings = self._settings
        if settings.io == "threads":
            return None
        try:
            return UringTransfers(self._folder, settings.concurrency)
        except OSError as error:
            reason = error.strerror or str(error)
            if settings.io == "uring":
                raise TierError(
                    f"tier {settings.name!r}: io_uring is unavailable ({reason}): enable it (`kvtier doctor` "
                    "shows how), or set the tier's `io` to auto"
                ) from error
            logger.info("tier %r: io_uring is unavailable (%s); using threads", settings.name, reason)
            return None

    async def _spread(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], items_per_thread: int = 1
    ) -> list[ResultT]:
        parts = min(self._settings.concurrency, -(-len(items) // items_per_thread))
        return await spread(work, items, parts=parts, executor=self._executor)
