"""The folder of the disk backend, with one file per object.

Methods that read or write one object block, and may be called from any thread: a batch of them is one call
into a worker thread. The rest is asynchronous, through aiofiles.

::

    DIR/.lock                       flocked while a process uses the folder; names that process
    DIR/<3 hex>/<64 hex>.kv         an object; its name is its key
    DIR/<3 hex>/<64 hex>.<…>.tmp    an object that is being written
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import aiofiles
import aiofiles.os
from anyio import CancelScope

from kvtier.backends.base import GetItem, Outcome, PutItem, StoredObject
from kvtier.concurrency.files import FileLocked, LockFile, holder_of
from kvtier.errors import TierError
from kvtier.logs import RateLimitedLog
from kvtier.memory.header import HEADER_BYTES, OBJECT_ALIGNMENT
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")

LOCK_FILE = ".lock"
PROBE_FILE = ".probe"
LISTED_AT_ONCE = 1024
"""Files listed in one call into a worker thread."""

_PREFIX_DIGITS = 3
_PREFIX = re.compile(rf"[0-9a-f]{{{_PREFIX_DIGITS}}}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+-[0-9]+\.tmp")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

EntryT = TypeVar("EntryT")


def object_path(root: Path, key: ChunkKey) -> Path:
    """Return the path for the object of ``key``, whether or not it exists."""
    return root / _object_name(key)


def walk(root: Path) -> Iterator[Path]:
    """Return the objects in a folder, ordered by the first digits of their keys. Raises ``OSError``."""
    return (path for path, key in _files(root) if key is not None)


async def listed(files: Iterator[EntryT]) -> AsyncIterator[list[EntryT]]:
    """Yield files of :func:`walk` in batches, each with one call into a worker thread."""
    take = aiofiles.os.wrap(lambda: list(itertools.islice(files, LISTED_AT_ONCE)))
    while batch := await take():
        yield batch


def lock_holder(root: Path) -> str | None:
    """Return who has locked the folder: ``process 123 on host x since ...``. Blocks. Raises ``OSError``."""
    return holder_of(root / LOCK_FILE)


class ObjectFolder:
    """A folder of objects that this process has locked. Created with :meth:`open`."""

    def __init__(self, tier: str, root: Path, lock: LockFile, *, direct: bool) -> None:
        self._tier = tier
        self._root = root
        self._lock = lock
        self._direct = direct
        self._token = secrets.token_hex(4)
        self._serial = itertools.count()
        self._warn = RateLimitedLog(logger)

    @classmethod
    async def open(cls, tier: str, root: Path, *, direct: bool) -> ObjectFolder:
        """Create and lock a folder.

        ``direct`` asks for O_DIRECT, which is disabled if the file system does not support it. Raises
        :class:`TierError` if the folder cannot be created, locked or written; the message names the tier's
        setting and the remedy.
        """
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        holder = f"process {os.getpid()} on host {socket.gethostname()} since {since}"
        # Shielded, because a cancelled call would leave files open.
        with CancelScope(shield=True):
            try:
                await aiofiles.os.makedirs(root, mode=0o700, exist_ok=True)
                lock = await LockFile.acquire(root / LOCK_FILE, holder)
                try:
                    direct = await _probe(tier, root, direct=direct)
                except BaseException:
                    await lock.release()
                    raise
            except FileLocked as error:
                raise TierError(
                    f"tier {tier!r}: path {root} is in use by {error.holder}: stop that process, or set this "
                    "tier's `path` to a folder of its own"
                ) from error
            except OSError as error:
                raise TierError(
                    f"tier {tier!r}: path {root} cannot be used ({error.strerror}): set the tier's `path` to "
                    "a folder that this user can write to"
                ) from error
        return cls(tier, root, lock, direct=direct)

    @property
    def direct(self) -> bool:
        """Whether aligned objects bypass the page cache."""
        return self._direct

    @property
    def tier(self) -> str:
        """The name of the tier that uses the folder."""
        return self._tier

    def path_of(self, key: ChunkKey) -> str:
        """Return the path for the object of ``key``, whether or not it exists."""
        return f"{self._root}/{_object_name(key)}"

    def temporary_of(self, path: str) -> str:
        """Return a new temporary path for writing the object ``path``."""
        return f"{path.removesuffix('.kv')}.{self._token}-{next(self._serial)}.tmp"

    def write_failed(self, error: OSError) -> Outcome:
        """Log a failed write and return its outcome."""
        if error.errno in _NO_ROOM:
            self._warn(
                "tier %r: no space left in %s (%s); chunks are not stored: lower the tier's capacity",
                self._tier,
                self._root,
                error.strerror,
            )
            return Outcome.FULL
        self._warn("tier %r cannot write: %s", self._tier, error)
        return Outcome.FAILED

    def read_failed(self, error: OSError) -> Outcome:
        """Log a failed read of an existing object and return its outcome."""
        self._warn("tier %r cannot read: %s", self._tier, error)
        return Outcome.FAILED

    async def close(self) -> None:
        """Unlock the folder."""
        await self._lock.release()

    def holds(self, key: ChunkKey) -> bool:
        """Return whether ``key`` has an object."""
        return object_path(self._root, key).is_file()

    def write(self, item: PutItem) -> Outcome:
        """Write one object to a temporary file and rename it over the one it replaces."""
        key, view = item
        path = self.path_of(key)
        temporary = Path(self.temporary_of(path))
        try:
            self._write_file(temporary, view)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            return self.write_failed(error)
        return Outcome.OK

    def read(self, item: GetItem) -> Outcome:
        """Fill the view with one object of exactly its length, and update its time of last use."""
        key, view = item
        direct = self._direct and _is_aligned(view)
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            descriptor = os.open(self.path_of(key), flags)
            try:
                if os.fstat(descriptor).st_size != len(view):
                    return Outcome.MISS
                if _transfer(os.preadv, descriptor, view, direct) < len(view):
                    return Outcome.MISS
                with suppress(OSError):
                    os.utime(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return Outcome.MISS
        except OSError as error:
            return self.read_failed(error)
        return Outcome.OK

    def remove(self, key: ChunkKey) -> None:
        """Delete one object, if it exists."""
        try:
            object_path(self._root, key).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn("tier %r cannot delete: %s", self._tier, error)

    async def objects(self) -> AsyncIterator[list[Path]]:
        """Yield the objects in batches. Deletes the files of interrupted writes and logs foreign files."""
        foreign: list[Path] = []
        async for entries in listed(_files(self._root)):
            objects: list[Path] = []
            for path, key in entries:
                if key is not None:
                    objects.append(path)
                elif not _TEMPORARY.fullmatch(path.name):
                    foreign.append(path)
                elif f".{self._token}-" not in path.name:
                    with suppress(OSError):
                        await aiofiles.os.unlink(path)
            if objects:
                yield objects
        if foreign:
            logger.warning(
                "tier %r: ignoring %d files in %s that do not belong to kvtier, such as %s",
                self._tier,
                len(foreign),
                self._root,
                foreign[0],
            )

    def describe(self, path: Path) -> StoredObject | None:
        """Return the object in a file of :meth:`objects`; ``None`` if it was deleted.

        Also ``None``, with a warning, if it is unreadable: it is kept, because the next start may read it.
        """
        try:
            status, head = path.stat(), _first_bytes(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("tier %r cannot read, ignoring: %s", self._tier, error)
            return None
        return StoredObject(ChunkKey(bytes.fromhex(path.stem)), status.st_size, status.st_mtime, head)

    def _write_file(self, path: Path, view: memoryview) -> None:
        direct = self._direct and _is_aligned(view)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        try:
            if _transfer(os.pwritev, descriptor, view, direct) < len(view):
                raise OSError(errno.EIO, "short write", str(path))
        finally:
            os.close(descriptor)


def _object_name(key: ChunkKey) -> str:
    name = key.hex()
    return f"{name[:_PREFIX_DIGITS]}/{name}.kv"


def _key_of(entry: os.DirEntry[str], prefix: str) -> ChunkKey | None:
    """Return the key of an object file; ``None`` if it is not one, or in the wrong prefix folder.

    A folder is no object, and neither is a pipe or a device, which to open might block forever.
    """
    match = _OBJECT.fullmatch(entry.name)
    if match is None or not entry.name.startswith(prefix) or not entry.is_file():
        return None
    return ChunkKey(bytes.fromhex(match[1]))


def _files(root: Path) -> Iterator[tuple[Path, ChunkKey | None]]:
    """Yield every file in the prefix folders with its key, and every other entry of the root."""
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if _PREFIX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with os.scandir(entry) as files:
                yield from ((Path(file.path), _key_of(file, entry.name)) for file in files)
        elif entry.name not in (LOCK_FILE, PROBE_FILE):
            yield Path(entry.path), None


async def _probe(tier: str, root: Path, *, direct: bool) -> bool:
    """Write and delete one page; return whether O_DIRECT works. A full disk is not an error."""
    path = root / PROBE_FILE

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | (os.O_DIRECT if direct else 0), 0o600)

    try:
        with mmap.mmap(-1, OBJECT_ALIGNMENT) as page:
            async with aiofiles.open(path, "wb", buffering=0, opener=opener) as file:
                await file.write(page)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            logger.warning(
                "tier %r: the file system of %s does not support O_DIRECT; using the page cache", tier, root
            )
            return await _probe(tier, root, direct=False)
        if error.errno not in _NO_ROOM:
            raise
    finally:
        with suppress(FileNotFoundError):
            await aiofiles.os.unlink(path)
    return direct


def _first_bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Disables readahead, which would read about a hundred kilobytes per header.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(descriptor, HEADER_BYTES, 0)
    finally:
        os.close(descriptor)


def _is_aligned(view: memoryview) -> bool:
    """Return whether a view is suitable for O_DIRECT. ctypes cannot get the address of a read-only view."""
    if len(view) % OBJECT_ALIGNMENT or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) % OBJECT_ALIGNMENT == 0


def _transfer(
    move: Callable[[int, Sequence[memoryview], int], int], descriptor: int, view: memoryview, direct: bool
) -> int:
    """Read or write a whole view. Return the bytes transferred, fewer only at the end of the file."""
    moved = 0
    while moved < len(view):
        if direct and moved % OBJECT_ALIGNMENT:
            # A short transfer (almost full disk, signal) ended in the middle of a page.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            direct = False
        count = move(descriptor, [view[moved:]], moved)
        if count == 0:
            break
        moved += count
    return moved
