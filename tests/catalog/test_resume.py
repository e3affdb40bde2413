"""The resume policy: prompts that come back soon stay, and hints count for as much as they have been true."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.resume import MAX_SETTLED, ResumePolicy
from kvtier.catalog.policies.returns import (
    AGES,
    CLASSES,
    FIRST_EXPECTED,
    FIRST_GAP,
    NEW,
    STARTS,
    WIDTHS,
    Returns,
    class_continued,
    class_expected,
    class_of,
    gittins_index,
    span,
)
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH, EvictionConformance, prompt_of
from tests.catalog.one_tier import ResumeTier

CHUNKS = 10


class TestConformance(EvictionConformance):
    policy = ResumePolicy


class TestWithoutGhosts(EvictionConformance):
    policy = ResumePolicy
    settings: ClassVar = {"ghosts": 0}


def test_span_is_that_with_the_age() -> None:
    for at, start in enumerate(STARTS):
        assert span(start) == at
        assert span(start + WIDTHS[at] * 0.999) == at
    assert span(1e9) == AGES - 1


def test_classes_are_ordered_by_time_and_bounded() -> None:
    assert class_of(0) == class_of(1) == FIRST_GAP
    assert class_of(5) < class_of(20) < class_of(90) < class_of(1e9) < FIRST_EXPECTED
    assert class_expected(0) == FIRST_EXPECTED < class_expected(10) < class_expected(1e9)


@pytest.mark.parametrize("kind", [NEW, class_of(1), class_of(20), class_of(1e9)])
def test_class_grows_with_the_new_chunks_and_stays_the_same_otherwise(kind: int) -> None:
    sizes = [class_continued(kind, chunks) for chunks in (0, 1, 2, 3, 4, 100, 10_000)]
    assert sizes == [kind, kind + 1, kind + 2, kind + 2, kind + 3, kind + 7, kind + 7]
    assert class_continued(sizes[3], 1) == sizes[3], "decoding adds one chunk at a time"


def test_parts_of_a_long_prompt_count_together() -> None:
    """An engine computes a long prompt in several steps, and stores the chunks of each."""
    cache, keys = ResumeTier(100), prompt_of(1, 24)
    kinds = []
    for start in range(0, 24, 6):
        parent = keys[start - 1] if start else None
        cache.catalog.add_chain(keys[start : start + 6], 0, [LENGTH] * 6, State.READY, parent)
        kinds.append(cache.visit(keys[start + 5]).kind)
    assert kinds == [class_continued(NEW, chunks) for chunks in (6, 12, 18, 24)]
    cache.ask(keys)
    assert cache.visit(keys[-1]).kind == class_of(0), "with nothing new"


def test_chunks_that_were_there_before_an_eviction_are_not_new() -> None:
    """A prompt of 20 chunks comes back with 3 more. It is recognized by one of its last chunks."""
    cache, keys = ResumeTier(100), prompt_of(1, 23)
    cache.ask(keys[:20])
    cache.catalog.remove_all(cache.catalog.victims(0), 0)
    cache.now += 30
    cache.ask(keys)
    assert cache.visit(keys[-1]).kind == class_continued(class_of(30), 4)


@pytest.mark.parametrize("kind", [class_expected(0), class_expected(1e9), CLASSES - 1])
def test_class_of_a_hint_does_not_depend_on_the_new_chunks(kind: int) -> None:
    assert class_continued(kind, 100) == kind


@pytest.mark.parametrize("first", [0, 3, 7])
def test_value_is_the_best_rate_of_hits_of_any_time_to_keep(first: int) -> None:
    """Against Gittins' definition with small steps: P(return by t) / E[min(return, t)], for the best t."""
    chance = random.Random(first)
    rates = [chance.choice((0.001, 0.01, 0.1)) for _ in range(AGES)]
    best, away, seconds = 0.0, 1.0, 0.0
    for at in range(first, AGES):
        steps = 2000
        for _ in range(steps):
            seconds += away * WIDTHS[at] / steps
            away *= 1 - rates[at] * WIDTHS[at] / steps
        best = max(best, (1 - away) / seconds)
    assert gittins_index(rates, first=first) == pytest.approx(best, rel=0.02)


def test_what_is_learned_replaces_what_was_assumed() -> None:
    returns = Returns()
    kind = class_of(30)
    for _ in range(200):
        returns.waited(kind, 0, 1, 30.0)
        returns.returned(kind, 30.0)
    values = returns.values(kind)
    assert values[0] == pytest.approx(1 / 30, rel=0.15)
    assert values[span(25.0)] > 3 * values[0], "it is about to come back"
    assert values[span(300.0)] < values[0], "it has not come back in time"


def test_those_who_are_still_away_count() -> None:
    """The first returns at an age are seen before anyone has been given up. They must not look certain."""
    cache = ResumeTier(10_000)
    for number in range(400):
        cache.now += 0.25
        cache.ask(prompt_of(number, 1))
        if number >= 200 and number % 10 == 0:  # One of ten comes back, 50 s later.
            cache.ask(prompt_of(number - 200, 1))
    seen, chance = cache.returns._observations["asked"], 1.0
    for at in range(span(75.0)):
        chance *= 1 - min(1.0, seen.returns[at] * WIDTHS[at] / max(seen.waited[at], 1e-9))
    assert 1 - chance == pytest.approx(0.1, abs=0.05)


