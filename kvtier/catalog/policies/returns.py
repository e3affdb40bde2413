"""When prompts come back: learned from how long others like them have taken.

Prompts are put into classes. For each class and each span of age, count how many came back and for how long
any were waited for; their quotient is the rate of return. Those that are still away count as well: otherwise
it would seem that all prompts return at the ages that have just been reached. Few observations are
completed by those of the class above: a class with a typical gap and a number of new chunks by all with that
gap, these by all classes. Prompts with a hint about the future form classes of their own, so a hint counts
for as much as such prompts have kept to it.

What a prompt is worth is the highest rate at which keeping it for some time yields hits: the chance that it
returns within that time, divided by the expected time until it returns or is given up. This is the index of
J. Gittins, "Bandit processes and dynamic allocation indices" (1979). The rate at this moment would be wrong:
an agent never returns within the second in which it left, and would be evicted just before it does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise
from math import exp, expm1, log

from kvtier.catalog.endings import ENDINGS

AGES = 24
"""Spans of age."""
FIRST_SECONDS = 2.0
GROWTH = 1.4
"""The first ends after ``FIRST_SECONDS``. Each further one is longer by this factor. The last is open."""
STARTS = array("d", (0.0, *(FIRST_SECONDS * GROWTH**at for at in range(AGES - 1))))
"""The age at which each span starts, in seconds."""
WIDTHS = (*(stop - start for start, stop in pairwise(STARTS)), STARTS[-1])
"""Seconds of each span; the last one counts for as long as all before."""
PRIOR = 8.0
"""As many observations as the class above counts for."""
FORGET = 4000.0
"""Returns of a class, or expected ones, after which its observations are halved, to follow the traffic."""
STALE = 1 / 16
"""Classes are evaluated again after this part of the remembered returns has been recorded anew."""
FRESH = 8
"""The least number of records before a class is evaluated again."""

SHARE_WEIGHT = 0.02
"""Weight of the newest return in the share of those whose answers' ends were known."""
PEAK = 0.7
"""Of the highest value of a class: from there on its prompts are worth a prefetch."""

SIZES = 8
"""Classes by the number of new chunks: none, 1, 2 or 3, 4 to 7, ... Few of the long ones come back."""
TYPICAL_GAPS = 12
EXPECTED, RETAINED = 20, 12
NEW = 0
"""First of the classes of prompts that have not come back yet, by new chunks."""
FIRST_GAP = NEW + SIZES
"""First of the classes of prompts that have, by typical gap and new chunks."""
FIRST_ENDED = FIRST_GAP + TYPICAL_GAPS * SIZES
"""First of the classes of prompts whose answer has ended: by ending, then as before."""
FIRST_EXPECTED = FIRST_ENDED + ENDINGS * FIRST_ENDED
"""First of the classes of prompts with the hint ``resume``, by its time."""
FIRST_RETAINED = FIRST_EXPECTED + EXPECTED
"""First of the classes of prompts with the hint ``retention``, by its time."""
CLASSES = FIRST_RETAINED + RETAINED


def span(age: float) -> int:
    """Return the span of an age in seconds."""
    return max(0, bisect_right(STARTS, age) - 1)


def class_of(typical: float) -> int:
    """Return the class of a prompt with a typical gap of ``typical`` seconds, and nothing new."""
    return FIRST_GAP + _scale(typical, 4.0, _LOG_GROWTH, TYPICAL_GAPS) * SIZES


def class_continued(kind: int, chunks: int) -> int:
    """Return the class of a prompt of class ``kind`` to which ``chunks`` new ones are added at once."""
    if kind >= FIRST_EXPECTED:
        return kind
    size = (kind - NEW) % SIZES
    return kind - size + max(size, min(SIZES - 1, chunks.bit_length()))


def class_ended(kind: int, ending: int) -> int:
    """Return the class of a prompt of class ``kind`` whose answer has ended, or ended again."""
    return FIRST_ENDED + ending * FIRST_ENDED + kind % FIRST_ENDED


def has_ended(kind: int) -> bool:
    """Return whether a class is one of prompts whose answer has ended."""
    return FIRST_ENDED <= kind < FIRST_EXPECTED


