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

    def put(self, hashed: int, count: int) -> int:
        """Raise the count of a hash to at least ``count``, at most 15. Return what it was before."""
        count = min(count, MAX_COUNT)
        first, second, third, fourth = self._lines
        mask = 2 * len(first) - 1
        one, two, three, four = hashed & mask, hashed >> 13 & mask, hashed >> 26 & mask, hashed >> 39 & mask
        counters = (
            (first, one, first[one >> 1] >> 4 * (one & 1) & MAX_COUNT),
            (second, two, second[two >> 1] >> 4 * (two & 1) & MAX_COUNT),
            (third, three, third[three >> 1] >> 4 * (three & 1) & MAX_COUNT),
            (fourth, four, fourth[four >> 1] >> 4 * (four & 1) & MAX_COUNT),
        )
        before = min(counters[0][2], counters[1][2], counters[2][2], counters[3][2])
        if before < count:
            for line, at, value in counters:
                if value < count:
                    line[at >> 1] += (count - value) << 4 * (at & 1)
        return before

    def halve(self) -> None:
        """Halve all counts, in 1 ms per million counters."""
        self._lines = [line.translate(_HALF) for line in self._lines]

    def fit(self, hashes: int) -> None:
        """Have at least two counters in each line for each hash of ``hashes``. Counts are kept."""
        while len(self._lines[0]) < hashes:
            # The counter of a hash is in the copy that one more of its bits selects.
            self._lines = [line + line for line in self._lines]
