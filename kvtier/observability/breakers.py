"""Prefix breakers: where prompts that begin alike usually part, and what that costs.

A template that has a date in its middle lets no prompt hit what is behind it. Each place at which prompts
have parted is counted with those that did not part there. Of too many places, the more frequent half stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvtier.memory.keys import ChunkKey

MAX_PLACES = 512
"""Of 300 bytes each."""
SHOWN_BEFORE, SHOWN_BEHIND = 16, 32
"""Tokens around a position. The difference is within a block behind it."""
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
    place: str = ""
    """Equal where prompts have the same tokens up to here."""
    text: str = ""
    """The text around the position in the last of these prompts, if ``why.show_text`` is set."""


def merged(breakers: Iterable[Breaker], count: int) -> list[Breaker]:
    """Return the places that several instances have seen, each once, that cost most: at most ``count``."""
    places: dict[tuple[str, int], Breaker] = {}
    for other in breakers:
        at = other.place, other.position
        if (known := places.get(at)) is not None:
            sums = {name: getattr(known, name) + getattr(other, name) for name in _SUMMED}
            other = msgspec.structs.replace(other, text=known.text or other.text, **sums)
        places[at] = other
    return sorted(places.values(), key=lambda breaker: -breaker.tokens_per_day)[:count]


_SUMMED = ("parted", "passed", "again", "tokens_per_day", "seconds_per_day")


class Around(NamedTuple):
    """The tokens around the position at which a prompt parts from others."""

    namespace: bytes
    before: Sequence[int]
    behind: Sequence[int]


def around(namespace: bytes, tokens: Sequence[int], position: int) -> Around:
    """Return the tokens around a position of a prompt."""
    before = tokens[max(0, position - SHOWN_BEFORE) : position]
    return Around(namespace, before, tokens[position : position + SHOWN_BEHIND])


@dataclass(slots=True)
class _Place:
    since: float
    parted: int = 0
    passed: int = 0
    again: int = 0
    tokens: int = 0
    seconds: float = 0.0
    around: Around | None = None


class Breakers:
    """Counts where prompts part. Confined to one event loop. A few microseconds for each prompt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[ChunkKey, dict[int, _Place]] = {}
        """By the last chunk that the prompts share, and the position."""
        self._count = 0

    def passed(self, root: ChunkKey, keys: Iterable[ChunkKey]) -> None:
        """Count a prompt, given the keys of its chunks."""
        if self._places:
            for parent in self._places.keys() & {root, *keys}:
                for place in self._places[parent].values():
                    place.passed += 1

    def parted(
        self,
        parent: ChunkKey,
        position: int,
        tokens: int,
        seconds: float,
        *,
        again: bool = False,
        around: Around | None = None,
    ) -> None:
        """Count a prompt that has parted from others.

        ``parent``: the last chunk that it shares with them. ``tokens``, ``seconds``: to compute what follows.
        """
        place = self._places.get(parent, {}).get(position) or self._add(parent, position)
        place.around = around
        place.parted += 1
        place.again += again
        place.tokens += tokens
        place.seconds += seconds

    def _add(self, parent: ChunkKey, position: int) -> _Place:
        self._count += 1
        if self._count > MAX_PLACES:
            every = sorted(self._every(), key=lambda each: (each[2].parted, each[2].since))
            for above, where, _ in every[: MAX_PLACES // 2]:
                del self._places[above][where]
                if not self._places[above]:
                    del self._places[above]
            self._count -= MAX_PLACES // 2
        place = self._places.setdefault(parent, {})[position] = _Place(self._clock(), passed=1)
        return place

    def _every(self) -> Iterator[tuple[ChunkKey, int, _Place]]:
        for parent, places in self._places.items():
            for position, place in places.items():
                yield parent, position, place

    def report(self, count: int = 20) -> list[tuple[Breaker, Around | None]]:
        """Return the places that cost most, at most ``count``, with what is around, if that is known."""
        now = self._clock()
        found = []
        for parent, position, place in self._every():
            if place.parted >= MIN_PARTED:
                days = max(now - place.since, MIN_SECONDS) / DAY_SECONDS
                passed, costs = max(place.passed, place.parted), (place.tokens / days, place.seconds / days)
                breaker = Breaker(position, place.parted, passed, place.again, *costs, parent.hex()[:16])
                found.append((breaker, place.around))
        return sorted(found, key=lambda each: -each[0].tokens_per_day)[:count]