def test_prompts_that_never_return_are_noticed_without_any_return() -> None:
    returns, kind = Returns(), class_continued(NEW, 8)
    before = returns.values(kind)[0]
    for _ in range(100):
        returns.passed()
        returns.waited(kind, 0, 100, 0.5)
    assert returns.values(kind)[0] < before / 10


def test_gaps_are_learned_while_nothing_is_evicted() -> None:
    """A tier that is not full yet, or whose order is not in use in the adaptive policy, has no searches."""
    cache = ResumeTier(10_000)
    for _ in range(12):
        for number in range(30):
            cache.ask(prompt_of(number, 3))
            cache.now += 20
    values = cache.returns.values(class_continued(class_of(600), 0))
    assert values[span(500.0)] > 3 * values[span(1.0)]
    cache.catalog.touch([])
    for number in range(30):
        visit = cache.visit(prompt_of(number, 1)[0])
        assert abs(visit.age - span(cache.now - cache.visits.since[visit.number])) <= 1


def test_no_call_moves_all_visits() -> None:
    """An idle night makes all of them older by many spans at once."""
    cache = ResumeTier(100_000)
    for number in range(5_000):
        cache.ask(prompt_of(number, 1))
    cache.now += 30_000
    counts, rings = [], list(cache.visits.rings)
    for _ in range(20):
        cache.catalog.touch(prompt_of(0, 1))
        before, rings = rings, list(cache.visits.rings)
        counts.append(sum(one != other for one, other in zip(before, rings, strict=True)))
    assert max(counts) <= MAX_SETTLED + 2, "and the two of the prompt itself, that ends and that begins"
    assert sum(counts) >= 5_000 - 1


def test_value_of_a_class_without_observations_falls_with_age() -> None:
    values = Returns().values(NEW)
    assert values == sorted(values, reverse=True)


def test_prompts_that_come_back_often_stay() -> None:
    """Ten sessions with a gap of 10 s, and ten times as many prompts in between that never come back."""
    cache = ResumeTier(20 * CHUNKS)
    sessions = [prompt_of(number, CHUNKS) for number in range(10)]
    hits = asked = 0
    for turn in range(60):
        for number, keys in enumerate(sessions):
            found = cache.ask(keys)
            if turn >= 20:
                hits += found
                asked += len(keys)
            for other in range(10):
                cache.now += 0.1
                cache.ask(prompt_of(1000 + (turn * 10 + number) * 10 + other, CHUNKS))
    assert hits > 0.95 * asked, "LRU hits nothing: 100 prompts come between two turns"


def test_session_is_recognised_after_its_eviction() -> None:
    cache = ResumeTier(2 * CHUNKS)
    session = prompt_of(0, CHUNKS)
    for turn in range(4):
        cache.now += 30
        cache.ask(session)
        assert (cache.visit(session[-1]).typical_gap > 0) is (turn > 0)
        for other in range(4):
            cache.ask(prompt_of(100 + turn * 4 + other, CHUNKS))
        assert session[-1] not in cache.catalog


def test_scan_does_not_flush_sessions_nor_grow_the_state() -> None:
    cache = ResumeTier(20 * CHUNKS)
    sessions = [prompt_of(number, CHUNKS) for number in range(10)]
    for _ in range(30):
        for keys in sessions:
            cache.now += 1
            cache.ask(keys)
    hits = []
    for number in range(10_000):
        cache.now += 0.01
        cache.ask(prompt_of(1000 + number, 2))
        if number % 100 == 0:  # Each session every 10 s, in which time 1,000 prompts pass.
            hits.append(cache.ask(sessions[number // 100 % 10]))
    learned = hits[30:]  # It has to see first that the new prompts do not come back.
    assert sum(learned) > 0.95 * len(learned) * CHUNKS
    assert len(cache.visits) < 8_000
    assert len(cache.visits.tails) < 10_000


def test_true_hints_are_worth_more_than_false_ones() -> None:
    """Half of the clients say when they come back, the others say the same and never do."""
    cache = ResumeTier(30 * CHUNKS)
    truth: dict[int, list[ChunkKey]] = {}
    hits = asked = 0
    for step in range(1500):
        cache.now += 1
        if step - 20 in truth:
            found = cache.ask(truth.pop(step - 20), ChunkHints())
            if step > 500:
                hits += found
                asked += CHUNKS
        truth[step] = prompt_of(step, CHUNKS)
        cache.ask(truth[step], ChunkHints(resume=20))
        for other in range(4):
            cache.ask(prompt_of(10_000 + 4 * step + other, CHUNKS), ChunkHints(resume=3000, priority=-100))
    assert hits > 0.9 * asked, "125 prompts come between, room is for 30"


def test_retention_raises_the_value_for_its_time_only() -> None:
    returns = Returns()
    plain, kept = returns.values(NEW), returns.values(FIRST_EXPECTED + 20 + 4)
    assert kept[0] == pytest.approx(2 * plain[0], rel=0.05)
    assert kept[span(64.0)] < 1.6 * plain[span(64.0)]
    assert kept[span(200.0)] == pytest.approx(plain[span(200.0)])


def test_cleared_chunks_in_the_middle_leave_no_chunk_behind() -> None:
    cache = ResumeTier(100)
    keys = prompt_of(1, 9)
    cache.ask(keys)
    cache.catalog.remove_all([keys[4], keys[2]], 0, RemovalReason.LOST)
    left = [key for key in keys if key not in (keys[4], keys[2])]
    assert sorted(cache.catalog.victims(0)) == sorted(left)
