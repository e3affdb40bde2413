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
BYTES_TOLERANCE = 0.5
"""Which part of the bytes of a page may differ if its values are of another type, such as quantized ones."""


class Difference(NamedTuple):
    """How far two chunks are apart, in pages that are full of tokens."""

    values: int
    """Number of values that were compared; for types without a tolerance of their own, of bytes."""
    differing: int
    """How many of them are not equal."""
    largest: float
    """The largest difference of two values."""
    distance: float
    """The largest distance of two pages, relative to the length of the longer one."""
    tolerance: float

    @property
    def tolerable(self) -> bool:
        """Whether both may be the KV of the same tokens. Not with values that are no numbers."""
        return self.distance <= self.tolerance


def difference(
    layout: ChunkLayout, header: ChunkHeader, first: memoryview, second: memoryview, dtype: str
) -> Difference | None:
    """Compare the payloads of two objects of the chunk in ``header``. Return ``None`` if they are equal.

    Only pages that are full of tokens: the rest of the last one is what its block held before. ``dtype``: of
    the values. For a worker thread: blocks for about 0.1 ms per MiB, or 1.5 ms if they are not equal. Raises
    :class:`ImportError` without numpy, unless all bytes are equal.
    """
    if header.checksum(first) == header.checksum(second):
        return None
    import numpy as np

    values = differing = 0
    largest = distance = 0.0
    for start, stop, pages in _full_pages(layout, header.tokens):
        let_others_run()
        both = [np.frombuffer(chunk[start:stop], np.uint8).reshape(pages, -1) for chunk in (first, second)]
        for one, other in zip(*both, strict=True):
            a, b = _numbers(one, dtype), _numbers(other, dtype)
            values += a.size
            if np.array_equal(a, b):
                continue
            with np.errstate(all="ignore"):
                apart = np.abs(a - b)
                part = np.linalg.norm(apart) / max(np.linalg.norm(a), np.linalg.norm(b))
            unequal = int(np.count_nonzero(a != b))
            differing += unequal
            if dtype not in TOLERANCES:
                part = np.float64(unequal / a.size)
            # A value that is not a number is infinitely far away.
            largest, distance = (
                max(before, float(np.nan_to_num(now, nan=np.inf)))
                for before, now in ((largest, apart.max()), (distance, part))
            )
    tolerance = TOLERANCES.get(dtype, BYTES_TOLERANCE)
    return Difference(values, differing, largest, distance, tolerance) if differing else None


def _numbers(page: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the values of a page as numbers that can be subtracted; its bytes if their type is another."""
    import numpy as np

    if dtype == "bfloat16":  # numpy does not know it: the upper half of a float32.
        halves: np.ndarray[Any, Any] = page.view(np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32)
    numbers: np.ndarray[Any, Any] = page.view(dtype if dtype in TOLERANCES else np.uint8)
    return numbers.astype(np.float32)


def _full_pages(layout: ChunkLayout, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield where in a chunk object the pages of each layer begin and end that are full, and their number."""
    shares = layout.shares(tokens)
    for rank in {share: rank for rank, share in enumerate(shares)}.values():
        for span in layout.spans(tokens, rank):
            group = layout.groups[span.group]
            pages = tokens // group.block_tokens - group.blocks(tokens).start
            if pages > 0:
                start = HEADER_BYTES + span.offset
                yield start, start + pages * span.page_bytes, pages
