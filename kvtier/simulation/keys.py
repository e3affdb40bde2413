"""Keys of numbered chunks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from blake3 import blake3

from kvtier import native
from kvtier.memory.keys import KEY_BYTES, TOKEN_BYTES, ChunkKey


def chunk_keys(numbers: Sequence[int]) -> Sequence[ChunkKey]:
    """Return the key of each u32 number: its BLAKE3 hash.

    Policies take parts of keys as hashes, and sample by them: the numbers themselves would mislead these.
    The native core does not make an object of each key.
    """
    if native.available():
        keys = native.core.KeyList(native.core.block_hashes(numbers, 1, KEY_BYTES))
        return cast("Sequence[ChunkKey]", keys)
    encoded = array("I", numbers).tobytes()
    starts = range(0, len(encoded), TOKEN_BYTES)
    return [ChunkKey(blake3(encoded[at : at + TOKEN_BYTES]).digest()) for at in starts]
