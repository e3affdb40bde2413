"""Which chunks belong to a sample: those whose keys have a hash below a threshold.

From C. Waldspurger et al., "Efficient MRC construction with SHARDS" (FAST 2015). The hash is not that of
:func:`kvtier.catalog.policies.shadow.sampled`: a policy in a miniature cache takes a sample of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvtier.catalog.policies.shadow import SAMPLED
from kvtier.memory.keys import KEY_BYTES

_HIGH, _LOW = 14, 15
"""The bytes of a key that are its hash. Keys are digests, so any two will do."""


def sampled_positions(joined: bytes, threshold: int) -> list[int]:
    """Return the positions of the sampled keys among joined ones. Takes 1 µs per 300 keys.

    ``threshold``: how many of :data:`SAMPLED` parts the sample has.
    """
    if threshold >= SAMPLED:
        return list(range(len(joined) // KEY_BYTES))
    high = joined[_HIGH::KEY_BYTES]
    marks = high.translate(_marks(-(-threshold >> 8)))
    whole, rest = threshold >> 8, threshold & 0xFF
    positions = []
    at = marks.find(1)
    while at >= 0:
        if high[at] < whole or joined[at * KEY_BYTES + _LOW] < rest:
            positions.append(at)
        at = marks.find(1, at + 1)
    return positions


@lru_cache(maxsize=256)
def _marks(values: int) -> bytes:
    """Return a table that translates the lowest so many values of a byte to 1, others to 0."""
    return bytes(value < values for value in range(256))


def of_smaller_sample(keys: Sequence[bytes], threshold: int) -> list[bool]:
    """Return which keys also belong to the sample of a smaller threshold."""
    return [key[_HIGH] << 8 | key[_LOW] < threshold for key in keys]
