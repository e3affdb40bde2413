"""Incoming prompts: their chunks are known from the lookup until the last part is stored."""

from __future__ import annotations

from kvtier.catalog.policies.resume import MAX_PROMPTS, Rest, UnfinishedPrompts
from kvtier.testing.eviction import prompt_of

KEYS = prompt_of(1, 10)
GHOST = {hash(KEYS[7]): 3}


def test_each_part_knows_the_rest_and_the_first_one_the_earlier_visit() -> None:
    incoming = UnfinishedPrompts()
    incoming.expect(KEYS, GHOST)
    first = incoming.rest(KEYS[:4], None, GHOST)
    assert first == Rest(10, 8, hash(KEYS[7]), looked_up=True)
    incoming.passed(KEYS[:4], None, first)
    second = incoming.rest(KEYS[4:6], KEYS[3], {})
    assert second == Rest(6, looked_up=True), "the earlier visit is a ghost no more"
    incoming.passed(KEYS[4:6], KEYS[3], second, declined=5)
    assert incoming.rest(KEYS[6:], KEYS[5], {}) == Rest(4, declined=5, looked_up=True)


def test_unknown_prompts_are_judged_by_their_chunks() -> None:
    incoming = UnfinishedPrompts()
    assert incoming.rest(KEYS[:4], None, GHOST) == Rest(4)
    assert incoming.rest(KEYS, None, GHOST) == Rest(10, 8, hash(KEYS[7]))


def test_more_chunks_than_were_missed_are_another_prompt() -> None:
    """Such as after an eviction between the lookup and the first part."""
    incoming = UnfinishedPrompts()
    incoming.expect(KEYS[:3], {})
    assert incoming.rest(KEYS, None, {}) == Rest(10)


def test_visit_that_is_no_longer_remembered_is_looked_for_again() -> None:
    incoming = UnfinishedPrompts()
    incoming.expect(KEYS, GHOST)
    assert incoming.rest(KEYS[:4], None, {hash(KEYS[1]): 3}) == Rest(10, 2, hash(KEYS[1]), looked_up=True)


def test_prompts_that_were_stored_are_forgotten() -> None:
    incoming = UnfinishedPrompts()
    incoming.expect(KEYS, {})
    incoming.passed(KEYS[:4], None, incoming.rest(KEYS[:4], None, {}))
    incoming.passed(KEYS[4:], KEYS[3], incoming.rest(KEYS[4:], KEYS[3], {}))
    assert len(incoming._rests) == 0


def test_prompts_that_are_never_stored_are_bounded() -> None:
    incoming = UnfinishedPrompts()
    for number in range(MAX_PROMPTS + 5):
        incoming.expect(prompt_of(number, 2), {})
    assert len(incoming._rests) == MAX_PROMPTS
    assert incoming.rest(prompt_of(4, 1), None, {}) == Rest(1), "the oldest"
    assert incoming.rest(prompt_of(5, 1), None, {}) == Rest(2, looked_up=True)
