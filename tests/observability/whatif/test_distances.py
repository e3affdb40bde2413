"""Reuse distances are those of an LRU cache that looks up whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.sampling import ESTIMATE_SAMPLE, SAMPLED
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.observability.whatif.distances import NEVER, HitCurve, ReuseDistances
from tests.observability.whatif.observing import chats

LENGTH = 10

paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
prompts_of_trees = st.lists(paths, max_size=40)
"""Prompts as paths in a tree, so that they share prefixes as chained keys do."""


def numbered(path: Sequence[int]) -> list[int]:
    """Return a number for each prefix of a path."""
    number, numbers = 0, []
    for step in path:
        number = number * 4 + step + 1
        numbers.append(number)
    return numbers


class LruCache:
    """An LRU cache by the book: a list, the most recent chunk first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: list[ChunkKey] = []

    def serve(self, keys: Sequence[ChunkKey]) -> int:
        hits = 0
        while hits < len(keys) and keys[hits] in self.chunks:
            hits += 1
        rest = [key for key in self.chunks if key not in keys]
        self.chunks = [*keys, *rest][: self.capacity // LENGTH]
        return hits


@given(prompts_of_trees, st.integers(1, 12))
def test_hits_are_those_of_an_lru_cache(paths: list[list[int]], chunks: int) -> None:
    distances, cache = ReuseDistances(1000, 10**9), LruCache(chunks * LENGTH)
    for path in paths:
        keys = chunk_keys(numbered(path))
        found = distances.access(keys, [LENGTH] * len(keys))
        assert found == sorted(found)
        assert sum(distance <= cache.capacity for distance in found) == cache.serve(keys)


def test_numbering_places_anew_keeps_the_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[None] = []
    monkeypatch.setattr("kvtier.observability.whatif.distances.let_others_run", lambda: pauses.append(None))

    def distances() -> list[float]:
        found, some = ReuseDistances(1 << 20, 1 << 60), list[float]()
        for prompt in chats(400, 20):
            keys = chunk_keys(prompt)
            some += found.access(keys, [LENGTH] * len(keys))
        return some

    often = distances()
    assert 2 < len(pauses) < 100, "it has numbered the places anew, with pauses, but not for each prompt"
    pauses.clear()
    monkeypatch.setattr("kvtier.observability.whatif.distances.MIN_PLACES", 1 << 60)
    assert distances() == often
    assert not pauses


def test_what_was_not_used_for_long_is_forgotten() -> None:
    distances = ReuseDistances(4, reach=4 * LENGTH)
    for number in range(6):
        distances.access(chunk_keys([number]), [LENGTH])
    assert (len(distances), distances.threshold) == (4, SAMPLED)
    assert distances.access(chunk_keys([1]), [LENGTH]) == [NEVER]
    assert distances.access(chunk_keys([5]), [LENGTH]) == [2 * LENGTH]


def test_threshold_is_lowered_if_the_sample_does_not_reach_far_enough() -> None:
    distances = ReuseDistances(256, reach=4000 * LENGTH)
    for number in range(20_000):
        keys = chunk_keys([number])
        chosen = ESTIMATE_SAMPLE.positions(join_keys(keys), distances.threshold)
        distances.access([keys[at] for at in chosen], [LENGTH] * len(chosen))
        assert len(distances) <= 256
    assert distances.rate < 256 / 4000
    recent = chunk_keys(range(16_000, 20_000))
    known = list(compress(recent, ESTIMATE_SAMPLE.of(recent, distances.threshold)))
    assert NEVER not in distances.access(known, [LENGTH] * len(known))


def test_chunks_beyond_a_lowered_sample_are_forgotten() -> None:
    distances, keys = ReuseDistances(1000, 10**9), chunk_keys(range(500))
    distances.access(keys, [LENGTH] * len(keys))
    distances.lower(0.5)
    for key, stays in zip(keys, ESTIMATE_SAMPLE.of(keys, distances.threshold), strict=True):
        assert (distances.access([key], [LENGTH]) != [NEVER]) == stays


def test_stored_chunks_are_known_once() -> None:
    distances = ReuseDistances(100, 10**9)
    first, second, third = (chunk_keys([number]) for number in range(3))
    distances.access(first, [LENGTH])
    distances.add(second + first, [LENGTH] * 2)
    assert distances.access(third, [LENGTH]) == [NEVER]
    assert distances.access(first, [LENGTH]) == [3 * LENGTH]
    assert distances.access(second, [LENGTH]) == [3 * LENGTH]


@pytest.mark.parametrize("threshold", [1, 255, 256, 257, 1000, 40_000, SAMPLED - 1, SAMPLED])
def test_sample_is_of_the_keys_below_the_threshold(threshold: int) -> None:
    keys = chunk_keys(range(5000))
    chosen = ESTIMATE_SAMPLE.positions(join_keys(keys), threshold)
    assert chosen == [at for at, stays in enumerate(ESTIMATE_SAMPLE.of(keys, threshold)) if stays]
    expected = len(keys) * threshold / SAMPLED
    assert abs(len(chosen) - expected) <= 4 * expected**0.5 + 1


def test_curve_without_sampling_counts_hits() -> None:
    curve = HitCurve()
    curve.add([0, 1, 2], [1000.0, 5000.0, NEVER], 3, 1.0)
    curve.add([0], [NEVER], 1, 1.0)
    rates = curve.hit_rates()
    assert [rates.at(capacity) for capacity in (0, 500, 2000, 8000, 1e15)] == [0, 0, 0.25, 0.5, 0.5]


def test_old_lookups_count_less() -> None:
    curve = HitCurve()
    curve.add([0], [1000.0], 1, 1.0)
    curve.decay(0.5)
    curve.add([0], [NEVER], 1, 1.0)
    assert curve.hit_rates().at(2000) == pytest.approx(1 / 3)


def test_prompts_of_which_nothing_is_sampled_do_not_shift_the_mean() -> None:
    """Of equal prompts, whose first half is a hit: whatever the sample, the mean is right."""
    curve, rate = HitCurve(), 1 / 16
    for number in range(20_000):
        # Each prompt has keys of its own, of which the first half was used before.
        keys = chunk_keys(range(number * 8, number * 8 + 8))
        positions = ESTIMATE_SAMPLE.positions(join_keys(keys), SAMPLED // 16)
        curve.add(positions, [1000.0 if at < 4 else NEVER for at in positions], 8, rate)
    assert curve.hit_rates().at(2000) == pytest.approx(0.5, abs=0.03)
