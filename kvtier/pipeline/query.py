"""What a lookup asks for. The bridge sends it from engines to the cache process; nothing here moves data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.partial_matches import PromptTags
from kvtier.memory.keys import ChunkKey


class Query(msgspec.Struct, frozen=True):
    """One lookup of one prompt. A struct, as a frozen dataclass takes a microsecond more to create."""

    keys: Sequence[ChunkKey]
    """The prompt's chunks, in prefix order."""
    tokens: int = 0
    """Tokens of all chunks together. Without, they do not count for the hit rate."""
    hints: ChunkHints | None = None
    """Replaces the hints of the chunks that are found."""
    block_tags: PromptTags | None = None
    """With them, a chunk that only begins like the next one of the prompt may be added at the end."""
    compute_seconds: float = 0.0
    """How long the engine would compute the prompt. With it, only what arrives earlier is found."""
    expect_seconds: float = 0.0
    """How long chunks that a peer pushes here count as in flight."""
    expect_chunks: int = 0
    """That many leading chunks at most: no later one is pushed."""
    local: bool = False
    """Whether only tiers that belong to this host count: the lookup is that of a peer."""
    repeated: bool = False
    """Whether the request has looked up its prompt before: it still waits, or was preempted."""
    counted: int | None = None
    """If it looks for what this host has got since another lookup: the tokens that count as hits already."""
    canary: str = ""
    """For a canary, whose lookups do not count: the tier to read from, so that others above it do not hide
    that it does not serve what it holds."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Metadata of a prompt's chunks, needed to fetch those that are not in the catalog yet."""

    namespace: bytes
    lengths: Sequence[int]
    """Bytes of each chunk object, in the order of the keys."""
    parents: Sequence[ChunkKey] | None = None
    """The parent of each, if it is not the one before."""
