"""Ends of answers: from then on a prompt can come back, and the engine may offer its chunks again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.endings import ENDINGS
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.adaptive import MAX_ANSWERS, OPEN_REQUESTS, AdaptivePolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.policies.returns import (
    AGES,
    FIRST_ENDED,
    FIRST_EXPECTED,
    NEW,
    WIDTHS,
    Returns,
    class_continued,
    class_ended,
    class_expected,
    class_of,
    gittins_index,
    residual_times,
)
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH, prompt_of
from tests.catalog.one_tier import OneTier, ResumeTier

TOOL, TURN = (1, 11), (1, 12)
"""Signatures: both answers have stopped, with different last tokens."""


@pytest.mark.parametrize("ending", range(ENDINGS))
def test_class_of_an_end_keeps_what_is_known_of_the_prompt(ending: int) -> None:
    kinds = [class_ended(kind, ending) for kind in range(FIRST_ENDED)]
    assert len(set(kinds)) == FIRST_ENDED
    assert all(FIRST_ENDED <= kind < FIRST_EXPECTED for kind in kinds)
    assert [class_ended(kind, 0) for kind in kinds] == [class_ended(kind, 0) for kind in range(FIRST_ENDED)]


def test_class_of_a_hint_stays_when_an_answer_ends() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 4)
    cache.ask(keys, ChunkHints(resume=30.0))
    cache.end(keys, *TOOL)
    assert cache.visit(keys[-1]).kind == class_expected(30.0)


def test_mean_time_until_an_event_follows_from_its_rates() -> None:
    """Against a simulation of events that have not happened at the start of a span."""
    chance = random.Random(1)
    rates = [0.05] * 6 + [0.2] * (AGES - 6)
    found = residual_times(rates)
    for first in (0, 4, 10):
        times = []
        for _ in range(20_000):
            seconds = 0.0
            for rate, width in zip(rates[first:], WIDTHS[first:], strict=True):
                wait = chance.expovariate(rate)
                seconds += min(wait, width)
                if wait < width:
                    break
            times.append(seconds)
        assert found[first] == pytest.approx(sum(times) / len(times), rel=0.05)


def test_waiting_before_the_first_span_lowers_the_gittins_index() -> None:
    rates = [0.1] * AGES
    assert gittins_index(rates) == pytest.approx(0.1)
    assert gittins_index(rates, before=10.0) == pytest.approx(0.05, rel=0.01)


def test_prompt_is_worth_less_while_its_answer_is_not_ended() -> None:
    """Answers take 60 s, and the tool 5 s: what ends now is worth more than what begins now."""
    cache = ResumeTier(10_000)
    loop(cache, [TOOL] * 20, rounds=40, answer=60.0, gap=5.0)
    cache.ask(first := prompt_of(0, 4))
    begun = cache.worth(first[-1])
    cache.now += 60.0
    cache.end(first, *TOOL)
    assert cache.worth(first[-1]) > 2 * begun > 0


def loop(
    cache: ResumeTier, signatures: Sequence[tuple[int, ...]], *, rounds: int, answer: float, gap: float
) -> None:
    """Let prompts come ``rounds`` times, and end in their own way after ``answer`` seconds each."""
    for _ in range(rounds):
        for number in range(len(signatures)):
            cache.ask(prompt_of(number, 4))
        cache.now += answer
        for number, signature in enumerate(signatures):
            cache.end(prompt_of(number, 4), *signature)
        cache.now += gap


def test_age_begins_anew_at_the_end() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 4)
    cache.ask(keys)
    cache.now += 100.0
    cache.ask(prompt_of(2, 1))
    assert cache.visit(keys[-1]).age > 5
    cache.end(keys, *TOOL)
    visit = cache.visit(keys[-1])
    assert visit.age == 0
    assert FIRST_ENDED <= visit.kind < FIRST_EXPECTED
    cache.now += 10.0
    cache.ask(keys)
    assert cache.visit(keys[-1]).typical_gap == pytest.approx(10.0), "from the end, not from the request"
    assert cache.visit(keys[-1]).kind == class_of(10.0), "its next answer has not ended"


def test_prompts_after_a_tool_call_are_held_and_those_after_a_turn_are_not() -> None:
    """They are of one kind otherwise. After half an hour of such traffic, 40 new prompts need room."""
    cache, chance = ResumeTier(400, declines=True), random.Random(3)
    for number in range(600):
        keys = prompt_of(number, 4)
        cache.ask(keys)
        cache.now += 1.0
        if number % 2:
            cache.end(keys, *TOOL)
            cache.now += 2.0 + chance.random()
            cache.ask(keys)
        cache.end(keys, *TURN)
    cache.now += 70.0
    tools = [prompt_of(1000 + number, 4) for number in range(40)]
    turns = [prompt_of(2000 + number, 4) for number in range(40)]
    for tool, turn in zip(tools, turns, strict=True):
        cache.ask(turn)
        cache.ask(tool)
        cache.end(turn, *TURN)
        cache.end(tool, *TOOL)
    assert all(len(cache.catalog.prefix(tool)) == 4 for tool in tools)
    assert sum(bool(cache.catalog.prefix(turn)) for turn in turns) <= 4


def test_end_of_a_prompt_that_was_evicted_is_that_of_its_ghost() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 6)
    cache.ask(keys)
    cache.catalog.remove_all(cache.catalog.victims(0), 0)
    cache.now += 20.0
    cache.end(keys, *TOOL)
    cache.now += 7.0
    cache.ask(keys)
    assert cache.visit(keys[-1]).typical_gap == pytest.approx(7.0)


def test_prompt_that_comes_back_from_the_tier_below_has_returned() -> None:
    """It left memory after its answer. What is brought up then is not offered again."""
    cache, keys, now = ResumeTier(100), prompt_of(1, 6), [1000.0]
    settings = ResumePolicy.settings_type.model_validate({"type": ""})
    catalog = Catalog([ResumePolicy.factory(settings, 100 * LENGTH)] * 2, clock=lambda: now[0])
    cache.catalog, policy = catalog, catalog.policies[0]
    assert isinstance(policy, ResumePolicy)
    cache.visits, cache.policy = policy._visits, policy
    for tier in (0, 1):
        catalog.add_chain(keys, tier, [LENGTH] * 6, State.READY)
    catalog.report_answer_ended(keys[-2:], TOOL)
    catalog.remove_all(keys, 0)
    now[0] += 20.0
    catalog.touch(keys)
    catalog.add_copies(keys, 0)
    assert sum(policy._returns._observations["ended"].returns) == 1.0
    assert cache.visit(keys[-1]).typical_gap == pytest.approx(20.0)
    assert cache.visit(keys[-1]).kind < FIRST_ENDED, "its next answer has not ended"


def test_end_of_a_prompt_with_a_state_behind_its_last_chunk() -> None:
    cache, keys, [state] = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 1)
    cache.ask(keys)
    cache.catalog.add(state, 0, LENGTH, State.READY, keys[-1])
    cache.end(keys, *TOOL)
    assert FIRST_ENDED <= cache.visit(keys[-1]).kind < FIRST_EXPECTED


def test_end_of_an_answer_that_ends_in_the_same_chunk() -> None:
    """The last chunk of the prompt, a partial one, is replaced by that with the answer, later than this."""
    cache, keys, [longer] = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 1)
    cache.ask(keys)
    cache.catalog.report_answer_ended([*keys[-2:], longer], TOOL)
    assert FIRST_ENDED <= cache.visit(keys[0]).kind < FIRST_EXPECTED


def test_answer_whose_chunks_replace_the_end_of_its_prompt() -> None:
    """They begin a visit of their own, and all of it has ended."""
    cache, keys, answer = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 2)
    cache.ask(keys)
    cache.catalog.add_chain(answer, 0, [LENGTH] * 2, State.READY, keys[-2])
    cache.catalog.remove_all(keys[-1:], 0, RemovalReason.CLEARED)
    assert cache.visit(answer[0]).number != cache.visit(keys[0]).number
    cache.now += 20.0
    cache.catalog.report_answer_ended([*keys[-2:], *answer], TOOL)
    visit = cache.visit(keys[0])
    assert (visit.number, visit.held) == (cache.visit(answer[-1]).number, 7)
    assert FIRST_ENDED <= visit.kind < FIRST_EXPECTED
    assert len(cache.visits) == 1
    cache.now += 10.0
    assert cache.ask([*keys[:-1], *answer]) == 7
    assert cache.visit(keys[0]).typical_gap == pytest.approx(10.0)


@pytest.mark.parametrize("stored", [0, 1, 3, 5])
@pytest.mark.parametrize("evicted", [0, 1, 4, 5, 6, 7, 9, 11])
@pytest.mark.parametrize("again", [False, True])
def test_prompt_comes_back_with_its_answer_or_without(stored: int, evicted: int, *, again: bool) -> None:
    """Many templates leave out of the next prompt what a model has thought."""
    for with_answer in (False, True):
        cache, keys, answer = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 5)
        cache.ask(keys)
        cache.store([*keys, *answer[:stored]])
        cache.now += 20.0
        cache.end(keys, *TOOL, answer=answer)
        assert FIRST_ENDED <= cache.visit(keys[0]).kind < FIRST_EXPECTED
        cache.store([*keys, *answer])
        cache.catalog.remove_all(cache.catalog.victims(0, evicted * LENGTH), 0)
        if again:
            cache.store([*keys, *answer])
        cache.now += 8.0
        turn = [*keys, *(answer if with_answer else ()), *prompt_of(3, 2)]
        cache.ask(turn)
        visit = cache.visit(turn[-1])
        assert visit.held == len(turn)
        assert visit.typical_gap == pytest.approx(8.0)
        assert sum(cache.returns._observations["ended"].returns) == 1.0


def test_prompt_that_only_begins_alike_does_not_come_back() -> None:
    cache, keys, answer = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 5)
    cache.ask(keys)
    cache.store([*keys, *answer])
    cache.end(keys, *TOOL, answer=answer)
    cache.now += 8.0
    turn = [*keys[:4], *prompt_of(3, 2)]
    cache.ask(turn)
    assert cache.visit(turn[-1]).typical_gap == 0.0
    assert sum(cache.returns._observations["ended"].returns) == 0.0


def test_answer_that_is_declined_does_not_hide_its_prompt() -> None:
    """By which it is recognized, and not by the answer."""
    cache, keys, answer = ResumeTier(100), prompt_of(1, 6), prompt_of(2, 5)
    cache.ask(keys)
    prompt = cache.catalog.incoming_prompt(answer[:3], [LENGTH] * 3, keys[-1], None)
    cache.catalog.decline(0, prompt)
    cache.end(keys, *TOOL, answer=answer)
    cache.now += 8.0
    turn = [*keys, *prompt_of(3, 2)]
    cache.ask(turn)
    assert cache.visit(turn[-1]).typical_gap == pytest.approx(8.0)


def test_end_that_is_reported_late_lets_no_time_pass_twice() -> None:
    """Otherwise all prompts would seem to have been away for longer, and to come back less often."""
    cache, keys = ResumeTier(100), prompt_of(1, 4)
    cache.ask(keys)
    for _ in range(60):
        cache.now += 1.0
        cache.catalog.report_answer_ended(keys[-2:], TOOL, 50.0)
        cache.ask(prompt_of(2, 1))
    observed = cache.returns._observations["asked"], cache.returns._observations["ended"]
    assert sum(sum(each.waited) for each in observed) <= 2 * 60.0


def test_end_of_an_unknown_prompt_and_of_none_changes_nothing() -> None:
    cache = ResumeTier(100)
    cache.ask(prompt_of(1, 4))
    before = cache.visit(prompt_of(1, 4)[-1])
    cache.end(prompt_of(2, 4), *TOOL)
    cache.end([], *TOOL)
    assert cache.visit(prompt_of(1, 4)[-1]) == before


def test_chunks_that_are_offered_again_are_no_return() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 6)
    cache.ask(keys)
    before = cache.visit(keys[-1])
    cache.catalog.remove_all(cache.catalog.victims(0, 3 * LENGTH), 0)
    cache.now += 20.0
    returns = cache.returns._count
    cache.end(keys, *TOOL, again=True)
    visit = cache.visit(keys[-1])
    assert visit.held == len(keys)
    assert (visit.typical_gap, visit.added) == (0.0, before.added)
    assert visit.kind == class_ended(class_continued(NEW, 6), 0) or visit.kind >= FIRST_ENDED
    assert sum(cache.returns._observations["ended"].returns) == 0
    assert cache.returns._count >= returns
    cache.now += 8.0
    assert cache.ask(keys) == len(keys)
    assert cache.visit(keys[-1]).typical_gap == pytest.approx(8.0)


def test_all_chunks_that_are_offered_again_are_no_return_either() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 6)
    cache.ask(keys)
    cache.catalog.remove_all(cache.catalog.victims(0), 0)
    assert cache.catalog.count(0) == 0
    cache.now += 20.0
    cache.end(keys, *TOOL, again=True)
    assert cache.visit(keys[-1]).held == len(keys)
    assert cache.visit(keys[-1]).typical_gap == 0.0
    seen = cache.returns._observations
    assert sum(seen["ended"].returns) == sum(seen["asked"].returns) == 0
    assert len(cache.visits) == 1, "one visit, no ghost beside it"


def test_prompt_of_a_hint_is_recognized_as_offered_again() -> None:
    cache, keys = ResumeTier(100), prompt_of(1, 6)
    cache.ask(keys, ChunkHints(resume=30.0))
    cache.catalog.remove_all(cache.catalog.victims(0, 3 * LENGTH), 0)
    cache.now += 10.0
    cache.end(keys, *TOOL, again=True)
    assert cache.visit(keys[-1]).held == len(keys)
    assert cache.visit(keys[-1]).typical_gap == 0.0


def test_what_was_declined_is_stored_when_its_answer_has_ended() -> None:
    """The tier is full of prompts whose answers take long: one that has ended is worth more."""
    cache = ResumeTier(80, declines=True)
    loop(cache, [TOOL] * 19, rounds=40, answer=60.0, gap=5.0)
    for number in range(20):
        cache.ask(prompt_of(number, 4))
    keys = next(prompt_of(number, 4) for number in range(100, 200) if not cache.ask(prompt_of(number, 4)))
    cache.now += 30.0
    cache.end(keys, *TOOL, again=True)
    assert len(cache.catalog.prefix(keys)) == len(keys)


def test_without_ends_returns_are_learned_as_before() -> None:
    returns = Returns()
    kind = class_of(30)
    for _ in range(100):
        returns.waited(kind, 0, 1, 30.0)
        returns.returned(kind, 30.0)
    assert returns.values(kind)[0] == pytest.approx(1 / 30, rel=0.2)


def test_prompts_are_expected_once_when_it_begins_to_pay_to_hold_them() -> None:
    """Tools take 20 to 24 s, so there is no hurry at first."""
    cache, keys, chance = ResumeTier(10_000), prompt_of(1, 4), random.Random(5)
    for number in range(400):
        for other in (number, number + 1000):
            cache.ask(prompt_of(other, 4))
            cache.end(prompt_of(other, 4), *TOOL)
        cache.now += 20.0 + 4 * chance.random()
        cache.ask(prompt_of(number, 4))
        cache.end(prompt_of(number, 4), *TURN)
        cache.now += 1.0
    cache.ask(keys)
    cache.end(keys, *TOOL)
    ended, expected = cache.now, list[float]()
    row = cache.catalog.row(keys[-1])
    for _ in range(200):
        cache.now += 0.5
        expected += [cache.now - ended for found in cache.policy.returning(cache.now) if found == row]
    assert len(expected) == 1
    assert 8.0 < expected[0] < 22.0


def test_nobody_is_expected_without_ends() -> None:
    cache = ResumeTier(1000)
    for number in range(100):
        cache.ask(prompt_of(number % 10, 4))
        cache.now += 1.0
        assert not cache.policy.returning(cache.now)


class TestAdaptive:
    """Its shadow caches see ends in the order of time, and what is offered again as no use."""

    @pytest.fixture
    def cache(self) -> OneTier[AdaptivePolicy]:
        return OneTier(AdaptivePolicy, 100, declines=True, sampling=1.0)

    def drain(self, cache: OneTier[AdaptivePolicy]) -> None:
        policy = cache.policy
        while policy._open:
            policy._observe_oldest()

    def test_offering_again_is_asked_for_once(self, cache: OneTier[AdaptivePolicy]) -> None:
        keys = prompt_of(1, 10)
        cache.ask(keys)
        cache.catalog.remove_all(cache.catalog.victims(0, 4 * LENGTH), 0)
        cache.now += 10
        cache.end(keys, *TOOL, again=True)
        assert len(cache.catalog.prefix(keys)) == len(keys)
        self.drain(cache)
        assert cache.policy._asked == len(keys)
        assert not cache.policy._awaited

    def test_prompt_that_comes_back_is_asked_for_again(self, cache: OneTier[AdaptivePolicy]) -> None:
        keys = prompt_of(1, 10)
        cache.ask(keys)
        cache.end(keys, *TOOL)
        cache.now += 10
        cache.ask(keys)
        self.drain(cache)
        assert cache.policy._asked == 2 * len(keys)
        assert list(cache.policy.hit_rates.values()) == [0.5] * 3

    def test_end_is_reported_although_further_chunks_are_stored_then(
        self, cache: OneTier[AdaptivePolicy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as those of the answer, which are stored last."""
        keys, ends = prompt_of(1, 10), list[Sequence[ChunkKey]]()
        cache.ask(keys[:9])
        for shadow in cache.policy._shadows:
            monkeypatch.setattr(shadow, "answer_ended", lambda request, _: ends.append(list(request.chunks)))
        cache.now += 10
        cache.end(keys, *TOOL, again=True)
        self.drain(cache)
        assert ends == [keys[:9]] * 3
        assert cache.policy._asked == len(keys)

    def test_end_is_that_of_the_prompt_whose_last_chunk_is_replaced(
        self, cache: OneTier[AdaptivePolicy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, [longer], ends = prompt_of(1, 10), prompt_of(2, 1), list[Sequence[ChunkKey]]()
        cache.ask(keys)
        for shadow in cache.policy._shadows:
            monkeypatch.setattr(shadow, "answer_ended", lambda request, _: ends.append(list(request.chunks)))
        cache.catalog.report_answer_ended([*keys[-2:], longer], TOOL)
        self.drain(cache)
        assert ends == [keys] * 3

    @pytest.mark.parametrize("stored", [0, 4, 5])
    def test_return_without_the_answer_is_one_in_the_shadow_caches(
        self, cache: OneTier[AdaptivePolicy], stored: int
    ) -> None:
        """Whether chunks of the answer are stored before its end or behind."""
        cache.ask(prompt_of(0, 1))  # With the first chunk, the shadow caches begin.
        keys, answer = prompt_of(1, 10), prompt_of(2, 5)
        for turn in range(3):
            cache.ask(keys)
            cache.store([*keys, *answer[:stored]])
            cache.now += 20
            cache.end(keys, *TOOL, answer=answer)
            cache.store([*keys, *answer])
            self.drain(cache)
            cache.now += 10
            keys, answer = [*keys, *prompt_of(10 + turn, 3)], prompt_of(20 + turn, 5)
        cache.ask(keys)
        self.drain(cache)
        [order] = cache.policy._shadows[2]._catalog.policies
        assert isinstance(order, ResumePolicy)
        assert sum(order._returns._observations["ended"].returns) == 3.0

    def test_prompt_that_was_looked_up_last_is_forgotten_last(self, cache: OneTier[AdaptivePolicy]) -> None:
        cache.ask(prompt_of(0, 1))
        keys = prompt_of(1, 10)
        cache.ask(keys)
        for number in range(2, MAX_ANSWERS):
            cache.catalog.report_missed(prompt_of(number, 1))
        cache.ask(keys)
        for number in range(2, MAX_ANSWERS):
            cache.catalog.report_missed(prompt_of(MAX_ANSWERS + number, 1))
        assert keys[-1] in cache.policy._prompt_ends
        assert len(cache.policy._prompt_ends) == MAX_ANSWERS

    def test_return_of_an_evicted_prompt_is_one_in_the_shadow_caches(
        self, cache: OneTier[AdaptivePolicy]
    ) -> None:
        keys = prompt_of(1, 10)
        cache.ask(keys)
        cache.end(keys, *TOOL)
        self.drain(cache)
        shadow = cache.policy._shadows[2]._catalog
        shadow.remove_all(keys, 0)
        cache.now += 10
        cache.ask(keys)
        self.drain(cache)
        [order] = shadow.policies
        assert isinstance(order, ResumePolicy)
        assert sum(order._returns._observations["ended"].returns) == 1.0

    def test_prompt_that_has_left_and_comes_back_is_asked_for_again(
        self, cache: OneTier[AdaptivePolicy]
    ) -> None:
        keys = prompt_of(1, 10)
        cache.ask(keys)
        cache.end(keys, *TOOL)
        cache.catalog.remove_all(cache.catalog.victims(0), 0)
        cache.now += 10
        cache.ask(keys)
        self.drain(cache)
        assert cache.policy._asked == 2 * len(keys)

    def test_shadow_caches_know_a_return_from_what_is_offered_again(
        self, cache: OneTier[AdaptivePolicy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By what a lookup was missing."""
        cache.ask(prompt_of(0, 1))
        missed: list[list[ChunkKey]] = []
        for shadow in cache.policy._shadows:
            monkeypatch.setattr(shadow._catalog, "report_missed", lambda keys: missed.append(list(keys)))
        keys = prompt_of(1, 6)
        cache.ask(keys[:4])
        cache.end(keys[:4], *TOOL, again=True)
        cache.ask(keys)
        self.drain(cache)
        assert missed[3:] == [keys[:4]] * 3 + [keys[4:]] * 3

    def test_events_reach_the_shadow_caches_in_the_order_of_time(
        self, cache: OneTier[AdaptivePolicy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.ask(prompt_of(0, 1))
        events: list[tuple[str, float, ChunkKey]] = []
        shadow = cache.policy._shadows[0]
        monkeypatch.setattr(
            shadow, "access", lambda keys, *_: events.append(("ask", shadow.now, keys[-1])) or 0
        )
        monkeypatch.setattr(
            shadow,
            "answer_ended",
            lambda request, _: events.append(("end", shadow.now, list(request.chunks)[-1])),
        )
        started = cache.now
        one, two, three = (prompt_of(number, 3) for number in (1, 2, 3))
        for seconds, keys, ends in (
            (1, one, False),
            (2, two, False),
            (3, one, True),
            (4, three, False),
            (5, two, True),
            (6, one, False),
        ):
            cache.now = started + seconds
            if ends:
                cache.end(keys, *TOOL)
            else:
                cache.ask(keys)
        self.drain(cache)
        kinds = [(kind, keys) for kind, _, keys in events[1:]]
        assert kinds == [
            ("ask", one[-1]),
            ("ask", two[-1]),
            ("end", one[-1]),
            ("ask", three[-1]),
            ("end", two[-1]),
            ("ask", one[-1]),
        ]
        times = [now - started for _, now, _ in events[1:]]
        assert times == [1, 2, 3, 4, 5, 6]

    def test_state_is_bounded(self, cache: OneTier[AdaptivePolicy]) -> None:
        for number in range(2 * MAX_ANSWERS):
            cache.ask(keys := prompt_of(number, 3))
            if number % 3 == 0:
                cache.end(keys, *TURN, again=True)
            if number % 5 == 0:
                cache.end(prompt_of(number - 1, 3), *TOOL)
        assert len(cache.policy._open) <= OPEN_REQUESTS
        assert len(cache.policy._answers) <= MAX_ANSWERS
        assert len(cache.policy._awaited) <= OPEN_REQUESTS * 3
