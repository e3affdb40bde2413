"""Check that kvtier's views of an engine's KV memory mean the same as vLLM's tensors.

The views are computed from vLLM's description of the memory, whose meaning may change with its version, and a
wrong view would load wrong KV. So before the first request, one block of each layer is written through either
side and read through the other one. The block is restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import LayoutError

PATTERN = 0xA5


def probe(
    group: int, layers: Sequence[tuple[str, torch.Tensor]], pages: Sequence[torch.Tensor], blocks: int
) -> None:
    """Check one KV-cache group: the tensors of its layers, and the views ``(blocks, page_bytes)`` of them.

    Raises :class:`LayoutError` with the name of the group and of a layer.
    """
    block = max(0, blocks - 2)
    views = [page[block] for page in pages]
    before = [view.clone() for view in views]
    selected = [(name, _block_of(group, name, tensor, block, blocks)) for name, tensor in layers]
    others = [
        (name, part, part.clone())
        for name, tensor in layers
        for other in (block - 1, block + 1)
        if 0 <= other < blocks
        for part in [_block_of(group, name, tensor, other, blocks)]
    ]
    try:
        for view in views:
            view.fill_(PATTERN)
        for name, part in selected:
            if not bool((_bytes(part) == PATTERN).all()):
                raise _mismatch(group, name, "vLLM reads more from a block than kvtier writes to it")
        for name, part, content in others:
            if not torch.equal(_bytes(part), _bytes(content)):
                raise _mismatch(group, name, "kvtier writes to two blocks at once")
        for _, part in selected:
            part.zero_()
        read = sum(int((view == 0).sum()) for view in views)
        written = sum(part.numel() * part.element_size() for _, part in selected)
        if read != written:
            problem = f"vLLM writes {written} bytes to a block, and kvtier reads {read} of them"
            raise _mismatch(group, selected[0][0], problem)
    finally:
        for view, content in zip(views, before, strict=True):
            view.copy_(content)


def _block_of(group: int, name: str, tensor: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    """Return one block of a layer. A kernel may use smaller blocks, several of which are one of vLLM's."""
    for dimension, size in enumerate(tensor.shape):
        parts, rest = divmod(size, blocks)
        if parts and not rest:
            return tensor.narrow(dimension, block * parts, parts)
    raise _mismatch(group, name, f"its tensor has the shape {tuple(tensor.shape)}, without {blocks} blocks")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _mismatch(group: int, name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the KV memory of group {group} (layer {name}) is not laid out as kvtier expects: {problem}; report "
        "this with the versions of vLLM and kvtier, and serve without --kv-transfer-config"
    )
