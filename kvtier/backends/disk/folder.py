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
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import aiofiles
import aiofiles.os
from anyio import CancelScope

from kvtier import native
from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.disk.scan import LOCK_FILE, PREFIX_DIGITS, PROBE_FILE, FolderScan, Kept
from kvtier.concurrency.files import FileLocked, LockFile, holder_of
from kvtier.concurrency.processes import LACKING
from kvtier.errors import TierError
from kvtier.logs import RateLimitedLog
from kvtier.memory.header import (
    HEADER_BYTES,
    NATIVE_CHECKSUM_BYTES,
    OBJECT_ALIGNMENT,
    ChunkHeader,
    is_sealed,
)
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")

LOOK_SECONDS = 10.0
"""Interval at which a folder in use is compared with its path."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_MISSING = frozenset({errno.ENOENT, errno.ESTALE})


def object_path(root: Path, key: ChunkKey) -> Path:
    """Return the path for the object of ``key``, whether or not it exists."""
    return root / _object_name(key)


def lock_holder(root: Path) -> str | None:
    """Return who has locked the folder: ``process 123 on host x since ...``. Blocks. Raises ``OSError``."""
    return holder_of(root / LOCK_FILE)


class ObjectFolder:
    """A folder of objects that this process has locked. Created with :meth:`open`.

    Objects are opened through the folder's descriptor: if another folder takes its path, because this one was
    removed or another file system mounted, that is not locked, and must not be written to.
    """

    def __init__(self, tier: str, root: Path, lock: LockFile, descriptor: int, *, direct: bool) -> None:
        self._tier = tier
        self._root = root
        self._lock = lock
        self._descriptor = descriptor
        self._opened = Path(f"/proc/self/fd/{descriptor}")
        self._is_suspect = False
        """Whether a write has not found the folder, or one of those in it."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._is_open = True
        self.direct = direct
        """Whether aligned objects bypass the page cache."""
        self._token = secrets.token_hex(4)
        self._serial = itertools.count()
        self._warn = RateLimitedLog(logger)
        self.scan = FolderScan(tier, root, self._opened, self._token)
        """Lists the objects."""

    @classmethod
    async def open(cls, tier: str, root: Path, *, direct: bool) -> ObjectFolder:
        """Create and lock a folder.

        ``direct`` asks for O_DIRECT, which is disabled if the file system does not support it. Raises
        :class:`TierError` if the folder cannot be created, locked or written; the message names the tier's
        setting and the remedy.
        """
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        holder = f"process {os.getpid()} on host {socket.gethostname()} since {since}"
        try:
            # Shielded, because a cancelled call would leave files open.
            with CancelScope(shield=True):
                async with AsyncExitStack() as undo:
                    await aiofiles.os.makedirs(root, mode=0o700, exist_ok=True)
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                    descriptor = await aiofiles.os.wrap(os.open)(root, flags)
                    undo.callback(os.close, descriptor)
                    lock = await LockFile.acquire(Path(f"/proc/self/fd/{descriptor}/{LOCK_FILE}"), holder)
                    undo.push_async_callback(lock.release)
                    direct = await _probe(tier, root, direct=direct)
                    undo.pop_all()
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
        return cls(tier, root, lock, descriptor, direct=direct)

    def path_of(self, key: ChunkKey) -> str:
        """Return the path for the object of ``key``, whether or not it exists."""
        return f"{self._opened}/{_object_name(key)}"

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
        if error.errno in _MISSING:
            self._is_suspect = True
        self._failed("write", error)
        return Outcome.FAILED

    def read_failed(self, error: OSError) -> Outcome:
        """Log a failed read of an existing object and return its outcome."""
        self._failed("read", error)
        return Outcome.FAILED

    def _failed(self, action: str, error: OSError) -> None:
        remedy = f": {LACKING[error.errno]}" if error.errno in LACKING else ""
        plain = OSError(error.errno, error.strerror)
        self._warn("tier %r cannot %s: %s%s", self._tier, action, plain, remedy)

    async def close(self) -> None:
        """Unlock the folder. Nothing may be in flight."""
        self._is_open = False
        await self._lock.release()
        os.close(self._descriptor)

    async def is_gone(self) -> bool:
        """Whether the folder was removed or moved, or another has its path.

        Compares them once a write has failed for that reason, and at an interval.
        """
        suspect, self._is_suspect = self._is_suspect, False
        if not self._is_open or (not suspect and time.monotonic() < self._look_at):
            return False
        self._look_at = time.monotonic() + LOOK_SECONDS
        return await aiofiles.os.wrap(self._has_lost_its_path)(suspect)

    def _has_lost_its_path(self, suspect: bool) -> bool:
        opened = os.fstat(self._descriptor)
        # The nearest folder that exists shows whether this one was removed, or its file system unmounted.
        for path in (self._root, *self._root.parents):
            try:
                found = path.stat()
            except OSError as error:
                if error.errno in _MISSING:
                    continue
                return False
            if path == self._root and os.path.samestat(opened, found):
                return False
            if suspect or opened.st_dev == found.st_dev:
                return True
            # As long as it works: what is in its place may be the mount point, on the disk of the system.
            self._warn(
                "tier %r: the file system of %s is not mounted there any more; it is used until this process "
                "exits: restart it once the right one is mounted",
                self._tier,
                self._root,
            )
            return False
        return suspect

    def holds(self, key: ChunkKey) -> bool:
        """Return whether ``key`` has an object."""
        return object_path(self._opened, key).is_file()

    def write(self, item: PutItem, *, checksums: dict[ChunkKey, bytes] | None = None) -> Outcome:
        """Write one object to a temporary file and rename it over the one it replaces.

        With ``checksums``, seal it, and add its checksum to these. That needs the native core.
        """
        key, view = item
        path = self.path_of(key)
        temporary = Path(self.temporary_of(path))
        try:
            unsealed = checksums is not None and not is_sealed(view)
            header = ChunkHeader.parse(view[:HEADER_BYTES]) if unsealed else None
            checksum = self._write_file(temporary, view, header)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            return self.write_failed(error)
        if checksums is not None and checksum is not None:
            checksums[key] = checksum
        return Outcome.OK

    def read(self, item: GetItem) -> Outcome:
        """Fill the view with one object of exactly its length, and update its time of last use."""
        key, view = item
        direct = self.direct and _is_aligned(view)
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

    def remove(self, key: ChunkKey) -> Kept:
        """Delete one object, if it exists. Return what could not be deleted."""
        path = object_path(self._opened, key)
        try:
            path.unlink()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn("tier %r cannot delete: %s", self._tier, OSError(error.errno, error.strerror))
            return self.scan.kept(path, error)
        return {}

    def _write_file(self, path: Path, view: memoryview, header: ChunkHeader | None) -> bytes | None:
        direct = self.direct and header is None and _is_aligned(view)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        try:
            if header is not None:
                return _write_sealed(descriptor, view, header)
            _write(descriptor, view, direct=direct)
            return None
        finally:
            os.close(descriptor)


def _write_sealed(descriptor: int, view: memoryview, header: ChunkHeader) -> bytes:
    """Write an unsealed chunk object, and then its header with the checksum. Return the checksum."""
    if header.payload_bytes >= NATIVE_CHECKSUM_BYTES:
        checksum = native.core.write_hashed(descriptor, view, HEADER_BYTES, header.payload_bytes)
    else:
        checksum = header.checksum(view)
        _write(descriptor, view)
    _write(descriptor, memoryview(header.packed(checksum)))
    return checksum


def _write(descriptor: int, view: memoryview, *, direct: bool = False) -> None:
    if _transfer(os.pwritev, descriptor, view, direct) < len(view):
        raise OSError(errno.EIO, "short write")


def _object_name(key: ChunkKey) -> str:
    name = key.hex()
    return f"{name[:PREFIX_DIGITS]}/{name}.kv"


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
