"""Compare two chunk objects that should hold the same KV, page by page.

Pages are opaque, but the type of their values is known. Needs numpy where two chunks are not equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.concurrency.threads import let_others_run
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.layout import ChunkLayout

if TYPE_CHECKING:
    import numpy as np

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""How far two pages of the same tokens may be apart, relative to the length of the longer one as a vector.

docs/verify.md has the measurements.
"""
BYTES_TOLERANCE = 0.85
"""Which part of the bytes of a page may differ if its values are of another type, such as quantized ones."""


class Difference(NamedTuple):
    """How far two objects are apart, in pages that are full of tokens, and states."""

    values: int
    """Number of values that were compared; for types without a tolerance of their own, of bytes."""
    differing: int
    """How many of them are not equal."""
    distance: float
    """The largest distance of two pages, relative to the length of the longer one. Infinite if one of them
    has values that are no numbers."""


def difference(
    layout: ChunkLayout, header: ChunkHeader, first: memoryview, second: memoryview, dtype: str
) -> Difference | None:
    """Compare the payloads of two objects of the chunk in ``header``. Return ``None`` if they are equal.

    Only pages that are full of tokens: the rest of the last one is what its block held before. ``dtype``: of
    the values. For a worker thread: takes 0.1 ms for each MiB, or 1 to 4 ms if they are not equal. Raises
    :class:`ImportError` without numpy, unless all bytes are equal.
    """
    if header.checksum(first) == header.checksum(second):
        return None
    import numpy as np

    values, differing, distance = 0, 0, 0.0
    for start, stop, pages in _full_pages(layout, header.tokens):
        let_others_run()
        a, b = (_numbers(chunk[start:stop], dtype).reshape(pages, -1) for chunk in (first, second))
        # What is no number on both sides is equal: a model that overflows does so each time.
        overflown = ~(np.isfinite(a) | np.isfinite(b))
        a[overflown] = b[overflown] = 0
        values += a.size
        unequal = a != b
        if not unequal.any():
            continue
        differing += int(np.count_nonzero(unequal))
        with np.errstate(all="ignore"):
            parts = np.linalg.norm(a - b, axis=1) / np.maximum(*(np.linalg.norm(x, axis=1) for x in (a, b)))
        if dtype not in TOLERANCES:
            parts = unequal.mean(axis=1)
        # Infinitely far away, if one of both is no number.
        apart = np.nan_to_num(parts[unequal.any(axis=1)], nan=np.inf, posinf=np.inf)
        distance = max(distance, float(apart.max()))
    return Difference(values, differing, distance) if differing else None


def _numbers(values: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """Return a copy of values as numbers that can be subtracted; their bytes if their type is another."""
    import numpy as np

    if dtype == "bfloat16":  # numpy does not know it: the upper half of a float32.
        halves: np.ndarray[Any, Any] = np.frombuffer(values, np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32)
    numbers: np.ndarray[Any, Any] = np.frombuffer(values, dtype if dtype in TOLERANCES else np.uint8)
    return numbers.astype(np.float32)


def _full_pages(layout: ChunkLayout, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield where in an object the pages of each layer begin and end that are full, and their number."""
    shares = layout.shares(tokens)
    for rank in {share: rank for rank, share in enumerate(shares)}.values():
        for span in layout.spans(tokens, rank):
            group = layout.groups[span.group]
            full = tokens // group.block_tokens - group.blocks(tokens).start
            if (pages := span.pages if group.state else full) > 0:
                start = HEADER_BYTES + span.offset
                yield start, start + pages * span.page_bytes, pages
