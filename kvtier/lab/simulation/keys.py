"""Keys of numbered chunks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

from kvtier import native
from kvtier.memory.keys import KEY_BYTES, TOKEN_BYTES, ChunkKey, split_keys


def chunk_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return the key of each u32 number: its BLAKE3 hash.

    Policies take parts of keys as hashes, and sample by them: the numbers themselves would mislead these.
    """
    if native.available():
        return split_keys(native.core.block_hashes(numbers, 1, KEY_BYTES))
    encoded = array("I", numbers).tobytes()
    starts = range(0, len(encoded), TOKEN_BYTES)
    return [ChunkKey(blake3(encoded[at : at + TOKEN_BYTES]).digest()) for at in starts]
