"""Samples of chunks: those whose keys have a hash below a threshold.

From C. Waldspurger et al., "Efficient MRC construction with SHARDS" (FAST 2015): a cache with 1/n of the
capacity keeps the same part of 1/n of the keys. The sampled chunks of a prompt form a chain, so that policies
see a shorter prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress

from kvtier import native
from kvtier.catalog.eviction import ChunkColumns
from kvtier.memory.keys import KEY_BYTES

SAMPLED = 0x10000
"""The threshold of a sample of all keys. With a threshold of n, it has n / SAMPLED of them."""


class KeySample:
    """Samples by two bytes of the keys, of which each includes all with a smaller threshold."""

    def __init__(self, at: int) -> None:
        """``at``: where these bytes are in a key. Keys are digests, so any two will do."""
        self._at = at

    def of(self, keys: Sequence[bytes], threshold: int) -> list[bool]:
        """Return which keys belong to the sample."""
        high, low = self._at, self._at + 1
        return [key[high] << 8 | key[low] < threshold for key in keys]

    def positions(self, joined: bytes, threshold: int) -> list[int]:
        """Return the positions of the sampled keys among joined ones. Takes 1 µs per 300 keys."""
        if threshold >= SAMPLED:
            return list(range(len(joined) // KEY_BYTES))
        high = joined[self._at :: KEY_BYTES]
        candidates = high.translate(_lowest(-(-threshold >> 8)))
        whole, rest = threshold >> 8, threshold & 0xFF
        positions = []
        at = candidates.find(1)
        while at >= 0:
            if high[at] < whole or joined[at * KEY_BYTES + self._at + 1] < rest:
                positions.append(at)
            at = candidates.find(1, at + 1)
        return positions


POLICY_SAMPLE = KeySample(1)
"""That of the shadow caches of ``adaptive``. The native core uses the same bytes."""
ESTIMATE_SAMPLE = KeySample(14)
"""That of estimates. It differs, because a policy in a miniature cache takes a sample of this sample."""


def sampled_rows(chunks: ChunkColumns, rows: Sequence[int], threshold: int) -> list[int]:
    """Return those of the rows whose chunks belong to :data:`POLICY_SAMPLE`."""
    if native.available():
        return native.core.sampled_rows(chunks.keys, rows, threshold)
    return list(compress(rows, POLICY_SAMPLE.of(chunks.keys_of(rows), threshold)))


@lru_cache(maxsize=256)
def _lowest(count: int) -> bytes:
    """Return a table that translates the lowest ``count`` values of a byte to 1, others to 0."""
    return bytes(value < count for value in range(256))
