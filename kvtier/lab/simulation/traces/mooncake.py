"""Traces in the format of Mooncake: JSON lines with the ids of blocks of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.lab.simulation.traces.lines import (
    Time,
    Tokens,
    TraceError,
    blocks_per_chunk,
    decode_lines,
    fold_prefix_ids,
    packed_ids,
)
from kvtier.observability.recording.reader import TraceRequest

BLOCK_TOKENS = 512


class _Row(msgspec.Struct):
    """Other fields are ignored."""

    timestamp: Time
    """In milliseconds."""
    input_length: Tokens
    hash_ids: list[int]
    """Each id stands for a block and all blocks before it."""
    output_length: Tokens = 0
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Only a row of Bailian has it. Its time is in seconds, its blocks are smaller."""


def read_mooncake(path: Path, chunk_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests. Raises :class:`TraceError`, which names the line."""
    blocks = blocks_per_chunk(path, chunk_tokens, BLOCK_TOKENS)
    for number, row in decode_lines(path, _Row):
        if row.chat_id is not msgspec.UNSET:
            raise TraceError(
                f"{path}: line {number}: is in the format of Bailian, line 1 in that of Mooncake"
            )
        yield TraceRequest(
            time=row.timestamp / 1000,
            chunks=fold_prefix_ids(packed_ids(path, number, row.hash_ids), blocks),
            tokens=row.input_length,
            output_tokens=row.output_length,
        )
