"""Waits until an arena is registered with CUDA, which an engine never does."""

from __future__ import annotations

from kvtier.integrations.vllm.copies import CudaCopies
from kvtier.memory.arena import ArenaMap


def pin(copies: CudaCopies, arena: ArenaMap) -> bool:
    """Block until registering the arena has ended; return whether it succeeded."""
    copies._pinned(arena)
    pinning = copies._pinning
    assert pinning is not None
    pinning._ended.wait()
    return pinning.memory is not None
