"""One request of a trace: what a cache saw of it, without its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.catalog.hints import ChunkHints


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
