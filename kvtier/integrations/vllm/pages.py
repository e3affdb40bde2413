"""Copies between the engine's pages and memory that chunks lie in. Needs torch, and nothing of vLLM.

Whole pages of opaque bytes, many at a time, by torch operators that release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvtier.layout import ChunkLayout

NULL_BLOCK = 0
"""vLLM's block that belongs to nobody: never read, never written."""

CopyPages = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Pages = Sequence[Sequence[torch.Tensor]]
"""For each group and layer the engine's KV memory, ``(num_blocks, page_bytes)``."""


def copy_slice(
    layout: ChunkLayout,
    tokens: int,
    blocks: Sequence[Sequence[int]],
    memory: torch.Tensor,
    pages: Pages,
    copy_pages: CopyPages,
) -> None:
    """Copy one rank's slice of a chunk, which is at the head of ``memory``, to or from the engine's blocks.

    ``blocks`` has, for each group, one block for each stored page; those that are null are left out.
    """
    wanted = [_wanted(group) for group in blocks]
    for span in layout.spans(tokens, 0):
        chosen, where = wanted[span.group]
        if not len(chosen):
            continue
        held = memory[span.offset : span.offset + span.pages * span.page_bytes]
        copy_pages(pages[span.group][span.layer], chosen, held.view(span.pages, span.page_bytes)[where])


def _wanted(blocks: Sequence[int]) -> tuple[torch.Tensor, slice | torch.Tensor]:
    """The blocks that are not null, and which pages of the chunk they are."""
    if NULL_BLOCK not in blocks:
        return torch.tensor(blocks, dtype=torch.int64), slice(None)
    kept = [page for page, block in enumerate(blocks) if block != NULL_BLOCK]
    first = kept[0] if kept else 0
    if kept == list(range(first, first + len(kept))):
        return torch.tensor([blocks[page] for page in kept], dtype=torch.int64), slice(
            first, first + len(kept)
        )
    return torch.tensor([blocks[page] for page in kept], dtype=torch.int64), torch.tensor(kept)


def into_engine(pages: torch.Tensor, blocks: torch.Tensor, held: torch.Tensor) -> None:
    """From a chunk to the engine."""
    pages.index_copy_(0, blocks.to(pages.device), held.to(pages.device))


def out_of_engine(pages: torch.Tensor, blocks: torch.Tensor, held: torch.Tensor) -> None:
    """From the engine to a chunk."""
    if pages.device.type == "cpu":
        torch.index_select(pages, 0, blocks, out=held)
    else:
        held.copy_(pages.index_select(0, blocks.to(pages.device)))
