"""Numbers for the chunks of a trace, which has ids of 64 bits."""

from __future__ import annotations

from array import array

from kvtier import native

MAX_VACANT = 4
"""Numbers are ids as they are in the trace, if the highest is below this multiple of their count."""


def number_chunks(ids: array[int], ends: array[int]) -> tuple[array[int], int, int]:
    """Return the chunks of all requests as u32, a number that all of them are below, and how many differ.

    Chunks that a request had before are left out. ``ends``: where the chunks of each request end, which is
    corrected. Takes 5 ns per chunk (0.2 µs without the native core), and 4 bytes for each number meanwhile.
    """
    if not native.available():
        return _numbered(ids, ends)
    chunks = array("I", [0]) * len(ids)
    kept, numbers, unique = native.core.number_chunks(ids, ends, MAX_VACANT, chunks)
    del chunks[kept:]
    return chunks, numbers, unique


def _numbered(ids: array[int], ends: array[int]) -> tuple[array[int], int, int]:
    kept, start = array("Q"), 0
    for request, stop in enumerate(ends):
        kept.extend(dict.fromkeys(ids[start:stop]))
        ends[request], start = len(kept), stop
    count = max(kept) + 1
    if count <= MAX_VACANT * len(kept) and count < 1 << 32:
        return array("I", kept), count, _distinct(kept, count)
    numbers: dict[int, int] = {}
    numbered = array("I", [numbers.setdefault(chunk, len(numbers)) for chunk in kept])
    return numbered, len(numbers), len(numbers)


def _distinct(chunks: array[int], numbers: int) -> int:
    """Return how many different numbers there are."""
    seen = bytearray(numbers)
    for chunk in chunks:
        seen[chunk] = 1
    return seen.count(1)
