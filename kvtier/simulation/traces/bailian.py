"""Traces in the format of Alibaba Bailian (Qwen): JSON lines with the ids of blocks of 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic

import msgspec

from kvtier.recording.request import TraceRequest
from kvtier.simulation.traces.blocks import Time, Tokens, blocks_per_chunk, fold_block_ids
from kvtier.simulation.traces.rows import IdsT, decode_rows

BLOCK_TOKENS = 16


class _Row(msgspec.Struct, Generic[IdsT], gc=False):
    """Other fields, such as ``type`` and ``turn``, are ignored."""

    chat_id: int
    timestamp: Time
    """In seconds."""
    input_length: Tokens
    hash_ids: IdsT
    """Each id stands for the tokens of a block, whatever comes before it."""
    output_length: Tokens = 0


def read_bailian(path: Path, chunk_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests. Raises :class:`TraceError`, which names the line."""
    blocks = blocks_per_chunk(path, chunk_tokens, BLOCK_TOKENS)
    for row, ids in decode_rows(path, _Row[msgspec.Raw], _Row[list[int]]):
        yield TraceRequest(
            time=row.timestamp,
            chunks=fold_block_ids(ids, blocks),
            tokens=row.input_length,
            output_tokens=row.output_length,
        )
