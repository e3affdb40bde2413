"""Copies of whole pages between an engine's KV memory and the arena, or a staging buffer.

Natively, else by torch.

The pages of a chunk lie in its payload as :class:`~kvtier.layout.ChunkLayout` says, rank by rank: for each
group of layers, for each layer, one page a block. In a staging buffer lie the slices of one rank alone, and
no header. Nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier import native
from kvtier.arena import ArenaMap
from kvtier.header import HEADER_BYTES
from kvtier.layout import ChunkLayout

NULL_BLOCK = 0
"""vLLM's block that belongs to nobody: never read, never written."""


@dataclass(slots=True)
class ChunkCopy:
    """One chunk between arena, or staging buffer, and KV memory.

    ``offset`` is where the chunk object begins in the arena or, with ``staging``, the number of a buffer,
    where each rank's slice begins there. ``blocks`` has, for each KV-cache group, one block for each stored
    page; :data:`NULL_BLOCK` for pages that are not to be loaded.
    """

    lease: int
    offset: int
    tokens: int
    blocks: tuple[list[int], ...]
    staging: int = 0


Pages = Sequence[Sequence[torch.Tensor]]
"""For each group and each of its layers the engine's memory as bytes, ``(blocks, page_bytes)``."""


class Memory(Protocol):
    """What chunks lie in: the arena, or a staging buffer, which may be a device's."""

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes."""


class PageCopies(Protocol):
    """Copies the pages of chunks, all of their layers. Called from one thread; does not hold the GIL.

    All chunks of one call lie in one memory.
    """

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """Copy out of the arena, or a staging buffer, into the engine's memory; a ticket for :meth:`done`.

        Blocks on the host until all is copied. On a device, what is on the engine's stream happens before.
        """

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """Copy out of the engine's memory into the arena, or a staging buffer; else like :meth:`load`.

        On a device, what is put on the engine's stream afterwards waits for it, so that no page changes.
        """

    def done(self, ticket: int) -> bool:
        """Whether all of it is copied. Does not block."""

    def wait(self, ticket: int) -> None:
        """Block until all of it is copied."""

    def close(self) -> None:
        """Wait for what is under way and let go of the arena."""


class Finished:
    """What is copied when the call returns needs no waiting for."""

    def done(self, ticket: int) -> bool:
        """See :meth:`PageCopies.done`."""
        return True

    def wait(self, ticket: int) -> None:
        """See :meth:`PageCopies.wait`."""

    def close(self) -> None:
        """See :meth:`PageCopies.close`."""


def page_copies(layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> PageCopies:
    """The fastest way to copy these pages. ``null_block`` is nobody's: never read, never written."""
    devices = {layer.device.type for group in pages for layer in group}
    if devices == {"cuda"} and not native.cuda_problem():
        from kvtier.integrations.vllm.cuda_copies import CudaCopies

        return CudaCopies(layout, rank, pages, null_block)
    if devices <= {"cpu"} and native.available():
        return NativeCopies(layout, rank, pages, null_block)
    return TorchCopies(layout, rank, pages, null_block)


def regions(pages: Pages) -> list[list[tuple[int, int, int]]]:
    """For each group and layer its address, the bytes of a page, and the number of pages."""
    return [[(layer.data_ptr(), layer.shape[1], layer.shape[0]) for layer in group] for group in pages]


def placed(
    layout: ChunkLayout, rank: int, chunks: Sequence[ChunkCopy]
) -> list[tuple[int, Sequence[Sequence[int]]]]:
    """Where each chunk's pages of this rank begin, and its blocks."""
    # Asked once for each length: most chunks are equally long, and a model may have a hundred layers.
    before = {tokens: rank * layout.rank_bytes(tokens) for tokens in {chunk.tokens for chunk in chunks}}
    return [
        (chunk.offset if chunk.staging else chunk.offset + HEADER_BYTES + before[chunk.tokens], chunk.blocks)
        for chunk in chunks
    ]


class NativeCopies(Finished):
    """One native call for all chunks and layers, on at most ``threads`` threads, or as many as are of use."""

    def __init__(
        self, layout: ChunkLayout, rank: int, pages: Pages, null_block: int, *, threads: int = 0
    ) -> None:
        self._layout = layout
        self._threads = threads
        self._rank = rank
        self._pages = pages  # Holds the memory that is known below by its address alone.
        self._memory = native.core.KvMemory(regions(pages), null_block)

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.load`."""
        wanted = placed(self._layout, self._rank, chunks)
        self._memory.load(_bytes_of(memory), wanted, self._threads)
        return 0

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        wanted = placed(self._layout, self._rank, chunks)
        self._memory.save(_bytes_of(memory), wanted, self._threads)
        return 0


def _bytes_of(memory: Memory) -> memoryview:
    assert isinstance(memory, ArenaMap), "an engine whose KV is in the host's memory has no other"
    return memory.view(0, memory.capacity)


class TorchCopies(Finished):
    """An operator of torch's for each layer of each chunk: on any device that torch can copy from.

    Tuned for none but the host: on a GPU each copy waits for the device.
    """

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pages = pages
        self._null_block = null_block

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.load`."""
        for pages, blocks, held, kept in self._layers(memory.tensor(), chunks):
            pages.index_copy_(0, blocks.to(pages.device), held[kept].to(pages.device))
        self._wait_for_device()
        return 0

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        for pages, blocks, held, kept in self._layers(memory.tensor(), chunks):
            if isinstance(kept, slice) and pages.device.type == "cpu":
                torch.index_select(pages, 0, blocks, out=held[kept])
            else:
                held[kept] = pages.index_select(0, blocks.to(pages.device)).to(held.device)
        self._wait_for_device()
        return 0

    def _wait_for_device(self) -> None:
        if self._pages and self._pages[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _layers(
        self, memory: torch.Tensor, chunks: Sequence[ChunkCopy]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice | torch.Tensor]]:
        """For each layer of each chunk: its pages, the blocks wanted, what is held, and which pages of it."""
        for chunk in chunks:
            wanted = [self._wanted(blocks) for blocks in chunk.blocks]
            [(first, _)] = placed(self._layout, self._rank, [chunk])
            for span in self._layout.spans(chunk.tokens, 0):
                blocks, kept = wanted[span.group]
                if len(blocks):
                    start = first + span.offset
                    held = memory[start : start + span.pages * span.page_bytes]
                    yield (
                        self._pages[span.group][span.layer],
                        blocks,
                        held.view(span.pages, span.page_bytes),
                        kept,
                    )

    def _wanted(self, blocks: Sequence[int]) -> tuple[torch.Tensor, slice | torch.Tensor]:
        """The blocks that are not null, and which pages of the chunk they are."""
        if self._null_block not in blocks:
            return torch.tensor(blocks, dtype=torch.int64), slice(None)
        kept = [page for page, block in enumerate(blocks) if block != self._null_block]
        wanted = torch.tensor([blocks[page] for page in kept], dtype=torch.int64)
        first = kept[0] if kept else 0
        if kept == list(range(first, first + len(kept))):
            return wanted, slice(first, first + len(kept))
        return wanted, torch.tensor(kept)
