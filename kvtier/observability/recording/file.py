"""Writing and rotating the files of a recording."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.tenants import SALTED, tenant_of_salt
from kvtier.concurrency.files import open_private
from kvtier.errors import SettingsError
from kvtier.memory.keys import KEY_BYTES, TOKEN_BYTES, block_hashes, split_keys
from kvtier.observability.recording.format import (
    ID_BYTES,
    MAGIC,
    VERSION,
    EndRecord,
    Header,
    Record,
    RecordingError,
    encode_frame,
    older,
)
from kvtier.observability.recording.reader import is_recording
from kvtier.settings.observability import MAX_FILES, RecordingSettings

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class LookedUp(NamedTuple):
    """A lookup before it is encoded."""

    time: float
    """In seconds since the recording began."""
    keys: bytes
    """The joined keys of its chunks."""
    tokens: int
    chunk_tokens: int
    chunk_bytes: int
    hints: ChunkHints | None


class Pseudonyms:
    """Numbers for keys and names for salts, which reveal nothing without a secret that is never written.

    Keys are hashes of tokens: with them, a reader of the file could test whether a known prompt was asked.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """``tenants``: the name of the configured tenant by each name that requests use for it."""
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._tenants = tenants

    def of(self, keys: bytes) -> bytes:
        """Return the numbers of joined keys: the first 64 bits of BLAKE3 hashes of the secret and each key.

        Takes 0.1 µs per chunk (1 µs without the native core).
        """
        joined = self._secret + self._secret.join(split_keys(keys)) if keys else b""
        hashes = array("Q", block_hashes(joined, 2 * KEY_BYTES // TOKEN_BYTES))
        return hashes[::2].tobytes()

    def name(self, tenant: str) -> str:
        """Return the configured name of a tenant. Others that are derived from a salt are replaced."""
        if tenant in self._tenants or not tenant.startswith(SALTED):
            return self._tenants.get(tenant, tenant)
        return tenant_of_salt(f"{self._secret.hex()} {tenant}")


class RecordingFile:
    """The file that a recording is written to, and the older ones. Blocks, and is used by a thread at a time.

    It is locked while it is open.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, tenants: Mapping[str, str]) -> None:
        self.path = path
        self.problem = ""
        """Why it could not be begun, although there is nothing wrong with the path."""
        self.too_long = 0
        """Number of lookups that were longer than a record may be."""
        self._max_bytes = max_bytes
        self._files = files
        self._pseudonyms = Pseudonyms(tenants)
        self._header = Header(VERSION, secrets.token_bytes(ID_BYTES), time.time())
        self._descriptor = -1
        self._bytes = 0

    @classmethod
    def open(cls, settings: RecordingSettings, tenants: Mapping[str, str] | None = None) -> RecordingFile:
        """Begin a recording. Rotate those of earlier processes, whose chunks have other numbers.

        Raises :class:`SettingsError` if ``recording.path`` is not set, cannot be written or is something
        else, which is never overwritten. A full or failing disk is a :attr:`problem`: a restart must not fail
        because of what only stopped the recording before.
        """
        if settings.path is None:
            raise SettingsError("recording.path is not set: set it to a file")
        file = cls(settings.path, settings.max_bytes, settings.files, tenants or {})
        try:
            file._begin()
        except (OSError, RecordingError) as error:
            file.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                file.problem = reason
                return file
            raise SettingsError(
                f"recording.path: cannot record to {settings.path} ({reason}): use another path"
            ) from error
        return file

    def end(self, time: float, key: bytes, signature: Sequence[int]) -> EndRecord:
        """Return what to write of the end of an answer. In any thread. ``key``: the last of its prompt."""
        # Whatever its hashes are made of, they become numbers that only this recording has.
        hashes = b"".join(value.to_bytes(KEY_BYTES, "little") for value in signature)
        return EndRecord(time, self._pseudonyms.of(key), self._pseudonyms.of(hashes))

    def write(self, batch: Sequence[LookedUp | EndRecord]) -> None:
        """Write lookups and ends. Raises ``OSError`` and :class:`RecordingError`, and leaves all whole."""
        frames = bytearray()
        for seen in batch:
            frame = self._encode(seen)
            if frame is None:
                self.too_long += 1
                continue
            if self._bytes + len(frames) + len(frame) > self._max_bytes:
                self._append(frames)
                frames.clear()
                self._rotate()
                self._begin()
            frames += frame
        self._append(frames)

    def _encode(self, seen: LookedUp | EndRecord) -> bytes | None:
        if isinstance(seen, EndRecord):
            return encode_frame(seen)
        chunks, hints = self._pseudonyms.of(seen.keys), seen.hints
        if hints is not None and hints.tenant:
            hints = replace(hints, tenant=self._pseudonyms.name(hints.tenant))
        return encode_frame(
            Record(seen.time, seen.tokens, seen.chunk_tokens, seen.chunk_bytes, chunks, hints)
        )

    def close(self) -> None:
        """Close and unlock the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self) -> None:
        """Open the file for a new recording, or the next part of this one, and write its header."""
        frame = encode_frame(self._header)
        assert frame is not None
        header = MAGIC + frame
        self._open()
        if self._bytes > len(header) or not self._is_unused():
            self._rotate()
            self._open()
        # The process was killed before the first record: the file has only the beginning of a recording.
        os.ftruncate(self._descriptor, 0)
        self._bytes = 0
        os.fchmod(self._descriptor, 0o600)
        self._append(header)

    def _is_unused(self) -> bool:
        """Whether the file has no record, but at most the beginning of a recording."""
        return MAGIC.startswith(begun := self.path.read_bytes()) or begun.startswith(MAGIC)

    def _open(self) -> None:
        # With O_NONBLOCK, the open of a pipe fails instead of waiting for a reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = open_private(str(self.path), flags)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError("the path is not a file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordingError("another process records to it") from error
        self._bytes = status.st_size

    def _rotate(self) -> None:
        """Close the file and rename it to the suffix ``.1``, and each older one to the next suffix."""
        self.close()
        every = [self.path, *(older(self.path, number) for number in range(1, MAX_FILES))]
        names, surplus = every[: self._files], every[self._files :]
        for name in names:
            if name.exists() and not is_recording(name):
                raise RecordingError(f"{name} exists and is not a recording")
        for name in surplus:  # There were more files before.
            if name.is_file() and is_recording(name):
                name.unlink()
        names[-1].unlink(missing_ok=True)
        for name, next_name in zip(reversed(names[:-1]), reversed(names[1:]), strict=True):
            with suppress(FileNotFoundError):
                name.rename(next_name)

    def _append(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # A part of a record would make those after it unreadable.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._bytes)
            raise
        finally:
            rest.release()
        self._bytes += len(data)