def class_expected(seconds: float) -> int:
    """Return the class of a prompt whose request is expected to continue in ``seconds``."""
    return FIRST_EXPECTED + _scale(seconds, 2.0, _LOG_GROWTH, EXPECTED)


def class_retained(seconds: float) -> int:
    """Return the class of a prompt that should be kept for ``seconds``."""
    return FIRST_RETAINED + _scale(seconds, _SHORTEST_RETENTION, _LOG_2, RETAINED)


def _scale(seconds: float, shortest: float, growth: float, steps: int) -> int:
    """Return the place of a time on a logarithmic scale."""
    return min(steps - 1, int(log(max(seconds, shortest) / shortest) / growth))


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
            self._halve()

    def _halve(self) -> None:
        for at in range(AGES):
            self.returns[at] *= 0.5
            self.waited[at] *= 0.5
        self.total *= 0.5

    def rates(self, above: list[float]) -> list[float]:
        """Return the returns per second in each span. ``above``: those of the class above.

        The class is assumed to return more or less often than that one by the same factor at all ages.
        """
        expected = sum([seconds * rate for seconds, rate in zip(self.waited, above, strict=True)])
        factor = (self.total + PRIOR) / (expected + PRIOR)
        if expected > FORGET:  # As many prompts of the class above would have come back.
            self._halve()
        observed = zip(self.returns, self.waited, above, WIDTHS, strict=True)
        return [
            (count + PRIOR * factor * rate * width) / (seconds + PRIOR * width)
            for count, seconds, rate, width in observed
        ]


