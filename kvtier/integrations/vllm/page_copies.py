"""Choice of the implementation that copies pages."""

from __future__ import annotations

import logging

from kvtier import native
from kvtier.integrations.vllm.copies import NativeCopies, PageCopies, Pages, TorchCopies
from kvtier.memory.layout import ChunkLayout

logger = logging.getLogger("vllm.kvtier")


def page_copies(layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> PageCopies:
    """Return the fastest implementation for these pages. ``null_block`` is never read and never written."""
    devices = {layer.device.type for group in pages for layer in group}
    if devices == {"cuda"} and not native.cuda_problem():
        from kvtier.integrations.vllm.cuda_copies import CudaCopies

        try:
            return CudaCopies(layout, rank, pages, null_block)
        except native.cuda.CudaError as error:
            logger.warning("cannot use kvtier's own copies on the GPU, using slower ones of torch: %s", error)
    if devices <= {"cpu"} and native.available():
        return NativeCopies(layout, rank, pages, null_block)
    return TorchCopies(layout, rank, pages, null_block)
