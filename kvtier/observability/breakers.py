"""Prefix breakers: where prompts that begin alike usually part, and what that costs.

A template that has a date in its middle lets no prompt hit what is behind it. Each place at which prompts
have parted is counted with those that did not part there. Of many places, the most frequent stay, as in
Space-Saving (Metwally et al., ICDT 2005, https://doi.org/10.1007/978-3-540-30570-5_27).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.memory.keys import ChunkKey

MAX_PLACES = 512
"""Of 300 bytes each."""
CANDIDATES = 16
MIN_PARTED = 3
"""Fewer prompts have not shown a pattern."""
DAY_SECONDS = 86_400.0
MIN_SECONDS = 3600.0
"""A rate of less is no rate: what was counted counts as that of an hour until then."""


class Breaker(msgspec.Struct, frozen=True):
    """A place at which prompts part."""

    position: int
    """The token from which on they differ, exact to a block."""
    parted: int
    """How many prompts have parted here."""
    passed: int
    """How many have the same tokens up to here, or up to the chunk before."""
    again: int
    """How many of those that have parted go on with the same text behind the difference."""
    tokens_per_day: float
    """Tokens behind it that are computed in a day, at the rate since it was first seen."""
    seconds_per_day: float
    """Seconds of prefill for these; 0 if the engines have not reported how fast they are."""


@dataclass(slots=True)
class _Place:
    since: float
    parted: int = 0
    passed: int = 0
    again: int = 0
    tokens: int = 0
    seconds: float = 0.0
    least: int = 0
    """How many of the place that had to go for it."""

    @property
    def count(self) -> int:
        """By which the rarest is found."""
        return self.parted + self.least


class Breakers:
    """Counts where prompts part. Confined to one event loop. A few microseconds for each prompt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[ChunkKey, dict[int, _Place]] = {}
        """By the last chunk that the prompts share, and the position."""
        self._order: list[tuple[ChunkKey, int]] = []

    def passed(self, root: ChunkKey, keys: Iterable[ChunkKey]) -> None:
        """Count a prompt, given the keys of its chunks."""
        if self._places:
            for parent in self._places.keys() & {root, *keys}:
                for place in self._places[parent].values():
                    place.passed += 1

    def parted(self, parent: ChunkKey, position: int, tokens: int, seconds: float, *, again: bool) -> None:
        """Count a prompt that has parted from others.

        ``parent``: the last chunk that it shares with them. ``tokens``, ``seconds``: to compute what follows.
        """
        place = self._places.get(parent, {}).get(position) or self._add(parent, position)
        place.parted += 1
        place.again += again
        place.tokens += tokens
        place.seconds += seconds

    def _add(self, parent: ChunkKey, position: int) -> _Place:
        least = 0
        if len(self._order) >= MAX_PLACES:
            # The rarest of a few: to find that of all would take too long for each prompt.
            among = random.sample(range(len(self._order)), CANDIDATES)
            at = min(among, key=lambda at: self._at(self._order[at]).count)
            gone, (above, where) = self._at(self._order[at]), self._order[at]
            self._order[at] = self._order[-1]
            del self._order[-1], self._places[above][where]
            if not self._places[above]:
                del self._places[above]
            least = gone.count
        self._order.append((parent, position))
        place = self._places.setdefault(parent, {})[position] = _Place(self._clock(), passed=1, least=least)
        return place

    def _at(self, where: tuple[ChunkKey, int]) -> _Place:
        return self._places[where[0]][where[1]]

    def report(self, count: int = 20) -> Sequence[Breaker]:
        """Return the places that cost most, at most ``count``."""
        now = self._clock()
        found = []
        for parent, position in self._order:
            place = self._places[parent][position]
            if place.parted >= MIN_PARTED:
                days = max(now - place.since, MIN_SECONDS) / DAY_SECONDS
                passed, costs = max(place.passed, place.parted), (place.tokens / days, place.seconds / days)
                found.append(Breaker(position, place.parted, passed, place.again, *costs))
        return sorted(found, key=lambda breaker: breaker.tokens_per_day, reverse=True)[:count]
