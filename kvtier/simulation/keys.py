"""Keys of numbered chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from kvtier.memory.keys import KEY_BYTES, ChunkKey, split_keys

NUMBER_BYTES = 4


def chunk_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return the key of each u32 number: its bytes, the lowest first, and zeros.

    The catalog divides chunks by the first byte of their keys, which is thus the one that varies most.
    """
    return split_keys(_packer(len(numbers)).pack(*numbers))


@lru_cache(maxsize=1024)
def _packer(count: int) -> Struct:
    return Struct("<" + f"I{KEY_BYTES - NUMBER_BYTES}x" * count)
