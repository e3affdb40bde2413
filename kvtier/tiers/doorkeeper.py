"""Doorkeeper: which keys were seen before, from a bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

from kvtier.catalog.policies.sketch import Sketch
from kvtier.memory.keys import ChunkKey

PARTS = 256
"""Sketches, by the first byte of the key: none of them is so large that aging or growing it takes long."""
MIN_KEYS = 256
"""Keys for which the smallest sketch has room, twice: those since it was aged, and those before."""
_SEEN = 2
"""The count of a key that was seen. Aging halves it, so that it is forgotten the second time."""
_HASH = Struct("<8xQ")


class Doorkeeper:
    """Remembers each key until between one and two times ``keys`` others were seen: see :meth:`seen`.

    The doorkeeper of Einziger, Friedman and Manes, *TinyLFU: a highly efficient cache admission policy*
    (2017), except that keys are forgotten in two steps instead of all at once. Keys are digests, so a part of
    one is as good as a hash. Takes 512 KiB for up to 65,536 keys, and 8 to 16 bytes for each one beyond.
    Takes a key for one that was seen, wrongly, in one of 40 cases at most.
    """

    def __init__(self) -> None:
        self._sketches = [Sketch() for _ in range(PARTS)]
        self._noted = array("I", bytes(4 * PARTS))
        """Keys that were noted in each sketch since it was aged."""

    def seen(self, chunks: Sequence[ChunkKey], keys: int) -> list[bool]:
        """Return which chunks were seen before, and remember all of them. 3 µs for each.

        ``keys``: how many to remember at least.
        """
        sketches, noted, limit = self._sketches, self._noted, max(MIN_KEYS, keys // PARTS)
        seen = []
        for key in chunks:
            part = key[0]
            before = sketches[part].put(_HASH.unpack_from(key)[0], _SEEN)
            seen.append(before > 0)
            if before < _SEEN:
                noted[part] += 1
                if noted[part] == MIN_KEYS:
                    sketches[part].fit(2 * limit)
                if noted[part] >= limit:
                    noted[part] = 0
                    sketches[part].halve()
        return seen

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        return sum(sketch.size_bytes for sketch in self._sketches)
