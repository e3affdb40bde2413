"""A folder on a disk: one file an object, written whole or not at all, found again after a restart."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import aiofiles.os
from anyio import CancelScope, to_thread
from pydantic import AfterValidator, Field

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject, SupportsScan
from kvtier.backends.disk_folder import ObjectFolder, lock_holder, object_path, walk
from kvtier.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.threads import spread

__all__ = ["DiskBackend", "DiskSettings", "lock_holder", "object_path", "walk"]

QUICK_CALLS_PER_THREAD = 64
"""Looking for a file or deleting one takes microseconds: a thread's wake-up pays from so many on."""

SCAN_BATCH = 1024

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class DiskSettings(LocalTierSettings):
    """Settings of a tier of type ``disk``."""

    path: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
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
        description="How many batches may be under way here at once, and how many threads read and write.",
        examples=[8],
    )


class DiskBackend(Backend, SupportsScan):
    """Objects as files ``DIR/<first 3 hex digits>/<64 hex digits>.kv``, and nothing else in them.

    A batch is worked off by at most ``concurrency`` threads of the backend's own, one hop each. A write
    goes into a temporary file that then takes the place of the old one, so that a killed process leaves
    whole objects only. Nothing is synced: after a power failure a file may be torn or empty, which is
    found by its header and checksum (:class:`~kvtier.backends.sealed.SealedBackend`) and costs a miss.
    The modification time of a file is the time of its last use. One process at a time has the folder.
    """

    settings_type: ClassVar[type[TierSettings]] = DiskSettings

    def __init__(self, settings: DiskSettings) -> None:
        self._settings = settings

    async def open(self) -> None:
        """Lock the folder. Raises :class:`TierError` where it cannot be written or another process has it."""
        settings = self._settings
        self._threads = ThreadPoolExecutor(settings.concurrency, f"kvtier-{settings.name}")
        try:
            self._folder = await self._in_thread(
                lambda: ObjectFolder(settings.name, settings.path, direct=settings.direct)
            )
        except BaseException:
            await self._end_threads()
            raise

    async def close(self) -> None:
        """Unlock the folder for the next process."""
        await self._in_thread(self._folder.close)
        await self._end_threads()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key has a file."""
        return await self._spread(self._folder.holds, keys, QUICK_CALLS_PER_THREAD)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view to a file. ``FULL`` where the disk or a quota is."""
        return await self._spread(self._folder.write, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each file into its view."""
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

    async def _end_threads(self) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self._threads.shutdown)

    async def _spread(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], items_per_thread: int = 1
    ) -> list[ResultT]:
        parts = min(self._settings.concurrency, -(-len(items) // items_per_thread))
        return await spread(work, items, parts=parts, hop=self._hop)

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        (result,) = await spread(lambda call: call(), [function], parts=1, hop=self._hop)
        return result

    async def _hop(self, function: Callable[[], None]) -> None:
        await aiofiles.os.wrap(function)(executor=self._threads)
