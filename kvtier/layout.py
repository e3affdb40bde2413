"""How the bytes of a chunk are laid out, and the fingerprint that keeps layouts apart.

A chunk's payload is, for each rank, for each KV-cache group, for each layer, the engine's pages of
the chunk's blocks one after another: opaque bytes, never interpreted. ``[rank][group][layer][block]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from blake3 import blake3

from kvtier.errors import LayoutError


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """One KV-cache group: layers that share a block table.

    ``page_bytes`` are the bytes of one block in one layer on one rank, a number for each layer.
    ``window`` is the attention window in tokens, or 0 for full attention: then only the blocks that
    a query after the chunk can still see are stored.
    """

    block_tokens: int
    page_bytes: tuple[int, ...]
    window: int = 0

    def blocks(self, tokens: int) -> range:
        """Which of the chunk's blocks are stored, by their index in the chunk, for a chunk of ``tokens``."""
        stop = -(-tokens // self.block_tokens)
        first = max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0
        return range(min(first, stop), stop)


class Span(NamedTuple):
    """Where one layer of one chunk lies in the payload: its blocks, one page after another."""

    group: int
    layer: int
    offset: int
    pages: int
    page_bytes: int


class ChunkLayout(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a model's chunks on one kind of machine.

    ``platform`` holds all that decides how the engine arranges bytes inside a block (device, layout
    name, instruction set, dtype): two engines share chunks only where all of it is equal.
    """

    chunk_tokens: int
    groups: tuple[GroupLayout, ...]
    ranks: int = 1
    platform: str = ""

    def __post_init__(self) -> None:
        for group in self.groups:
            if self.chunk_tokens % group.block_tokens:
                raise LayoutError(
                    f"chunk_tokens is {self.chunk_tokens}, which is no multiple of the engine's block size "
                    f"{group.block_tokens}: set chunk_tokens to a multiple of {group.block_tokens}"
                )

    def __str__(self) -> str:
        """What people set that decides it, to tell two layouts apart."""
        blocks = " and ".join(str(tokens) for tokens in sorted({group.block_tokens for group in self.groups}))
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"chunks of {self.chunk_tokens} tokens in blocks of {blocks}, {ranks}, {self.platform or 'any'}"
        )

    def rank_bytes(self, tokens: int) -> int:
        """Payload bytes of one rank's slice of a chunk of ``tokens`` tokens."""
        return sum(len(group.blocks(tokens)) * sum(group.page_bytes) for group in self.groups)

    def payload_bytes(self, tokens: int) -> int:
        """Payload bytes of a chunk of ``tokens`` tokens, all ranks together."""
        return self.ranks * self.rank_bytes(tokens)

    def spans(self, tokens: int, rank: int) -> Iterator[Span]:
        """Where each layer of ``rank`` lies in the payload of a chunk of ``tokens`` tokens."""
        offset = rank * self.rank_bytes(tokens)
        for group_index, group in enumerate(self.groups):
            pages = len(group.blocks(tokens))
            for layer, page_bytes in enumerate(group.page_bytes):
                yield Span(group_index, layer, offset, pages, page_bytes)
                offset += pages * page_bytes

    def fingerprint(self) -> bytes:
        """32 bytes that differ wherever a chunk's bytes would mean something else."""
        return blake3(msgspec.msgpack.encode(self), derive_key_context="kvtier layout v1").digest()


def namespace(model: str, layout: ChunkLayout) -> bytes:
    """32 bytes that keep one model in one layout apart from all others."""
    name = model.encode()
    return blake3(name + layout.fingerprint(), derive_key_context="kvtier namespace v1").digest()
