"""Copies of whole pages between the arena and an engine's KV memory: natively, else by torch.

The pages of a chunk lie in its payload as :class:`~kvtier.layout.ChunkLayout` says, rank by rank: for each
group of layers, for each layer, one page a block. Nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier import native
from kvtier.header import HEADER_BYTES
from kvtier.layout import ChunkLayout

if TYPE_CHECKING:
    from kvtier.arena import ArenaMap
    from kvtier.integrations.vllm.metadata import ChunkCopy

Pages = Sequence[Sequence[torch.Tensor]]
"""For each group and each of its layers the engine's memory as bytes, ``(blocks, page_bytes)``."""


class PageCopies(Protocol):
    """Copies the pages of chunks, all of their layers. Called from one thread; does not hold the GIL."""

    def load(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """Copy out of the arena into the engine's memory; a ticket for :meth:`done`.

        Blocks on the host until all is copied. On a device, what is on the engine's stream happens before.
        """

    def save(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """Copy out of the engine's memory into the arena; else like :meth:`load`.

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
    """Where each chunk's pages of this rank begin in the arena, and its blocks."""
    return [
        (chunk.offset + HEADER_BYTES + rank * layout.rank_bytes(chunk.tokens), chunk.blocks)
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

    def load(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.load`."""
        memory = arena.view(0, arena.capacity)
        self._memory.load(memory, placed(self._layout, self._rank, chunks), self._threads)
        return 0

    def save(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        memory = arena.view(0, arena.capacity)
        self._memory.save(memory, placed(self._layout, self._rank, chunks), self._threads)
        return 0


class TorchCopies(Finished):
    """An operator of torch's for each layer of each chunk: on any device that torch can copy from.

    Tuned for none but the host: on a GPU each copy waits for the device.
    """

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pages = pages
        self._null_block = null_block

    def load(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.load`."""
        for pages, blocks, held, kept in self._layers(arena.tensor(), chunks):
            pages.index_copy_(0, blocks.to(pages.device), held[kept].to(pages.device))
        self._wait_for_device()
        return 0

    def save(self, arena: ArenaMap, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        for pages, blocks, held, kept in self._layers(arena.tensor(), chunks):
            if isinstance(kept, slice) and pages.device.type == "cpu":
                torch.index_select(pages, 0, blocks, out=held[kept])
            else:
                held[kept] = pages.index_select(0, blocks.to(pages.device)).to(held.device)
        return 0

    def _wait_for_device(self) -> None:
        if self._pages and self._pages[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _layers(
        self, arena: torch.Tensor, chunks: Sequence[ChunkCopy]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice | torch.Tensor]]:
        """For each layer of each chunk: its pages, the blocks wanted, what is held, and which pages of it."""
        for chunk in chunks:
            wanted = [self._wanted(blocks) for blocks in chunk.blocks]
            for span in self._layout.spans(chunk.tokens, self._rank):
                blocks, kept = wanted[span.group]
                if len(blocks):
                    start = chunk.offset + HEADER_BYTES + span.offset
                    held = arena[start : start + span.pages * span.page_bytes]
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
