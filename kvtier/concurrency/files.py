"""Files of this user only, and lock files: one process at a time holds one, and it names that process."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import aiofiles
import aiofiles.os
from aiofiles.threadpool.binary import AsyncFileIO
from anyio import CancelScope, sleep

from kvtier.errors import KVTierError

ATTEMPTS, PAUSE_SECONDS = 5, 0.05
"""How often to retry before failing: :func:`holder_of` also locks the file, but only for microseconds."""


def open_private(path: str, flags: int) -> int:
    """Open a file, and create it if missing, for this user only. Blocks. An ``opener`` for ``open``."""
    return os.open(path, flags | os.O_CREAT, 0o600)


class FileLocked(KVTierError):
    """Another process holds the file."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by {holder}")
        self.holder = holder
        """What that process has written into the file."""


class LockFile:
    """A file that this process has locked. The kernel unlocks it when the process exits."""

    def __init__(self, file: AsyncFileIO) -> None:
        self._file = file

    @classmethod
    async def acquire(cls, path: Path, holder: str) -> LockFile:
        """Lock the file, and write ``holder`` into it. Create it if missing, for this user only.

        Raises: FileLocked: another process holds it. OSError: it cannot be opened or locked.
        """
        # Shielded, because a cancelled call would leave the file open, and thus locked.
        with CancelScope(shield=True):
            file = await aiofiles.open(path, "r+b", buffering=0, opener=open_private)
            try:
                await _lock(file)
                with suppress(OSError):  # For example, the disk is full.
                    await file.truncate(0)
                    await file.write(holder.encode())
            except BaseException:
                await file.close()
                raise
        return cls(file)

    async def release(self) -> None:
        """Unlock the file for the next process."""
        with CancelScope(shield=True):
            await self._file.close()


def holder_of(path: Path) -> str | None:
    """Return what the process that holds the file has written into it; ``None`` if no process holds it.

    Blocks as long as the file system does. Raises ``OSError``.
    """
    with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _name_in(file.fileno())
    return None


async def _lock(file: AsyncFileIO) -> None:
    flock = aiofiles.os.wrap(fcntl.flock)
    for _ in range(ATTEMPTS - 1):
        with suppress(BlockingIOError):
            return await flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        await sleep(PAUSE_SECONDS)
    try:
        await flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileLocked(_name_in(file.fileno())) from error


def _name_in(descriptor: int) -> str:
    # Empty for a moment after another process has acquired the lock.
    return os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"
