"""Reading recordings."""

from __future__ import annotations

import gzip
import logging
import lzma
import os
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from xxhash import xxh32_intdigest

from kvtier.catalog.hints import ChunkHints
from kvtier.observability.recording.format import (
    FRAME,
    MAGIC,
    MAX_BODY_BYTES,
    NUMBER_BYTES,
    VERSION,
    EndRecord,
    Header,
    Record,
    RecordingError,
    older,
)
from kvtier.settings.observability import MAX_FILES

logger = logging.getLogger("kvtier")

_header_decoder = msgspec.msgpack.Decoder(Header)
_record_decoder: msgspec.msgpack.Decoder[Record | EndRecord] = msgspec.msgpack.Decoder(Record | EndRecord)
CORRUPT = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a corrupt file raises. One that was cut off raises ``EOFError``."""
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a body raises that is of no format."""
ContentT = TypeVar("ContentT")
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\0"


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording. Blocks.

    It may be compressed with gzip or xz. Raises ``OSError`` if it cannot be read.
    """
    with path.open("rb") as raw:
        try:
            return expanded(raw).read(len(MAGIC)) == MAGIC
        except (EOFError, *CORRUPT):
            return False


def read_recording(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a recording, without the ends of their answers. See :func:`read_events`."""
    return (event for event in read_events(path) if isinstance(event, TraceRequest))


def read_events(path: Path) -> Iterator[TraceEvent]:
    """Yield the requests of a recording and the ends of answers, as they happened. Blocks while it reads.

    ``path`` is the file that it was written to; the older files of the same recording, with the suffixes
    ``.1``, ``.2`` and so on, are read first. Any other file of a recording, which may be compressed with gzip
    or xz, is read alone. An incomplete record at the end of a file, whose writer was killed or has not
    finished it, is reported as a warning. Raises :class:`RecordingError`, which names file, record and
    reason, also if a file cannot be read.
    """
    with ExitStack() as stack:
        parts = [_Part(path, stack)]
        seen = {parts[0].inode}
        for number in range(1, MAX_FILES):
            name = older(path, number)
            if not name.is_file() or not is_recording(name):
                break
            part = _Part(name, stack)
            if part.header.id != parts[0].header.id:
                break
            # The writer may have renamed a file that is open here already.
            if part.inode not in seen:
                seen.add(part.inode)
                parts.append(part)
        for part in reversed(parts):
            yield from part.events()


class _Part:
    """One open file of a recording."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open the file until ``stack`` is closed. Raises :class:`RecordingError`."""
        self._path = path
        self._record = 0
        """From 1; 0 in the header."""
        try:
            raw = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from error
        status = os.fstat(raw.fileno())
        self.inode = status.st_dev, status.st_ino
        self._stream = expanded(raw)
        self.header = self._read_header()

    def _read_header(self) -> Header:
        if self._read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{self._path} is not a recording")
        header = self._next(_header_decoder)
        if header is None:
            raise RecordingError(f"{self._path} has no complete header")
        if not 1 <= header.version <= VERSION:
            raise RecordingError(
                f"{self._path} has format {header.version}: this version reads 1 to {VERSION}"
            )
        return header

    def events(self) -> Iterator[TraceEvent]:
        """Yield the rest of the file. Raises :class:`RecordingError`."""
        self._record = 1
        while (record := self._next(_record_decoder)) is not None:
            if isinstance(record, Record):
                yield self._request(record)
            else:
                [chunk] = self._numbers(record.chunk)
                yield TraceAnswerEnd(record.time, chunk, self._numbers(record.signature))
            self._record += 1

    def _request(self, record: Record) -> TraceRequest:
        chunks, whole = self._numbers(record.chunks), record.chunk_tokens
        count = len(chunks)
        if not (count - 1) * whole < record.tokens <= count * whole:
            raise self._error(f"{record.tokens} tokens do not fit {count} chunks of {whole}")
        return TraceRequest(
            time=record.time,
            chunks=chunks,
            tokens=record.tokens,
            chunk_bytes=record.chunk_bytes,
            tenant=record.hints.tenant if record.hints is not None else "",
            hints=record.hints,
        )

    def _numbers(self, encoded: bytes) -> array[int]:
        if len(encoded) % NUMBER_BYTES:
            raise self._error(f"{len(encoded)} bytes are not a whole number of chunks")
        numbers = array("Q", encoded)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _next(self, decoder: msgspec.msgpack.Decoder[ContentT]) -> ContentT | None:
        """Return the content of the next frame; ``None`` at the end, or if it is incomplete."""
        prefix = self._read(FRAME.size)
        if len(prefix) < FRAME.size:
            self._note_incomplete(prefix)
            return None
        length, checksum = FRAME.unpack(prefix)
        if not 0 < length <= MAX_BODY_BYTES:
            raise self._error(f"its length is {length} bytes, of at most {MAX_BODY_BYTES}")
        body = self._read(length)
        if len(body) < length:
            self._note_incomplete(prefix + body)
            return None
        if xxh32_intdigest(body) != checksum:
            raise self._error("its checksum does not match")
        try:
            return decoder.decode(body)
        except MALFORMED as error:
            raise self._error(str(error)) from error

    def _note_incomplete(self, rest: bytes) -> None:
        if rest:
            message = "%s: %s is incomplete: its %d bytes are ignored"
            logger.warning(message, self._path, self._place, len(rest))

    def _read(self, length: int) -> bytes:
        """Return up to ``length`` bytes; fewer at the end, or where a compressed file was cut off."""
        parts = []
        try:
            while length and (part := self._stream.read(length)):
                parts.append(part)
                length -= len(part)
        except EOFError:
            logger.warning("%s: the compressed file was cut off", self._path)
        except (OSError, *CORRUPT) as error:
            raise self._error(str(error)) from error
        return b"".join(parts)

    def _error(self, reason: str) -> RecordingError:
        return RecordingError(f"{self._path}: {self._place}: {reason}")

    @property
    def _place(self) -> str:
        return f"record {self._record}" if self._record else "the header"


def expanded(raw: BinaryIO) -> BinaryIO:
    """Return a stream of what a file contains, decompressed. ``raw`` must be at its start."""
    start = raw.read(len(_XZ))
    raw.seek(0)
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if start == _XZ:
        return lzma.LZMAFile(raw)  # type: ignore[return-value]
    return raw


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One prompt that an engine looked up, computed what was missing of it, and stored."""

    time: float
    """When it arrived, in seconds since the trace began."""
    chunks: Sequence[int]
    """The prompt's chunks from the root. Equal numbers, of up to 64 bits, are chunks with equal KV."""
    tokens: int
    """Length of the prompt. The last chunk may be shorter than the others."""
    output_tokens: int = 0
    """Number of generated tokens; 0 if unknown."""
    chunk_bytes: int = 0
    """Size of a chunk object; 0 if unknown."""
    tenant: str = ""
    hints: ChunkHints | None = None
    seconds: float = 0.0
    """From its arrival to the end of the answer; 0 if unknown, or if a :class:`TraceAnswerEnd` follows."""
    signature: Sequence[int] = ()
    """How the answer ended, see :meth:`kvtier.catalog.eviction.EvictionPolicy.answer_ended`."""


class TraceAnswerEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of the answer to the last request with some last chunk."""

    time: float
    """In seconds since the trace began."""
    chunk: int
    """The last chunk of its prompt."""
    signature: Sequence[int] = ()


TraceEvent = TraceRequest | TraceAnswerEnd
