"""The chunk files of a disk tier's folder: list, verify and remove them."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import aiofiles
import aiofiles.os
from anyio import to_thread

from kvtier.backends.base import Outcome
from kvtier.backends.disk.folder import ObjectFolder, lock_holder, object_path
from kvtier.backends.disk.scan import LISTED_AT_ONCE, Failed, listed, walk
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import CorruptChunk, IncompleteScan, TierError, UnreadableChunk
from kvtier.memory.header import HEADER_BYTES, IDENTITY, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.tiers.codec import Codec
from kvtier.tiers.encoded_seal import Codecs, Encoder, Layouts, load_keys

if TYPE_CHECKING:
    from kvtier.tiers.encryption import Keys

READERS = 4
"""Chunks that are read and verified at once."""
MAX_FAILURES = 20
"""Failures that are listed."""
Progress = Callable[[float], None]
"""Receives the part that is done, from 0 to 1."""


class ChunkFile(NamedTuple):
    """One chunk object on disk."""

    last_used: float
    """Unix timestamp in seconds."""
    length: int
    path: Path


class Listing(NamedTuple):
    """The content of a folder."""

    holder: str | None
    """The process that uses the folder."""
    chunks: int
    bytes: int
    described: list[dict[str, object]]
    """The most recently used chunks."""


@dataclass
class Failures:
    """Chunks with which something failed."""

    count: int = 0
    first: list[tuple[Path, str]] = field(default_factory=list)
    """At most :data:`MAX_FAILURES` of them, with the reason."""

    def add(self, path: Path, error: Exception) -> None:
        """Count a failure, and remember it if it is one of the first."""
        self.count += 1
        if len(self.first) < MAX_FAILURES:
            self.first.append((path, getattr(error, "strerror", None) or str(error)))


class Verification(NamedTuple):
    """The result of :func:`verify`."""

    chunks: int
    bytes: int
    """Bytes read."""
    corrupt: list[tuple[Path, str]]
    """The corrupt files, with the reason."""
    unreadable: Failures
    """Those that may be valid, but cannot be read, or not with these settings. They are not deleted."""
    encrypted: int
    """Those of which only the checksum was verified."""


async def list_chunks(folder: Path, limit: int, failed: Failed) -> Listing:
    """List the ``limit`` most recently used chunks; with 0, all. ``failed`` receives unreadable folders."""
    chunks = total = 0
    newest: list[ChunkFile] = []
    async for files in _files(folder, failed):
        chunks, total = chunks + len(files), total + sum(file.length for file in files)
        newest += files
        if limit:
            newest = heapq.nlargest(limit, newest)
    holder = await aiofiles.os.wrap(lock_holder)(folder)
    newest.sort(reverse=True)
    names = {codec.code: name for name, codec in Plugins.load([]).all_codecs().items()}
    described = await aiofiles.os.wrap(lambda: [_describe(file, names) for file in newest])()
    return Listing(holder, chunks, total, described)


class Rekeyed(NamedTuple):
    """What was encrypted again."""

    chunks: int
    changed: int
    current: int
    """Encrypted with the first key before."""
    plain: int
    """Not encrypted, and left as they are."""
    first_key: int
    """The number of the first key."""
    failed: Failures


async def verify(
    folder: Path,
    *,
    delete: bool,
    progress: Progress,
    failed: Failed,
    key_file: Path | None = None,
) -> Verification:
    """Read and verify every chunk. ``delete`` removes corrupt ones, and requires a folder that is not in use.

    ``failed`` receives unreadable folders. Without ``key_file``, what is encrypted is not decoded. Raises
    :class:`TierError`.
    """
    keys = None if key_file is None else load_keys(key_file, "--key-file")
    checked = read = encrypted = 0
    unreadable = Failures()
    codecs = {codec.code: codec for codec in Plugins.load().all_codecs().values()}
    corrupt: list[tuple[Path, str]] = []

    async def verify_one(path: Path) -> None:
        nonlocal checked, read, encrypted
        try:
            async with aiofiles.open(path, "rb", buffering=0) as stream:
                content = await stream.readall()
            read += len(content)
            decoded = await to_thread.run_sync(_verify, memoryview(content), _key_of(path), codecs, keys)
            encrypted += not decoded
        except FileNotFoundError:
            # Evicted by a running cache process.
            return
        except (OSError, MemoryError, OverflowError, UnreadableChunk) as error:
            # Not deleted, as its content is unknown.
            unreadable.add(path, error)
        except CorruptChunk as error:
            corrupt.append((path, str(error)))
            if delete:
                with suppress(FileNotFoundError):
                    await aiofiles.os.unlink(path)
        checked += 1

    async with _claimed(folder) if delete else nullcontext():
        await _for_each(listed(walk(folder, failed)), verify_one, progress)
    return Verification(checked, read, sorted(corrupt), unreadable, encrypted)


async def claimed_chunks(folder: Path) -> tuple[list[ChunkFile], str]:
    """Return the chunks of a folder that is not in use, and what could not be listed, or nothing.

    Removes leftovers of interrupted writes.
    """
    unread = ""
    async with _claimed(folder) as claimed:
        found = [file async for paths in claimed.scan.objects() for file in await _status_of_all(paths)]
        try:
            await claimed.scan.check()
        except IncompleteScan as error:
            unread = str(error)
    # Those found are below a descriptor, which is closed now.
    return [file._replace(path=object_path(folder, _key_of(file.path))) for file in found], unread


async def rekey(folder: Path, key_file: Path, progress: Progress, *, plain: bool = False) -> Rekeyed:
    """Encrypt the chunks again that are not encrypted with the first key of a file.

    ``plain``: also those that are not encrypted. The others are decrypted, also with the first key, so that
    none is left that a key of the file does not decrypt. Each file is replaced at once, so a killed process
    leaves the others as they were: run it again. Requires a folder that is not in use. Raises
    :class:`TierError`.
    """
    keys = load_keys(key_file, "--key-file")
    counts, failed = Counter[str](), Failures()

    async def rekey_one(path: Path) -> None:
        counts["all"] += 1
        try:
            # Unlike with aiofiles, a cancelled call waits for its thread, so the folder stays locked.
            counts[await to_thread.run_sync(partial(_rekey_one, claimed, path, keys, plain=plain))] += 1
        except (OSError, CorruptChunk) as error:
            failed.add(object_path(folder, _key_of(path)), error)

    async with _claimed(folder) as claimed:
        await _for_each(claimed.scan.objects(), rekey_one, progress)
        try:
            await claimed.scan.check()
        except IncompleteScan as error:
            failed.add(folder, error)
    return Rekeyed(counts["all"], counts["changed"], counts["current"], counts["plain"], keys.current, failed)


def _rekey_one(
    folder: ObjectFolder, path: Path, keys: Keys, *, plain: bool
) -> Literal["changed", "current", "plain"]:
    with path.open("rb", buffering=0) as file:
        status, head = os.fstat(file.fileno()), file.read(HEADER_BYTES)
        # The header alone tells of many files that there is nothing to do, or nothing that could be done.
        stored = StoredHeader.parse(head)
        if stored.encryption is not None:
            keys.encryption_of(stored)
        elif not plain:
            return "plain"
        # One buffer: with copies of it, most of the time would go into faulting pages in.
        content = memoryview(bytearray(status.st_size))
        content[:HEADER_BYTES] = head
        file.readinto(content[HEADER_BYTES:])
    key = _key_of(path)
    stored = StoredHeader.verify(content, key)
    chunk, codec, length, checksum, encryption = stored
    payload = content[HEADER_BYTES : HEADER_BYTES + length]
    tenant = keys.mark_of("")
    if encryption is not None:
        keys.decrypt(stored, payload, payload)
        if encryption.key_number == keys.current:
            return "current"
        tenant = encryption.tenant
    used = keys.encrypt(chunk, codec, tenant, payload, payload)
    StoredHeader.seal(content, chunk, codec, length, checksum=checksum is not None, encryption=used)
    if folder.write((key, content)) is not Outcome.OK:
        raise OSError("cannot be written: is the disk full?")
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return "changed"


async def remove(folder: Path, files: Sequence[ChunkFile], progress: Callable[[int], None]) -> None:
    """Remove chunks of a folder that is not in use. ``progress`` receives the number of each batch."""
    async with _claimed(folder):
        for start in range(0, len(files), LISTED_AT_ONCE):
            batch = files[start : start + LISTED_AT_ONCE]
            await aiofiles.os.wrap(_unlink_all)(batch)
            progress(len(batch))
        for prefix in {file.path.parent for file in files}:
            with suppress(OSError):
                await aiofiles.os.rmdir(prefix)


@asynccontextmanager
async def _claimed(folder: Path) -> AsyncIterator[ObjectFolder]:
    """Lock the folder. Raises: TierError: names the process that uses it."""
    holder = await aiofiles.os.wrap(lock_holder)(folder)
    if holder is not None:
        raise TierError(f"{folder} is in use by {holder}: stop that process first")
    claimed = await ObjectFolder.open("inspect", folder, direct=False)
    try:
        yield claimed
    finally:
        await claimed.close()


async def _for_each(
    batches: AsyncIterator[list[Path]], run: Callable[[Path], Awaitable[None]], progress: Progress
) -> None:
    """Run something for each file as it is listed, for :data:`READERS` at once."""

    async def run_from_queue() -> None:  # Several at once, from one iterator.
        for path in queue:
            await run(path)
            # Keys are hashes, and listed in order.
            progress(int.from_bytes(_key_of(path)[:2], "big") / (1 << 16))

    async for paths in batches:
        queue = iter(paths)
        async with open_tasks() as tasks:
            for _ in range(READERS):
                tasks.start_soon(run_from_queue)


def _key_of(path: Path) -> ChunkKey:
    return ChunkKey(bytes.fromhex(path.stem))


async def _files(folder: Path, failed: Failed) -> AsyncIterator[list[ChunkFile]]:
    async for paths in listed(walk(folder, failed)):
        yield await _status_of_all(paths)


async def _status_of_all(paths: Sequence[Path]) -> list[ChunkFile]:
    def status_of_all() -> list[ChunkFile]:
        files = []
        for path in paths:
            with suppress(FileNotFoundError):
                status = path.stat()
                files.append(ChunkFile(status.st_mtime, status.st_size, path))
        return files

    return await aiofiles.os.wrap(status_of_all)()


def _unlink_all(files: Sequence[ChunkFile]) -> None:
    for file in files:
        file.path.unlink(missing_ok=True)


def _verify(stored: memoryview, key: ChunkKey, codecs: Mapping[int, Codec], keys: Keys | None) -> bool:
    """Verify a chunk object, and decode it. Return whether it was, which needs keys if it is encrypted.

    Raises :class:`CorruptChunk`.
    """
    header = StoredHeader.verify(stored, key)
    if header.encryption is None:
        keys = None
    elif keys is None:
        return False
    else:
        stored = memoryview(bytearray(stored))  # It is decrypted in its place.
    encoder = Encoder(Codecs(codecs[IDENTITY], codecs), Layouts(), checksum=True, keys=keys)
    target = memoryview(bytearray(object_bytes(header.chunk.payload_bytes)))
    encoder.decode(key, stored, target, hashed=True)
    return True


def _describe(file: ChunkFile, codecs: Mapping[int, str]) -> dict[str, object]:
    facts: dict[str, object] = {
        "key": file.path.stem,
        "bytes": file.length,
        "last_used": datetime.fromtimestamp(file.last_used, UTC).isoformat(timespec="seconds"),
    }
    try:
        with file.path.open("rb") as stream:
            stored = StoredHeader.parse(stream.read(HEADER_BYTES))
    except (CorruptChunk, OSError) as error:
        return {**facts, "problem": str(error)}
    return {
        **facts,
        "payload_bytes": stored.chunk.payload_bytes,
        "codec": codecs.get(stored.codec, f"code {stored.codec}"),
        "encrypted_with": None if stored.encryption is None else stored.encryption.key_number,
        "parent": stored.chunk.parent.hex(),
        "namespace": stored.chunk.namespace.hex(),
    }
