"""From the blocks of a trace to chunks, which consist of several blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from kvtier.lab.simulation.traces.errors import TraceError

Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1 << 48)]

_ID_BYTES = 8


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
    """Return the ids as a column. Raises :class:`TraceError` if there is none, or one is not a u64."""
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
