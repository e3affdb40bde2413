"""A folder on a disk: one file an object, written whole or not at all, found again after a restart."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field

from kvtier.arena import Arena
from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    StoredObject,
    SupportsCheck,
    SupportsRegistration,
    SupportsScan,
)
from kvtier.backends.disk_folder import ObjectFolder, lock_holder, object_path, walk
from kvtier.backends.disk_ring import ObjectRing
from kvtier.errors import TierError
from kvtier.keys import ChunkKey
from kvtier.settings import LocalPath, LocalTierSettings, TierSettings
from kvtier.threads import WorkerThreads, spread

logger = logging.getLogger("kvtier")

__all__ = ["DiskBackend", "DiskSettings", "lock_holder", "object_path", "walk"]

QUICK_CALLS_PER_THREAD = 64
"""Looking for a file or deleting one takes microseconds: a thread's wake-up pays from so many on."""

SCAN_BATCH = 1024

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class DiskSettings(LocalTierSettings):
    """Settings of a tier of type ``disk``."""

    path: LocalPath = Field(
        description="The folder that holds the chunks, made where it is missing. No two processes share one.",
        examples=["/var/cache/kvtier"],
    )
    direct: bool = Field(
        default=True,
        description=(
            "Read and write past the page cache (O_DIRECT) where the file system can: faster, and it leaves "
            "the host's memory to the memory tiers."
        ),
        examples=[False],
    )
    concurrency: int = Field(
        default=4,
        ge=1,
        le=256,
        description="How many batches may be under way here at once, and how many chunks are moved.",
        examples=[8],
    )
    io: Literal["auto", "uring", "threads"] = Field(
        default="auto",
        description=(
            "What reads and writes: `uring`, the kernel's io_uring; `threads`, one for each chunk under way; "
            "`auto`: io_uring where the native core is built and the kernel allows it, else threads."
        ),
        examples=["threads"],
    )


class DiskBackend(Backend, SupportsScan, SupportsRegistration, SupportsCheck):
    """Objects as files ``DIR/<first 3 hex digits>/<64 hex digits>.kv``, and nothing else in them.

    At most ``concurrency`` objects are read or written at once, through io_uring or by as many threads. A
    write goes into a temporary file that then takes the place of the old one, so that a killed process leaves
    whole objects only. Nothing is synced: after a power failure a file may be torn or empty, which is
    found by its header and checksum (:class:`~kvtier.backends.sealed.SealedBackend`) and costs a miss.
    The modification time of a file is the time of its last use. One process at a time has the folder.
    """

    settings_type: ClassVar[type[TierSettings]] = DiskSettings

    def __init__(self, settings: DiskSettings) -> None:
        self._settings = settings
        self._ring: ObjectRing | None = None

    async def open(self) -> None:
        """Lock the folder. Raises :class:`TierError` where it cannot be written or another process has it.

        Also where the setting ``io`` asks for an io_uring that is not to be had.
        """
        settings = self._settings
        self._hop = WorkerThreads(settings.concurrency)
        try:
            self._folder = await self._in_thread(
                lambda: ObjectFolder(settings.name, settings.path, direct=settings.direct)
            )
            try:
                self._ring = self._make_ring()
            except BaseException:
                self._folder.close()
                raise
        except BaseException:
            self._hop.close()
            raise

    async def close(self) -> None:
        """Unlock the folder for the next process."""
        if self._ring is not None:
            await self._in_thread(self._ring.wait)
            self._ring.close()
            self._ring = None  # Its descriptors go with it, and its hold on the arena.
        await self._in_thread(self._folder.close)
        self._hop.close()

    async def register(self, arena: Arena) -> None:
        """Let io_uring keep hold of the arena's memory, from which most objects come."""
        if self._ring is not None:
            self._ring.keep(arena)

    async def check(self) -> str:
        """What reads and writes here."""
        medium = "io_uring" if self._ring is not None else "threads"
        return f"{medium}, {'O_DIRECT' if self._folder.direct else 'through the page cache'}"

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key has a file."""
        return await self._spread(self._folder.holds, keys, QUICK_CALLS_PER_THREAD)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view to a file. ``FULL`` where the disk or a quota is."""
        if self._ring is not None:
            return await self._ring.write(items)
        return await self._spread(self._folder.write, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each file into its view."""
        if self._ring is not None:
            return await self._ring.read(items)
        return await self._spread(self._folder.read, items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each file."""
        await self._spread(self._folder.remove, keys, QUICK_CALLS_PER_THREAD)

    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Every object in the folder, and an end to the temporary files of interrupted writes.

        Reads one page of each file. Files whose name is no key are left alone and named in the log.
        """
        objects = self._folder.objects()

        def next_batch() -> list[Path]:
            return list(itertools.islice(objects, SCAN_BATCH))

        while paths := await self._in_thread(next_batch):
            described = await self._spread(self._folder.describe, paths)
            yield [stored for stored in described if stored is not None]

    def _make_ring(self) -> ObjectRing | None:
        """The io_uring that the settings ask for, where there is one."""
        settings = self._settings
        if settings.io == "threads":
            return None
        try:
            return ObjectRing(self._folder, settings.concurrency)
        except OSError as error:
            reason = error.strerror or str(error)
            if settings.io == "uring":
                raise TierError(
                    f"tier {settings.name!r}: there is no io_uring to be had ({reason}): allow it (`kvtier "
                    "doctor` says how), or set the tier's `io` to auto"
                ) from error
            logger.info("tier %r: no io_uring (%s), so that threads read and write", settings.name, reason)
            return None

    async def _spread(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], items_per_thread: int = 1
    ) -> list[ResultT]:
        parts = min(self._settings.concurrency, -(-len(items) // items_per_thread))
        return await spread(work, items, parts=parts, hop=self._hop)

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        (result,) = await spread(lambda call: call(), [function], parts=1, hop=self._hop)
        return result