class Returns:
    """The value of prompts by class and age. Takes up to 1 MB, whatever the number of prompts.

    The age of a prompt counts from the request, and anew from the end of its answer. Before that end, it is
    worth what prompts like it are after theirs, over a time that is longer by the rest of the answer.
    """

    def __init__(self) -> None:
        self._observations = defaultdict[object, _Observations](_Observations)
        """By what the observed prompts have in common."""
        self._values: list[list[float]] = [[]] * CLASSES
        self._chances: list[list[float]] = [[]] * CLASSES
        self._count = 0
        """Of returns, and of times that waiting was recorded."""
        self._evaluate_at = [0.0] * CLASSES
        """The count at which a class is evaluated again."""
        self._share_ended = 0.0
        """Which part of the prompts that came back lately had a known end of their answer."""

    def _path(self, kind: int) -> tuple[_Observations, ...]:
        """Return the observations of returns of a class, those of all classes first."""
        of = self._observations
        ended, before = divmod(kind, FIRST_ENDED)
        if kind < FIRST_ENDED:
            return of["asked"], of["asked", before // SIZES], of[kind]
        if kind < FIRST_EXPECTED:
            return of["ended"], of["ended", ended], of["ended", ended, before // SIZES], of[kind]
        return of["asked"], of[kind]

    def _path_of_any_ending(self, kind: int) -> tuple[_Observations, ...]:
        """Return those of the prompts whose answer has ended, which were of a class before."""
        of, before = self._observations, kind % FIRST_ENDED
        return of["ended"], of["any ending, gap", before // SIZES], of["any ending", before]

    def _answers(self, kind: int) -> tuple[_Observations, ...]:
        """Return the observations of ends of answers, by new chunks, and how long they were waited for."""
        return self._observations["answers"], self._observations["answers", (kind - NEW) % SIZES]

    def _observing(self, kind: int) -> tuple[_Observations, ...]:
        """Return all observations of returns to which a prompt of a class contributes."""
        if has_ended(kind):
            return *self._path(kind), *self._path_of_any_ending(kind)[1:]
        return self._path(kind)

    def passed(self) -> None:
        """Note that time has passed, which is about to be recorded."""
        self._count += 1

    def waited(self, kind: int, first: int, count: int, seconds: float) -> None:
        """Record that ``count`` prompts of a class have been away for ``seconds`` more, first in a span."""
        observing = self._observing(kind) + (self._answers(kind) if kind < FIRST_ENDED else ())
        for at in range(first, AGES):
            here = seconds if at == AGES - 1 else min(seconds, WIDTHS[at])
            for observations in observing:
                observations.waited[at] += count * here
            seconds -= here
            if seconds <= 0:
                return

    def answer_ended(self, kind: int, age: float) -> None:
        """Record that the answer to a prompt of a class ended at an age."""
        for observations in self._answers(kind):
            observations.returned(span(age))

    def returned(self, kind: int, age: float) -> None:
        """Record that a prompt came back at an age."""
        at = span(age)
        self._count += 1
        if kind < FIRST_EXPECTED:
            self._share_ended += SHARE_WEIGHT * ((kind >= FIRST_ENDED) - self._share_ended)
        for observations in self._observing(kind):
            observations.returned(at)

    def values(self, kind: int) -> list[float]:
        """Return the hits per second that prompts of a class are worth, by span of age. 0.1 ms at times."""
        if self._count >= self._evaluate_at[kind]:
            self._values[kind] = self._evaluate(kind)
            returns = self._observations["asked"].total + self._observations["ended"].total
            self._evaluate_at[kind] = self._count + max(FRESH, STALE * returns)
        return self._values[kind]

    def peaks(self, kind: int, at: int) -> bool:
        """Return whether a span of age is the first in which prompts of a class are worth about the most."""
        values = self.values(kind)
        return at > 0 and values[at] >= PEAK * max(values) > values[at - 1]

    def _evaluate(self, kind: int) -> list[float]:
        if kind < FIRST_ENDED and self._share_ended > 0.5:
            rates, ends = _rates(self._path_of_any_ending(kind)), _rates(self._answers(kind))
            self._chances[kind] = [chances(rates)[0]] * AGES
            return [gittins_index(rates, before) for before in residual_times(ends)]
        rates = _rates(self._path(kind))
        self._chances[kind] = chances(rates)
        values = [gittins_index(rates, first=first) for first in range(AGES)]
        if kind >= FIRST_RETAINED:
            seconds = _SHORTEST_RETENTION * 2 ** (kind - FIRST_RETAINED)
            # Doubled at first, and raised by less the more of this time has passed.
            for at, start in enumerate(STARTS):
                values[at] *= 1.0 + max(0.0, 1.0 - start / seconds)
        return values

    def chance(self, kind: int, at: int) -> float:
        """Return how likely a prompt of a class is to come back at all, from a span of age on."""
        self.values(kind)
        return self._chances[kind][at]


def _rates(path: Iterable[_Observations]) -> list[float]:
    """Return the returns per second in each span of the last of these, which those before it complete."""
    rates = _ASSUMED
    for observations in path:
        rates = observations.rates(rates)
    return rates


def chances(rates: list[float]) -> list[float]:
    """Return for each span the chance of a return in it or in a later one, given the returns per second."""
    expected = accumulate(rate * width for rate, width in zip(reversed(rates), reversed(WIDTHS), strict=True))
    return [-expm1(-returns) for returns in expected][::-1]


_ASSUMED = [0.3 / (start + 10.0) for start in STARTS]
"""Before anything is known, the rate of return is assumed to fall with age, which gives the order of LRU."""


def residual_times(rates: list[float]) -> list[float]:
    """Return for each span the mean seconds from its start until an event, given the events per second."""
    rest, found = WIDTHS[-1], []
    for rate, width in zip(reversed(rates), reversed(WIDTHS), strict=True):
        rest = _spent(rate, width) + exp(-rate * width) * rest
        found.append(rest)
    return found[::-1]


def gittins_index(rates: list[float], before: float = 0.0, first: int = 0) -> float:
    """Return the highest rate of hits of keeping a prompt for some time.

    ``rates``: returns per second in each span. ``first``: the span that begins now, or in ``before`` seconds.
    """
    away, seconds, highest = 1.0, before, 0.0
    for rate, width in zip(rates[first:], WIDTHS[first:], strict=True):
        seconds += away * _spent(rate, width)
        away *= exp(-rate * width)
        highest = max(highest, (1.0 - away) / seconds)
    return highest


def _spent(rate: float, width: float) -> float:
    """Return the mean time until an event, or until ``width`` seconds are over."""
    return -expm1(-rate * width) / rate if rate > 0 else width
