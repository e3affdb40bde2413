"""Readers of traces: JSON lines in the format of Mooncake or Bailian, compressed or not, and recordings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kvtier.errors import KVTierError
from kvtier.observability.recording.format import MAX_SECONDS, Count, Time
from kvtier.observability.recording.reader import (
    CORRUPT,
    MALFORMED,
    TraceEvent,
    TraceRequest,
    expanded,
    is_recording,
    read_events,
)

MAX_LINE_BYTES = 64 << 20
"""A longer one is not a request. It would be read into memory as a whole."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0, lt=1000 * MAX_SECONDS)]
_ID_BYTES = 8


class _Fields(msgspec.Struct):
    """The fields by which formats differ."""

    hash_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Row(msgspec.Struct, kw_only=True):
    """A request. Other fields, such as ``type`` and ``turn``, are ignored."""

    timestamp: Milliseconds
    input_length: Count
    hash_ids: list[int]
    """Of the prompt's blocks."""
    output_length: Count = 0
    duration: Milliseconds = 0.0
    """From the request to the end of the answer; 0 if unknown."""
    stop: str = ""
    """Why it ended, such as ``tool_use``; empty if unknown."""


class _MooncakeRow(_Row):
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.chat_id is not msgspec.UNSET:  # Its time is in seconds, its blocks are smaller.
            raise ValueError("is in the format of Bailian, line 1 in that of Mooncake")


class _BailianRow(_Row):
    timestamp: Time  # In seconds.
    chat_id: int


def read_trace(
    path: Path, chunk_tokens: int, seconds_per_token: float = 0.0
) -> tuple[Iterator[TraceEvent], bool]:
    """Return the requests of a trace, in whatever format, and whether it is a recording. Blocks.

    A recording has the ends of answers between its requests, other formats have them in these.
    ``chunk_tokens``: the tokens of a chunk, into which the blocks of a trace are folded; a recording has
    chunks. ``seconds_per_token``: of an answer of which only the length is known. Raises
    :class:`KVTierError`, also while the requests are read; it names file, line and reason.
    """
    try:
        recorded = is_recording(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if recorded:
        return read_events(path), True
    try:
        fields = msgspec.json.decode(_first_line(path), type=_Fields)
    except MALFORMED as error:
        raise TraceError(
            f"{path}: line 1: is neither a JSON object nor the beginning of a recording: {error}"
        ) from error
    if fields.hash_ids is msgspec.UNSET:
        raise TraceError(
            f"{path}: line 1: has no hash_ids: known formats are Mooncake, Bailian and recordings of kvtier"
        )
    form = MOONCAKE if fields.chat_id is msgspec.UNSET else BAILIAN
    return _read(path, chunk_tokens, form, seconds_per_token), False


def _read(path: Path, chunk_tokens: int, form: _Format, seconds_per_token: float) -> Iterator[TraceRequest]:
    """Yield the requests. Raises :class:`TraceError`, which names the line."""
    blocks, rest = divmod(chunk_tokens, form.block_tokens)
    if rest or not blocks:
        raise TraceError(
            f"{path}: has blocks of {form.block_tokens} tokens, so a chunk cannot have {chunk_tokens}: "
            f"use a multiple of {form.block_tokens}"
        )
    decoder = msgspec.json.Decoder(form.row)
    for number, line in read_lines(path):
        try:
            row = decoder.decode(line)
            ids = array("Q", row.hash_ids)
        except MALFORMED as error:
            raise TraceError(f"{path}: line {number}: {error}") from error
        except OverflowError as error:
            reason = "hash_ids has an id that is not between 0 and 2^64 - 1"
            raise TraceError(f"{path}: line {number}: {reason}") from error
        if not ids:
            raise TraceError(f"{path}: line {number}: hash_ids is empty: a prompt has at least one block")
        yield TraceRequest(
            time=row.timestamp / form.ticks,
            chunks=form.fold(ids, blocks),
            tokens=row.input_length,
            output_tokens=row.output_length,
            seconds=row.duration / 1000 or row.output_length * seconds_per_token,
            signature=(xxh3_64_intdigest(row.stop.encode()),) if row.stop else (),
        )


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises :class:`TraceError`."""
    number = 0
    try:
        with path.open("rb") as raw, expanded(raw) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}: line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB")
                if not line.isspace():
                    yield number, line
    except EOFError as error:
        raise TraceError(
            f"{path}: after line {number}: the compressed file is truncated: copy it again"
        ) from error
    except CORRUPT as error:
        raise TraceError(f"{path}: after line {number}: the compressed file is corrupt: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank. Raises :class:`TraceError`, also without one."""
    for _, line in read_lines(path):
        return line
    raise TraceError(f"{path}: is empty: a trace has one request a line")


def _fold_prefix_ids(ids: array[int], blocks: int) -> array[int]:
    """Return the id of each chunk, if an id identifies a block and all before it: that of its last block."""
    chunks = ids[blocks - 1 :: blocks]
    if len(ids) % blocks:
        chunks.append(ids[-1])
    return chunks


def _fold_block_ids(ids: array[int], blocks: int) -> array[int]:
    """Return the id of each chunk, if an id identifies a block only: a hash of it and all blocks before."""
    content, step, before = ids.tobytes(), blocks * _ID_BYTES, 0
    chunks = array("Q")
    for start in range(0, len(content), step):
        before = xxh3_64_intdigest(content[start : start + step], before)
        chunks.append(before)
    return chunks


class _Format(NamedTuple):
    """A format of lines of JSON."""

    row: type[_Row]
    block_tokens: int
    ticks: int
    """Of a timestamp, per second."""
    fold: Callable[[array[int], int], array[int]]


MOONCAKE = _Format(_MooncakeRow, 512, 1000, _fold_prefix_ids)
BAILIAN = _Format(_BailianRow, 16, 1, _fold_block_ids)
"""Of Alibaba (Qwen)."""


class TraceError(KVTierError):
    """A trace cannot be read. The message names file, line and reason."""
