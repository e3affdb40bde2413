"""The blocking half of the disk backend: a folder with one file per object. Callable from any thread.

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
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from kvtier.backends.base import GetItem, Outcome, PutItem, StoredObject
from kvtier.errors import TierError
from kvtier.logs import RateLimitedWarning
from kvtier.memory.header import HEADER_BYTES, OBJECT_ALIGNMENT
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")

LOCK_FILE = ".lock"
PROBE_FILE = ".probe"
LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 5, 0.05
"""How often to retry the lock before failing: an inspection also holds it, but only for microseconds."""

_PREFIX_DIGITS = 3
_PREFIX = re.compile(rf"[0-9a-f]{{{_PREFIX_DIGITS}}}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+-[0-9]+\.tmp")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def object_path(root: Path, key: ChunkKey) -> Path:
    """Return the path for the object of ``key``, whether or not it exists."""
    return root / _object_name(key)


def walk(root: Path) -> Iterator[Path]:
    """Return the objects in a folder, ordered by the first digits of their keys. Raises ``OSError``."""
    return (path for path in _files(root) if _key_of(path) is not None)


def lock_holder(root: Path) -> str | None:
    """Return who has locked the folder: ``process 123 on host x since ...``. Raises ``OSError``."""
    try:
        descriptor = os.open(root / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor)
    finally:
        os.close(descriptor)
    return None


class ObjectFolder:
    """A folder of objects that this process has locked.

    ``direct`` asks for O_DIRECT, which is disabled if the file system does not support it. Raises
    :class:`TierError` if the folder cannot be created, locked or written; the message names the tier's
    setting and the remedy.
    """

    def __init__(self, tier: str, root: Path, *, direct: bool) -> None:
        self._tier = tier
        self._root = root
        self._token = secrets.token_hex(4)
        self._serial = itertools.count()
        self._warn = RateLimitedWarning(logger)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._direct = self._probe(direct)
        except OSError as error:
            os.close(self._lock)
            raise self._unusable(error) from error

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

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

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

    def objects(self) -> Iterator[Path]:
        """Yield the objects. Deletes the files of interrupted writes and logs foreign files."""
        foreign: list[Path] = []
        for path in _files(self._root):
            if _key_of(path) is not None:
                yield path
            elif not _TEMPORARY.fullmatch(path.name):
                foreign.append(path)
            elif f".{self._token}-" not in path.name:
                with suppress(OSError):
                    path.unlink()
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
        key = _key_of(path)
        if key is None:
            return None
        try:
            status = path.stat()
            head = _first_bytes(path) if stat.S_ISREG(status.st_mode) else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("tier %r cannot read, ignoring: %s", self._tier, error)
            return None
        return StoredObject(key, status.st_size, status.st_mtime, head)

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

    def _take_lock(self) -> int:
        descriptor = os.open(self._root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for attempt in range(LOCK_ATTEMPTS):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if attempt + 1 == LOCK_ATTEMPTS:
                        raise self._in_use(_read_holder(descriptor)) from error
                    time.sleep(LOCK_PAUSE_SECONDS)
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            holder = f"process {os.getpid()} on host {socket.gethostname()} since {since}"
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder.encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _probe(self, direct: bool) -> bool:
        """Write and delete one page; return whether O_DIRECT works. A full disk is not an error."""
        path = self._root / PROBE_FILE
        with mmap.mmap(-1, OBJECT_ALIGNMENT) as page:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
                try:
                    os.pwrite(descriptor, page, 0)
                finally:
                    os.close(descriptor)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    logger.warning(
                        "tier %r: the file system of %s does not support O_DIRECT; using the page cache",
                        self._tier,
                        self._root,
                    )
                    return self._probe(direct=False)
                if error.errno not in _NO_ROOM:
                    raise
            finally:
                path.unlink(missing_ok=True)
        return direct

    def _unusable(self, error: OSError) -> TierError:
        return TierError(
            f"tier {self._tier!r}: path {self._root} cannot be used ({error.strerror}): set the tier's "
            "`path` to a folder that this user can write to"
        )

    def _in_use(self, holder: str) -> TierError:
        return TierError(
            f"tier {self._tier!r}: path {self._root} is in use by {holder}: stop that process, or set this "
            "tier's `path` to a folder of its own"
        )


def _object_name(key: ChunkKey) -> str:
    name = key.hex()
    return f"{name[:_PREFIX_DIGITS]}/{name}.kv"


def _key_of(path: Path) -> ChunkKey | None:
    """Return the key of an object file; ``None`` if it is not one, or in the wrong prefix folder."""
    match = _OBJECT.fullmatch(path.name)
    if match is None or not path.name.startswith(path.parent.name):
        return None
    return ChunkKey(bytes.fromhex(match[1]))


def _files(root: Path) -> Iterator[Path]:
    """Yield every file in the prefix folders, and every other entry of the root."""
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if _PREFIX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with os.scandir(entry) as files:
                yield from (Path(file.path) for file in files)
        elif entry.name not in (LOCK_FILE, PROBE_FILE):
            yield Path(entry.path)


def _read_holder(descriptor: int) -> str:
    # Empty for a moment after another process has acquired the lock.
    return os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"


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
