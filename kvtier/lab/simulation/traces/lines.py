"""What formats have in common: lines, plain or compressed, and the folding of their blocks into chunks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from kvtier.errors import KVTierError
from kvtier.observability.recording.reader import CORRUPT, expanded

MAX_LINE_BYTES = 64 << 20
"""A longer one is not a request. It would be read into memory as a whole."""

RowT = TypeVar("RowT")
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1 << 48)]
_ID_BYTES = 8


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


def first_line(path: Path) -> bytes:
    """Return the first line that is not blank. Raises :class:`TraceError`, also without one."""
    for _, line in islice(read_lines(path), 1):
        return line
    raise TraceError(f"{path}: is empty: a trace has one request a line")


def decode_lines(path: Path, row: type[RowT]) -> Iterator[tuple[int, RowT]]:
    """Yield each line as a ``row``, with its number. Raises :class:`TraceError`."""
    decoder = msgspec.json.Decoder(row)
    for number, line in read_lines(path):
        try:
            yield number, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{path}: line {number}: {error}") from error


def blocks_per_chunk(path: Path, chunk_tokens: int, block_tokens: int) -> int:
    """Return how many blocks are one chunk. Raises :class:`TraceError` if they do not fit."""
    blocks, rest = divmod(chunk_tokens, block_tokens)
    if rest or not blocks:
        raise TraceError(
            f"{path}: has blocks of {block_tokens} tokens, so a chunk cannot have {chunk_tokens}: "
            f"use a multiple of {block_tokens}"
        )
    return blocks


def packed_ids(path: Path, line: int, ids: Sequence[int]) -> array[int]:
    """Return the ids as a column. Raises :class:`TraceError` without any, or if one is not a u64."""
    if not ids:
        raise TraceError(f"{path}: line {line}: hash_ids is empty: a prompt has at least one block")
    try:
        return array("Q", ids)
    except OverflowError as error:
        raise TraceError(
            f"{path}: line {line}: hash_ids has an id that is not between 0 and 2^64 - 1"
        ) from error


def fold_prefix_ids(ids: array[int], blocks: int) -> array[int]:
    """Return the id of each chunk, if an id identifies a block and all before it: that of its last block."""
    if blocks == 1:
        return ids
    chunks = ids[blocks - 1 :: blocks]
    if len(ids) % blocks:
        chunks.append(ids[-1])
    return chunks


def fold_block_ids(ids: array[int], blocks: int) -> array[int]:
    """Return the id of each chunk, if an id identifies a block only: a hash of it and all blocks before."""
    content, step, before = ids.tobytes(), blocks * _ID_BYTES, 0
    chunks = array("Q")
    for start in range(0, len(content), step):
        before = xxh3_64_intdigest(content[start : start + step], before)
        chunks.append(before)
    return chunks


class TraceError(KVTierError):
    """A trace cannot be read. The message names file, line and reason."""
