"""When prompts come back: learned from how long others like them have taken.

Prompts are put into classes. For each class and each span of age, count how many came back and for how long
any were waited for; their quotient is the rate of return. Few observations are completed by those of the
class above: a class with a history of gaps by its typical gap, that by all classes. What a client tells about
the future is the class of its prompts, and counts for as much as such prompts have kept to it.

What a prompt is worth is the highest rate at which keeping it for some time yields hits: the chance that it
returns within that time, divided by the expected time until it returns or is given up. This is the index of
J. Gittins, "Bandit processes and dynamic allocation indices" (1979). The rate at this moment would be wrong:
an agent never returns within the second in which it left, and would be evicted just before it does.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from math import exp, log

AGES = 24
"""Spans of age."""
FIRST_SECONDS = 2.0
GROWTH = 1.4
"""The first ends after ``FIRST_SECONDS``. Each further one is longer by this factor. The last is open."""
STARTS = (0.0, *(FIRST_SECONDS * GROWTH**at for at in range(AGES - 1)))
"""The age at which each span starts, in seconds."""
WIDTHS = (*(stop - start for start, stop in pairwise(STARTS)), STARTS[-1])
"""Seconds of each span; the last one counts for as long as all before."""
PRIOR = 8.0
"""As many observations as the class above counts for."""
FORGET = 4000.0
"""Returns of a class after which its observations are halved, so that it follows the traffic."""
STALE = 1 / 16
"""Classes are evaluated again after so many more returns, relative to those that are remembered."""
FRESH_RETURNS = 8
"""At least so many."""

TYPICAL_GAPS, LAST_GAPS = 12, 8
EXPECTED, RETAINED = 20, 12
NEW = 0
"""Class of prompts that have not come back yet."""
FIRST_GAP = NEW + 1
"""First of the classes of prompts that have, by typical gap and last gap."""
FIRST_EXPECTED = FIRST_GAP + TYPICAL_GAPS * LAST_GAPS
"""First of the classes of prompts whose request told when it continues, by that time."""
FIRST_RETAINED = FIRST_EXPECTED + EXPECTED
"""First of the classes of prompts whose request told for how long to keep it, by that time."""
CLASSES = FIRST_RETAINED + RETAINED


def span(age: float) -> int:
    """Return the span of an age in seconds."""
    if age < FIRST_SECONDS:
        return 0
    at = min(AGES - 1, 1 + int(log(age / FIRST_SECONDS) / _LOG_GROWTH))
    if age < STARTS[at]:  # Rounding.
        return at - 1
    return at + 1 if at + 1 < AGES and age >= STARTS[at + 1] else at


def class_of(typical: float, last: float) -> int:
    """Return the class of a prompt that came back, by its typical and its last gap in seconds."""
    coarse = _scale(last, 4.0, _LOG_2, LAST_GAPS)
    return FIRST_GAP + _scale(typical, 4.0, _LOG_GROWTH, TYPICAL_GAPS) * LAST_GAPS + coarse


def class_expected(seconds: float) -> int:
    """Return the class of a prompt whose request is expected to continue in so many seconds."""
    return FIRST_EXPECTED + _scale(seconds, 2.0, _LOG_GROWTH, EXPECTED)


def class_retained(seconds: float) -> int:
    """Return the class of a prompt that should be kept for so many seconds."""
    return FIRST_RETAINED + _scale(seconds, _SHORTEST_RETENTION, _LOG_2, RETAINED)


def _scale(seconds: float, shortest: float, growth: float, steps: int) -> int:
    """Return the place of a time on a logarithmic scale."""
    return min(steps - 1, int(log(max(seconds, shortest) / shortest) / growth))


def _raise_retained(values: list[float], seconds: float) -> None:
    """Double the value of a prompt that should be kept for some time, and less the more of it has passed."""
    for at, start in enumerate(STARTS):
        values[at] *= 1.0 + max(0.0, 1.0 - start / seconds)


_LOG_GROWTH, _LOG_2 = log(GROWTH), log(2.0)
_SHORTEST_RETENTION = 8.0


class _Observations:
    """Returns and seconds of waiting by span of age."""

    __slots__ = ("returns", "total", "waited")

    def __init__(self) -> None:
        self.returns = array("d", bytes(8 * AGES))
        self.waited = array("d", bytes(8 * AGES))
        self.total = 0.0

    def returned(self, at: int) -> None:
        self.returns[at] += 1.0
        self.total += 1.0
        if self.total > FORGET:
            for span_ in range(AGES):
                self.returns[span_] *= 0.5
                self.waited[span_] *= 0.5
            self.total *= 0.5

    def rates(self, above: list[float]) -> list[float]:
        """Return the returns per second in each span. ``above``: those of the class above."""
        observed = zip(self.returns, self.waited, above, WIDTHS, strict=True)
        return [
            (count + PRIOR * prior * width) / (seconds + PRIOR * width)
            for count, seconds, prior, width in observed
        ]


class Returns:
    """The value of prompts by class and age. Takes 60 kB, whatever the number of prompts."""

    def __init__(self) -> None:
        self._all = _Observations()
        self._typical = [_Observations() for _ in range(TYPICAL_GAPS)]
        self._exact = [_Observations() for _ in range(CLASSES)]
        self._values: list[list[float] | None] = [None] * CLASSES
        self._count = 0
        self._evaluate_at = [0.0] * CLASSES
        """The number of returns at which a class is evaluated again."""

    def _path(self, kind: int) -> tuple[_Observations, ...]:
        """Return the observations of a class, those of all classes first."""
        if FIRST_GAP <= kind < FIRST_EXPECTED:
            return self._all, self._typical[(kind - FIRST_GAP) // LAST_GAPS], self._exact[kind]
        return self._all, self._exact[kind]

    def waited(self, kind: int, first: int, stop: int) -> None:
        """Record that a prompt was away from span ``first`` on, and has not returned before ``stop``."""
        for observations in self._path(kind):
            for at in range(first, stop):
                observations.waited[at] += WIDTHS[at]

    def returned(self, kind: int, first: int, age: float) -> None:
        """Record that a prompt came back at an age. The spans before ``first`` are recorded already."""
        at = max(first, span(age))
        self.waited(kind, first, at)
        self._count += 1
        for observations in self._path(kind):
            observations.waited[at] += max(age - STARTS[at], 0.0)
            observations.returned(at)

    def values(self, kind: int) -> list[float]:
        """Return the hits per second that prompts of a class are worth, by span of age. 0.1 ms at times."""
        values = self._values[kind]
        if values is None or self._count >= self._evaluate_at[kind]:
            rates = [_UNKNOWN / (start + _UNKNOWN_SECONDS) for start in STARTS]
            for observations in self._path(kind):
                rates = observations.rates(rates)
            values = self._values[kind] = best_rates(rates)
            if kind >= FIRST_RETAINED:
                _raise_retained(values, _SHORTEST_RETENTION * 2 ** (kind - FIRST_RETAINED))
            self._evaluate_at[kind] = self._count + max(FRESH_RETURNS, STALE * self._all.total)
        return values


_UNKNOWN, _UNKNOWN_SECONDS = 0.3, 10.0
"""Before anything is known, the rate of return is assumed to fall with age, which gives the order of LRU."""


def best_rates(rates: list[float]) -> list[float]:
    """Return for each span the highest rate of hits of keeping a prompt from its start on.

    ``rates``: returns per second in each span.
    """
    stay = [exp(-rate * width) for rate, width in zip(rates, WIDTHS, strict=True)]
    spent = [
        (1 - chance) / rate if rate > 0 else width
        for chance, rate, width in zip(stay, rates, WIDTHS, strict=True)
    ]
    best = []
    for first in range(AGES):
        away, seconds, highest = 1.0, 0.0, 0.0
        for at in range(first, AGES):
            seconds += away * spent[at]
            away *= stay[at]
            highest = max(highest, (1.0 - away) / seconds)
        best.append(highest)
    return best
