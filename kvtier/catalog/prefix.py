"""The held prefix of a prompt, found in the catalog's columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from operator import getitem, itemgetter

from kvtier.memory.keys import KEY_BYTES, ChunkKey

MAX_TIERS = 8
"""One bit per tier in a byte."""
FASTEST = [(mask & -mask).bit_length() - 1 for mask in range(1 << MAX_TIERS)]
"""The lowest tier number in a bit mask of tiers; -1 for an empty mask."""
NO_TIER = 255

_SHORT_RUN = 8
"""Looking up fewer chunks than this, one by one, takes no longer than finding out that they are in a row."""
_MAX_SHORT_RUNS = 8
"""After so many short runs, all other chunks are looked up one by one."""
_FIRST_BYTE = itemgetter(0)


def held_prefix(
    keys: Sequence[ChunkKey],
    rows_by_key: list[dict[ChunkKey, int]],
    column: bytearray,
    ready: bytearray,
    among: int,
) -> tuple[list[int], bytes]:
    """Return the rows of the leading chunks that are READY in some tier, and the fastest one of each.

    ``rows_by_key``: by the first byte of the key. ``column``: the key in each row; ``ready``: its tiers, as a
    bit mask. ``among``: a bit mask of the tiers to consider. Chunks that were stored together are in
    consecutive rows, which are found with one comparison.
    """
    rows: list[int] = []
    joined, masks, short = b"".join(keys), bytearray(), 0
    with suppress(KeyError):  # The first chunk in no tier. What was found before it remains in ``rows``.
        while len(rows) < len(keys) and short < _MAX_SHORT_RUNS:
            key = keys[len(rows)]
            row = rows_by_key[key[0]][key]
            length = _run(row, joined, len(rows), column, ready)
            rows += range(row, row + length)
            masks += ready[row : row + length]
            short += length < _SHORT_RUN
        rest = keys[len(rows) :]
        rows.extend(map(getitem, map(rows_by_key.__getitem__, map(_FIRST_BYTE, rest)), rest))
    masks += bytes(map(ready.__getitem__, rows[len(masks) :]))
    tiers = bytes(masks).translate(_fastest_of(among))
    held = tiers.find(NO_TIER)
    return (rows, tiers) if held < 0 else (rows[:held], tiers[:held])


def _run(row: int, keys: bytes, first: int, column: bytearray, ready: bytearray) -> int:
    """Return how many rows from ``row`` on, at least one, have the joined ``keys`` from ``first`` on.

    All but the first are READY in some tier: the row of a chunk that is in no tier may have its former key.
    Takes time proportional to the result.
    """
    ahead = (row - first) * KEY_BYTES
    last, stop, step = len(keys), (first + 1) * KEY_BYTES, KEY_BYTES
    while step >= KEY_BYTES:
        end = stop + step
        if end <= last and column[stop + ahead : end + ahead] == keys[stop:end]:
            stop, step = end, 2 * step
        else:
            step //= 2
    length = stop // KEY_BYTES - first
    left = ready.find(0, row + 1, row + length)
    return length if left < 0 else left - row


@cache
def _fastest_of(among: int) -> bytes:
    """Return the lowest tier number of each bit mask of tiers, among those of another bit mask."""
    return bytes(FASTEST[mask & among] % 256 for mask in range(1 << MAX_TIERS))
