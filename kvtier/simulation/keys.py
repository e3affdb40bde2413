"""Keys of numbered chunks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from kvtier.memory.keys import BLOCK_HASH_BYTES, KEY_BYTES, ChunkKey, block_hashes, split_keys


def chunk_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return the key of each u32 number: half a digest, and zeros.

    Policies take parts of keys as hashes, and sample by them: the numbers themselves would mislead these.
    """
    digests = block_hashes(array("I", numbers).tobytes(), 1)
    keys = _packer(len(numbers)).pack(*_halves(len(numbers)).unpack(digests))
    return split_keys(keys)


@lru_cache(maxsize=1024)
def _halves(count: int) -> Struct:
    return Struct(f"{BLOCK_HASH_BYTES}s" * count)


@lru_cache(maxsize=1024)
def _packer(count: int) -> Struct:
    return Struct(f"{BLOCK_HASH_BYTES}s{KEY_BYTES - BLOCK_HASH_BYTES}x" * count)
