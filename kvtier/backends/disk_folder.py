"""The blocking half of the disk backend: one folder of objects, one file each. Any thread may call it.

::

    DIR/.lock                       held by flock while a process has the folder; names that process
    DIR/<3 hex>/<64 hex>.kv         an object; its name is its key
    DIR/<3 hex>/<64 hex>.<…>.tmp    an object while it is being written
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
from kvtier.backends.logs import RareWarning
from kvtier.errors import TierError
from kvtier.header import HEADER_BYTES, OBJECT_ALIGNMENT
from kvtier.keys import ChunkKey

logger = logging.getLogger("kvtier")

LOCK_FILE = ".lock"
PROBE_FILE = ".probe"
LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 5, 0.05
"""A second opener is refused after so many attempts: an inspection holds the lock for microseconds."""

_PREFIX_DIGITS = 3
_PREFIX = re.compile(rf"[0-9a-f]{{{_PREFIX_DIGITS}}}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+-[0-9]+\.tmp")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def object_path(root: Path, key: ChunkKey) -> Path:
    """Where the object of ``key`` is, or would be."""
    return root / _object_name(key)


def walk(root: Path) -> Iterator[Path]:
    """The objects in a folder, in the order of their keys' first digits. Raises ``OSError``."""
    return (path for path in _files(root) if _key_of(path) is not None)


def lock_holder(root: Path) -> str | None:
    """Who has the folder: ``process 123 on host x since ...``, or ``None``. Raises ``OSError``."""
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
    """A folder that this process has locked, and the files in it.

    Raises :class:`TierError` where the folder cannot be made, locked or written, naming the tier's
    setting and the remedy. ``direct`` asks for O_DIRECT; it is dropped where the file system has none.
    """

    def __init__(self, tier: str, root: Path, *, direct: bool) -> None:
        self._tier = tier
        self._root = root
        self._token = secrets.token_hex(4)
        self._serial = itertools.count()
        self._warn = RareWarning(logger)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._direct = self._is_writable(direct)
        except OSError as error:
            os.close(self._lock)
            raise self._unusable(error) from error

    @property
    def direct(self) -> bool:
        """Whether aligned objects bypass the page cache."""
        return self._direct

    @property
    def tier(self) -> str:
        """The name of the tier whose folder it is."""
        return self._tier

    def path_of(self, key: ChunkKey) -> str:
        """Where the object of a key is, or would be."""
        return f"{self._root}/{_object_name(key)}"

    def temporary_of(self, path: str) -> str:
        """Where what is to get the name ``path`` is written, another place each time."""
        return f"{path.removesuffix('.kv')}.{self._token}-{next(self._serial)}.tmp"

    def write_failed(self, error: OSError) -> Outcome:
        """What became of a key that could not be written. Warns."""
        if error.errno in _NO_ROOM:
            self._warn(
                "tier %r: no room on the disk of %s (%s): chunks are not stored, lower the tier's capacity",
                self._tier,
                self._root,
                error.strerror,
            )
            return Outcome.FULL
        self._warn("tier %r cannot write: %s", self._tier, error)
        return Outcome.FAILED

    def read_failed(self, error: OSError) -> Outcome:
        """What became of a key that is there and could not be read. Warns."""
        self._warn("tier %r cannot read: %s", self._tier, error)
        return Outcome.FAILED

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def holds(self, key: ChunkKey) -> bool:
        """Whether there is an object of this key."""
        return object_path(self._root, key).is_file()

    def write(self, item: PutItem) -> Outcome:
        """Write one object beside the one it replaces, then put it in its place."""
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
        """Fill the view with one object of exactly its length, and note that it was used."""
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
        """Delete one object; one that is not there is no error."""
        try:
            object_path(self._root, key).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn("tier %r cannot delete: %s", self._tier, error)

    def objects(self) -> Iterator[Path]:
        """The objects held. Deletes what interrupted writes have left; says what is not kvtier's."""
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
                "tier %r: %d files in %s are not kvtier's and are left alone, such as %s",
                self._tier,
                len(foreign),
                self._root,
                foreign[0],
            )

    def describe(self, path: Path) -> StoredObject | None:
        """What a file that :meth:`objects` named says of itself; ``None`` where it has gone.

        Also where it cannot be read, with a warning: it is left alone, since the next start may read it.
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
            self._warn("tier %r cannot read and leaves alone: %s", self._tier, error)
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
                raise OSError(errno.EIO, "the file system takes no more bytes", str(path))
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
                        raise self._taken(_read_holder(descriptor)) from error
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

    def _is_writable(self, direct: bool) -> bool:
        """Write one page and delete it; whether O_DIRECT was possible. A full disk is no error."""
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
                        "tier %r: the file system of %s has no O_DIRECT, so that its page cache is used",
                        self._tier,
                        self._root,
                    )
                    return self._is_writable(direct=False)
                if error.errno not in _NO_ROOM:
                    raise
            finally:
                path.unlink(missing_ok=True)
        return direct

    def _unusable(self, error: OSError) -> TierError:
        return TierError(
            f"tier {self._tier!r}: path {self._root} cannot be used ({error.strerror}): make it a folder "
            "that this user may write to, or set the tier's `path` to one"
        )

    def _taken(self, holder: str) -> TierError:
        return TierError(
            f"tier {self._tier!r}: path {self._root} is in use by {holder}: stop that process, or set this "
            "tier's `path` to a folder of its own"
        )


def _object_name(key: ChunkKey) -> str:
    name = key.hex()
    return f"{name[:_PREFIX_DIGITS]}/{name}.kv"


def _key_of(path: Path) -> ChunkKey | None:
    """The key that a file is named by, where it lies where that key's object belongs."""
    match = _OBJECT.fullmatch(path.name)
    if match is None or not path.name.startswith(path.parent.name):
        return None
    return ChunkKey(bytes.fromhex(match[1]))


def _files(root: Path) -> Iterator[Path]:
    """Every file in a folder's prefix folders, and what else there is beside these."""
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if _PREFIX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with os.scandir(entry) as files:
                yield from (Path(file.path) for file in files)
        elif entry.name not in (LOCK_FILE, PROBE_FILE):
            yield Path(entry.path)


def _read_holder(descriptor: int) -> str:
    # Empty for a moment after another process has taken the lock.
    return os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"


def _first_bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Without this the kernel reads on, some hundred kilobytes for each header.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(descriptor, HEADER_BYTES, 0)
    finally:
        os.close(descriptor)


def _is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can move a view. Of one that is read-only ctypes does not tell the address."""
    if len(view) % OBJECT_ALIGNMENT or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) % OBJECT_ALIGNMENT == 0


def _transfer(
    move: Callable[[int, Sequence[memoryview], int], int], descriptor: int, view: memoryview, direct: bool
) -> int:
    """Read or write a whole view; the bytes moved, fewer only where the file ends."""
    moved = 0
    while moved < len(view):
        if direct and moved % OBJECT_ALIGNMENT:
            # A short transfer (the disk is all but full, a signal came) has ended within a page.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            direct = False
        count = move(descriptor, [view[moved:]], moved)
        if count == 0:
            break
        moved += count
    return moved
