"""List the objects of a disk tier's folder, and go on after what cannot be read.

What cannot be listed or deleted takes room nevertheless. Keys are hashes, so the folders of all prefixes
hold about as much, and one that cannot be listed counts as the fullest of the others.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import aiofiles.os

from kvtier.backends.base import StoredObject
from kvtier.errors import IncompleteScan
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey
from kvtier.units import format_size

logger = logging.getLogger("kvtier")

LOCK_FILE = ".lock"
PROBE_FILE = ".probe"
PREFIX_DIGITS = 3
"""The first digits of a key name the folder of its object."""
LISTED_AT_ONCE = 1024
"""Files listed in one call into a worker thread."""

_PREFIX = re.compile(rf"[0-9a-f]{{{PREFIX_DIGITS}}}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+-[0-9]+\.tmp")

Failed = Callable[[Path, OSError], None]
"""Receives each folder that cannot be listed, wholly or in part, and why."""

EntryT = TypeVar("EntryT")


def _raise(folder: Path, error: OSError) -> None:
    raise error


def walk(root: Path, failed: Failed = _raise) -> Iterator[Path]:
    """Return the objects in a folder, ordered by the first digits of their keys. Blocks."""
    return (path for path, key in _files(root, failed) if key is not None)


async def listed(files: Iterator[EntryT]) -> AsyncIterator[list[EntryT]]:
    """Yield files of :func:`walk` in batches, each with one call into a worker thread."""
    take = aiofiles.os.wrap(lambda: list(itertools.islice(files, LISTED_AT_ONCE)))
    while batch := await take():
        yield batch


class _Unread(NamedTuple):
    """A folder or an object that could not be read or deleted."""

    error: OSError
    length: int | None
    """Bytes of the object; ``None`` for a folder."""


Kept: TypeAlias = dict[Path, _Unread]
"""What could not be deleted, by path."""


class FolderScan:
    """Lists a folder once, and then again what could not be read."""

    def __init__(self, tier: str, root: Path, opened: Path, token: str) -> None:
        """``opened``: a short path to this folder, and no other. ``token``: in names of temporary files."""
        self._tier = tier
        self._root = root
        self._opened = opened
        self._token = token
        self._unread: dict[Path, _Unread] = {}
        self._reading: dict[Path, _Unread] = {}
        """What the scan that runs reads again. Counts until it has ended."""
        self._lengths: Counter[str] = Counter()
        """Bytes of the objects that were read, by prefix."""
        self._is_first = True

    async def objects(self) -> AsyncIterator[list[Path]]:
        """Yield the objects in batches. Deletes the files of interrupted writes and logs foreign files."""
        foreign: list[Path] = []
        async for entries in listed(self._again()):
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
        self._reading.clear()
        if foreign:
            logger.warning(
                "tier %r: ignoring %d files in %s that do not belong to kvtier, such as %s",
                self._tier,
                len(foreign),
                self._root,
                self._named(foreign[0]),
            )

    def describe(self, path: Path) -> StoredObject | None:
        """Return an object of :meth:`objects`; ``None`` if it was deleted, or cannot be read. Blocks."""
        length = None
        try:
            status = path.stat()
            length = status.st_size
            head = _first_bytes(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._unread[path.parent if length is None else path] = _Unread(error, length)
            return None
        return StoredObject(ChunkKey(bytes.fromhex(path.stem)), length, status.st_mtime, head)

    def count(self, objects: Sequence[StoredObject]) -> None:
        """Count objects that were read."""
        for stored in objects:
            self._lengths[stored.key.hex()[:PREFIX_DIGITS]] += stored.length

    def kept(self, path: Path, error: OSError) -> Kept:
        """Return what of an object could not be deleted, for :meth:`keep`. Blocks."""
        try:
            status = path.lstat()
        except OSError as reason:
            return {path.parent: _Unread(reason, None)}
        return {path: _Unread(error, status.st_size)} if stat.S_ISREG(status.st_mode) else {}

    async def keep(self, objects: Sequence[Kept]) -> None:
        """Count what could not be deleted until it is listed again. Raises :class:`IncompleteScan`."""
        if any(objects):
            for kept in objects:
                self._unread.update(kept)
            await self.check()

    async def check(self) -> None:
        """Raise :class:`IncompleteScan` if something could not be read or deleted."""
        kept = self._reading | self._unread
        if not kept:
            return
        path, first = next(iter(kept.items()))
        folders = sum(unread.length is None for unread in kept.values())
        length = sum(unread.length or 0 for unread in kept.values())
        if folders and self._lengths:
            length += folders * max(self._lengths.values())
        elif folders:  # Nothing to compare with: at most all that is on the disk.
            length += await _used_bytes(self._opened)
        raise IncompleteScan(
            f"{folders} folders and {len(kept) - folders} files in {self._root} cannot be read or "
            f"deleted, such as {self._named(path)} ({first.error.strerror}): "
            f"{format_size(length)} there count as used",
            length,
        )

    def _named(self, path: Path) -> Path:
        """Return a path as the settings name it."""
        return self._root / path.relative_to(self._opened)

    def _again(self) -> Iterator[tuple[Path, ChunkKey | None]]:
        """Return what to list: everything, and later only where something could not be read."""
        self._reading, self._unread = self._reading | self._unread, {}
        folders = sorted(
            {path if length is None else path.parent for path, (_, length) in self._reading.items()}
        )
        if self._is_first or self._opened in folders:
            self._is_first = False
            self._lengths.clear()
            return _files(self._opened, self._fail)
        for folder in folders:
            del self._lengths[folder.name]
        return itertools.chain.from_iterable(_files_in(folder, self._fail) for folder in folders)

    def _fail(self, folder: Path, error: OSError) -> None:
        self._unread[folder] = _Unread(error, None)


def _files(root: Path, failed: Failed) -> Iterator[tuple[Path, ChunkKey | None]]:
    """Yield every file in the prefix folders with its key, and every other entry of the root."""
    for entry in _entries(root, failed):
        try:
            is_prefix = _PREFIX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        except OSError as error:
            failed(Path(entry.path), error)
            continue
        if is_prefix:
            yield from _files_in(Path(entry.path), failed)
        elif entry.name not in (LOCK_FILE, PROBE_FILE):
            yield Path(entry.path), None


def _files_in(folder: Path, failed: Failed) -> Iterator[tuple[Path, ChunkKey | None]]:
    """Yield every file in a prefix folder with its key; ``None`` if it is no object."""
    for entry in _entries(folder, failed):
        try:
            yield Path(entry.path), _key_of(entry, folder.name)
        except OSError as error:
            failed(folder, error)


def _entries(folder: Path, failed: Failed) -> list[os.DirEntry[str]]:
    """Return what is in a folder, by name, up to an error."""
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            found.extend(entries)
    except OSError as error:
        failed(folder, error)
    return sorted(found, key=lambda entry: entry.name)


def _key_of(entry: os.DirEntry[str], prefix: str) -> ChunkKey | None:
    """Return the key of an object file; ``None`` if it is not one, or in the wrong prefix folder.

    Only files are objects: no folder, no link, and no pipe or device, which to open might block forever.
    """
    match = _OBJECT.fullmatch(entry.name)
    if match is None or not entry.name.startswith(prefix) or not entry.is_file(follow_symlinks=False):
        return None
    return ChunkKey(bytes.fromhex(match[1]))


async def _used_bytes(root: Path) -> int:
    """Return the bytes in use in the file system; 0 if unknown."""
    try:
        status = await aiofiles.os.statvfs(root)
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _first_bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Disables readahead, which would read about a hundred kilobytes per header.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(descriptor, HEADER_BYTES, 0)
    finally:
        os.close(descriptor)
