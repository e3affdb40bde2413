"""Traces in the format of Alibaba Bailian (Qwen): JSON lines with the ids of blocks of 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.lab.simulation.traces.lines import (
    Time,
    Tokens,
    blocks_per_chunk,
    decode_lines,
    fold_block_ids,
    packed_ids,
)
from kvtier.observability.recording.reader import TraceRequest

BLOCK_TOKENS = 16


class _Row(msgspec.Struct):
    """Other fields, such as ``type`` and ``turn``, are ignored."""

    chat_id: int
    timestamp: Time
    """In seconds."""
    input_length: Tokens
    hash_ids: list[int]
    """Each id stands for the tokens of a block, whatever comes before it."""
    output_length: Tokens = 0


def read_bailian(path: Path, chunk_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests. Raises :class:`TraceError`, which names the line."""
    blocks = blocks_per_chunk(path, chunk_tokens, BLOCK_TOKENS)
    for number, row in decode_lines(path, _Row):
        yield TraceRequest(
            time=row.timestamp,
            chunks=fold_block_ids(packed_ids(path, number, row.hash_ids), blocks),
            tokens=row.input_length,
            output_tokens=row.output_length,
        )
