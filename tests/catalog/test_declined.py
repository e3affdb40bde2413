"""New chunks that a policy declines, because those that would have to leave are worth more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies import adaptive
from kvtier.catalog.policies.adaptive import CANDIDATES, AdaptivePolicy, AdaptiveSettings, ShadowCache
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.policies.returns import NEW, class_continued
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.simulated_cache import SimulatedCache, configured, one_tier
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.testing.eviction import LENGTH, prompt_of
from tests.catalog.one_tier import OneTier, ResumeTier

PLUGINS = Plugins.load([])
SESSIONS, SESSION_CHUNKS, SCAN_CHUNKS = 10, 8, 20
GAP = 10.0
"""Seconds after which each session comes back."""
ROOM = SCAN_CHUNKS // 2
"""Besides the sessions: a new prompt as a whole would replace chunks of theirs."""
CAPACITY = SESSIONS * SESSION_CHUNKS + ROOM


def tier_of(capacity: int = CAPACITY) -> ResumeTier:
    return ResumeTier(capacity, declines=True)


TierT = TypeVar("TierT", bound=OneTier[Any])


class Traffic(Generic[TierT]):
    """Sessions that come back after :data:`GAP` seconds, and between them prompts that never do."""

    def __init__(self, tier: TierT) -> None:
        self.tier, self.scanned = tier, 0

    def round(self) -> int:
        """Let each session come once, and a prompt that is new after each. Return the sessions' hits."""
        hits = 0
        for number in range(SESSIONS):
            self.tier.now += GAP / SESSIONS
            hits += self.tier.ask(prompt_of(number, SESSION_CHUNKS))
            self.scanned += 1
            self.tier.ask(prompt_of(10_000 + self.scanned, SCAN_CHUNKS))
        return hits


def is_held(tier: ResumeTier, keys: list[ChunkKey]) -> bool:
    return len(tier.catalog.prefix(keys)) == len(keys)


@pytest.fixture
def traffic() -> Traffic[ResumeTier]:
    """Traffic from which the policy has learned who comes back."""
    traffic = Traffic(tier_of())
    for _ in range(30):
        traffic.round()
    return traffic


def test_prompts_of_a_kind_that_never_returns_do_not_replace_those_that_do(
    traffic: Traffic[ResumeTier],
) -> None:
    assert sum(traffic.round() for _ in range(10)) == 10 * SESSIONS * SESSION_CHUNKS
    lru = Traffic(OneTier(LruPolicy, CAPACITY, declines=True))
    assert sum(lru.round() for _ in range(10)) == 0


def test_what_is_worth_more_is_stored(traffic: Traffic[ResumeTier]) -> None:
    """A prompt of the same length, whose client reports that it continues at once."""
    keys = prompt_of(1_000, SCAN_CHUNKS + 1)
    traffic.tier.ask(keys)
    assert not is_held(traffic.tier, keys)
    urgent = prompt_of(2_000, SCAN_CHUNKS + 1)
    traffic.tier.ask(urgent, ChunkHints(resume=0.5, priority=100))
    assert is_held(traffic.tier, urgent)


def test_as_much_is_stored_as_there_is_room_for_without_better_ones(traffic: Traffic[ResumeTier]) -> None:
    """The beginning of the prompt, in place of the last one of its kind."""
    tier = traffic.tier
    held = {key for number in range(SESSIONS) for key in prompt_of(number, SESSION_CHUNKS)}
    keys = prompt_of(3_000, 3 * SCAN_CHUNKS)
    tier.ask(keys)
    assert len(tier.catalog.prefix(keys)) == ROOM
    assert all(key in tier.catalog for key in held)


def part_by_part(tier: ResumeTier, keys: list[ChunkKey], size: int) -> None:
    """Look a prompt up that is not held, and store it as an engine does."""
    tier.catalog.report_missed(keys)
    for start in range(0, len(keys), size):
        part, parent = keys[start : start + size], keys[start - 1] if start else None
        sizes = [LENGTH] * len(part)
        prompt = tier.catalog.incoming_prompt(part, sizes, parent)
        if parent is not None and parent not in tier.catalog:  # It continues what was declined.
            tier.catalog.decline(0, prompt)
            continue
        excess = tier.catalog.used(0) + sum(sizes) - tier.capacity * LENGTH
        if excess > 0:
            tier.catalog.remove_all(tier.catalog.victims(0, excess, prompt=prompt), 0)
        if tier.capacity - tier.catalog.count(0) < len(part):
            tier.catalog.decline(0, prompt)
        else:
            tier.catalog.add_chain(part, 0, sizes, State.READY, parent)


def test_prompt_that_is_stored_in_parts_is_judged_as_a_whole(traffic: Traffic[ResumeTier]) -> None:
    """Its first part looks like a new session, which comes back."""
    tier, keys = traffic.tier, prompt_of(5_000, SCAN_CHUNKS)
    tier.ask(prompt_of(7_000, SCAN_CHUNKS), ChunkHints(priority=50))  # Worth more than another like it.

    def replaced(part: list[ChunkKey]) -> set[int]:
        """Return the chunks that are not worth more."""
        prompt = tier.catalog.incoming_prompt(part, [LENGTH] * len(part), None)
        return set(tier.policy.victims_for(prompt))

    first, whole = replaced(keys[:SESSION_CHUNKS]), replaced(keys)
    assert first > whole
    tier.catalog.report_missed(keys)
    assert replaced(keys[:SESSION_CHUNKS]) == whole


def test_prompt_that_is_declined_in_parts_is_remembered_once(traffic: Traffic[ResumeTier]) -> None:
    """By its last part, whose class is that of the whole prompt."""
    tier, keys = traffic.tier, prompt_of(6_000, 4 * SCAN_CHUNKS)
    visits, before = tier.visits, len(tier.visits)
    part_by_part(tier, keys, SCAN_CHUNKS)
    assert not is_held(tier, keys[:1])
    assert len(visits) == before + 1
    visit = tier.visit(keys[-2])
    assert (visit.added, visit.kind) == (len(keys), class_continued(NEW, len(keys)))
    empty = [visit for visit in set(visits.ghosts.values()) if not visits.counts[visit]]
    assert tier.policy._ghosts == len(empty), "it counts once"


def test_parts_are_added_to_one_visit_that_is_recognized_by_its_end() -> None:
    tier, keys = tier_of(40), prompt_of(1, 30)
    part_by_part(tier, keys, 4)
    [visit] = {tier.visit(key) for key in keys}
    assert visit.added == len(keys)
    assert len(tier.policy._incoming._rests) == 0, "nothing of it is to come"
    tier.catalog.remove_all(keys[::-1], 0)
    tier.now += 30
    part_by_part(tier, keys, 4)
    [visit] = {tier.visit(key) for key in keys}
    assert visit.typical_gap == pytest.approx(30)
    assert visit.added == 1, "the last chunk is behind the one that is remembered"


def test_next_part_of_a_prompt_does_not_replace_the_parts_before_it() -> None:
    tier = tier_of(10)
    part_by_part(tier, prompt_of(1, 16), 4)
    assert len(tier.catalog.prefix(prompt_of(1, 16))) == 8


@pytest.mark.usefixtures("implementation")
def test_beginning_does_not_leave_before_what_is_worth_more() -> None:
    """The order ends before the chunks that continue it: without it, they could no longer be hit."""
    tier = tier_of(10)
    beginning, rest = prompt_of(1, 1), prompt_of(2, 9)
    tier.ask(beginning, ChunkHints(priority=-100))
    tier.ask(beginning + rest)
    tier.catalog.set_hints([tier.catalog.row(beginning[0]) or 0], ChunkHints(priority=-100))
    tier.ask(beginning)  # The visit of the beginning alone is worth less than that of the rest.
    assert tier.catalog.count(0) == 10
    tier.ask(prompt_of(3, 1), ChunkHints(priority=-100))
    assert is_held(tier, beginning + rest)


def test_declined_prompt_that_comes_back_is_stored(traffic: Traffic[ResumeTier]) -> None:
    """It is remembered, and then known as one that returns."""
    tier, keys = traffic.tier, prompt_of(4_000, SCAN_CHUNKS)
    tier.ask(keys)
    assert not is_held(tier, keys)
    stored = 0
    for _ in range(20):
        tier.now += GAP / 20
        tier.ask(keys)
        stored = max(stored, len(tier.catalog.prefix(keys)))
    assert stored == len(keys)


def test_end_that_is_declined_is_remembered_with_what_is_stored() -> None:
    tier, keys = tier_of(), prompt_of(1, 5)
    tier.catalog.add_chain(keys[:2], 0, [LENGTH] * 2, State.READY)
    tier.catalog.decline(0, tier.catalog.incoming_prompt(keys[2:], [LENGTH] * 3, keys[1]))
    visit = tier.visit(keys[-2])
    assert visit == tier.visit(keys[0])
    assert (visit.held, visit.added) == (2, 5)


@pytest.mark.usefixtures("implementation")
def test_what_is_around_a_declined_part_is_offered_once_it_stands_alone() -> None:
    keys = prompt_of(1, 6)
    policy = ResumePolicy.factory(ResumePolicy.settings_type(type="resume"), CAPACITY * LENGTH)
    catalog = Catalog([policy, policy])
    catalog.add_chain(keys[:4], 1, [LENGTH] * 4, State.READY)
    catalog.report_missed(keys)
    catalog.add_chain(keys[:2], 0, [LENGTH] * 2, State.READY)
    catalog.decline(0, catalog.incoming_prompt(keys[2:4], [LENGTH] * 2, keys[1]))
    catalog.add_chain(keys[4:], 0, [LENGTH] * 2, State.READY, keys[3])
    assert sorted(catalog.victims(0)) == sorted(keys[:2] + keys[4:])
    catalog.remove_all(keys[:3:-1], 0)
    assert catalog.victims(0) == keys[1::-1]


def test_declined_prompts_count_as_waited_for() -> None:
    """Otherwise those of a kind that is declined would never be known to come back, or not to."""
    tier, keys = tier_of(), prompt_of(1, 5)
    prompt = tier.catalog.incoming_prompt(keys, [LENGTH] * 5, None)
    tier.catalog.decline(0, prompt)
    visit = tier.visit(keys[-2])
    assert visit.held == 0
    tier.now += 30
    tier.ask(keys)
    assert sum(tier.returns._observations[visit.kind].returns) == 1
    assert tier.visit(keys[0]).typical_gap == pytest.approx(30)


def test_prompts_that_only_share_their_beginning_are_remembered_each() -> None:
    """A common beginning belongs to the last of them. The others lose it, and must not be forgotten."""
    tier, shared = tier_of(), prompt_of(1, 4)
    tier.ask(shared)
    prompts = [shared + prompt_of(number, 6) for number in (10, 11, 12)]
    for keys in prompts:
        tier.now += 1
        rows, _ = tier.catalog.prefix_rows(keys)
        tier.catalog.touch_rows(rows)
        tier.catalog.decline(0, tier.catalog.incoming_prompt(keys[4:], [LENGTH] * 6, shared[-1]))
    assert len(tier.visits.ghosts) == 3
    tier.now += 20
    tier.ask(prompts[1])
    assert tier.visit(prompts[1][-1]).typical_gap == pytest.approx(21)


def test_adaptive_declines_as_the_policy_that_it_follows() -> None:
    tier = OneTier(AdaptivePolicy, CAPACITY, declines=True, sampling=1.0, window=500)
    policy = tier.policy
    traffic = Traffic(tier)
    for _ in range(60):
        traffic.round()
    assert policy.follows == "resume"
    assert sum(traffic.round() for _ in range(10)) == 10 * SESSIONS * SESSION_CHUNKS
    asked = SESSION_CHUNKS / (SESSION_CHUNKS + SCAN_CHUNKS)
    assert policy.hit_rates["resume"] == pytest.approx(asked, abs=0.03), "its shadow cache declines, too"
    assert policy.hit_rates["lru"] < 0.02, "and sees what was declined"


def test_adaptive_passes_on_what_a_prompt_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    missed: list[Sequence[ChunkKey]] = []
    monkeypatch.setattr(ResumePolicy, "missed", lambda _, keys, now: missed.append(keys))
    catalog = Catalog([AdaptivePolicy.factory(capacity_bytes=CAPACITY * LENGTH)])
    catalog.report_missed(prompt_of(1, 5))
    assert missed == [prompt_of(1, 5)]


def test_adaptive_passes_on_what_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to candidates that it does not follow: they take over with what they know."""
    declined: list[Sequence[ChunkKey]] = []
    monkeypatch.setattr(ResumePolicy, "declined", lambda _, prompt: declined.append(prompt.keys))
    catalog, keys = Catalog([AdaptivePolicy.factory(capacity_bytes=CAPACITY * LENGTH)]), prompt_of(1, 5)
    catalog.decline(0, catalog.incoming_prompt(keys, [LENGTH] * 5, None))
    assert declined == [keys]


def test_shadow_caches_see_what_is_declined() -> None:
    """Otherwise a policy that stores it would seem to miss it."""
    chosen = AdaptiveSettings.model_validate({"type": "adaptive", "sampling": 1.0})
    catalog = Catalog([AdaptivePolicy.factory(chosen, CAPACITY * LENGTH)])
    policy = catalog.policies[0]
    assert isinstance(policy, AdaptivePolicy)
    catalog.add_chain(prompt_of(1, 1), 0, [LENGTH], State.READY)
    keys = prompt_of(2, 5)
    for _ in range(3):  # The last one is still open.
        catalog.decline(0, catalog.incoming_prompt(keys, [LENGTH] * 5, None))
    assert policy.hit_rates == dict.fromkeys(CANDIDATES, 5 / 11)


def test_shadow_cache_declines_and_tells_its_policy() -> None:
    hits = declined = 0

    class Counting(ResumePolicy):
        def declined(self, prompt: IncomingPrompt) -> None:
            nonlocal declined
            declined += len(prompt.keys)
            super().declined(prompt)

    shadow = ShadowCache(Counting.factory(capacity_bytes=CAPACITY * LENGTH), CAPACITY * LENGTH)
    for turn in range(400):
        shadow.now += GAP / SESSIONS
        found = shadow.access(prompt_of(turn % SESSIONS, SESSION_CHUNKS), [LENGTH] * SESSION_CHUNKS, None)
        hits += found if turn >= 300 else 0
        shadow.access(prompt_of(10_000 + turn, SCAN_CHUNKS), [LENGTH] * SCAN_CHUNKS, None)
    assert hits == 100 * SESSION_CHUNKS
    assert declined >= 100 * (SCAN_CHUNKS - ROOM)


@pytest.mark.parametrize(("follows", "declines"), [("lru", False), ("arc", False), ("resume", True)])
def test_adaptive_declines_while_it_follows_resume(
    follows: str, declines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other candidates do. Until it has seen much, it follows the first one."""
    monkeypatch.setattr(adaptive, "CANDIDATES", {follows: CANDIDATES[follows], **CANDIDATES})
    tiers = one_tier(PLUGINS, "adaptive", 10 * LENGTH, {})
    simulated = SimulatedCache(PLUGINS, tiers, LENGTH)
    simulated.serve(1.0, prompt_of(1, 9), ChunkHints(priority=100))
    simulated.serve(2.0, prompt_of(2, 4), ChunkHints(priority=-100))
    assert len(simulated.catalog.prefix(prompt_of(1, 9))) == (9 if declines else 6)


def test_simulation_reports_what_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedCache(PLUGINS, one_tier(PLUGINS, "resume", 10 * LENGTH, {}), LENGTH)
    missed: list[Sequence[ChunkKey]] = []
    monkeypatch.setattr(simulated.catalog.policies[0], "missed", lambda keys, _: missed.append(keys))
    first = prompt_of(1, 3)
    for keys in (first, first, first + prompt_of(2, 2)):
        simulated.serve(1.0, keys)
    assert missed == [first, prompt_of(2, 2)]


def test_simulation_declines_as_the_cache_does(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedCache(PLUGINS, one_tier(PLUGINS, "resume", 10 * LENGTH, {}), LENGTH)
    declined: list[IncomingPrompt] = []
    monkeypatch.setattr(simulated.catalog.policies[0], "declined", declined.append)
    first, second = prompt_of(1, 9), prompt_of(2, 4)
    simulated.serve(1.0, first, ChunkHints(priority=100))
    simulated.serve(2.0, second, ChunkHints(priority=-100))
    assert len(simulated.catalog.prefix(first)) == 9
    assert len(simulated.catalog.prefix(second)) == 1, "there is room for one chunk"
    [rest] = declined
    assert (rest.keys, rest.parent_key) == (second[1:], second[0])


@pytest.mark.parametrize(("eviction", "again"), [("resume", 6), ("lru", 0)])
def test_simulation_offers_again_what_was_evicted_before_the_end_of_the_answer(
    eviction: str, again: int
) -> None:
    """The engine still has it. What has been stored since is old by then. Other policies never decline."""
    simulated = SimulatedCache(PLUGINS, one_tier(PLUGINS, eviction, 10 * LENGTH, {}), LENGTH)
    first, second, low = prompt_of(1, 8), prompt_of(2, 8), ChunkHints(priority=-100)
    simulated.serve(1.0, first, low)
    simulated.answer_ended(1.5, first, [], low)
    assert simulated.written == [8], "all is there, and nothing was evicted"
    simulated.serve(2.0, second, low)
    before = len(simulated.catalog.prefix(first))
    assert before == 2
    simulated.answer_ended(5000.0, first, [7], low)
    assert len(simulated.catalog.prefix(first)) == before + again
    assert (simulated.stored_again, simulated.written) == (again, [16 + again])
    assert simulated.catalog.count(0) == 10


def test_simulation_offers_again_what_was_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedCache(PLUGINS, one_tier(PLUGINS, "resume", 10 * LENGTH, {}), LENGTH)
    first, second = prompt_of(1, 9), prompt_of(2, 4)
    simulated.serve(1.0, first, ChunkHints(priority=100))
    simulated.serve(2.0, second, ChunkHints(priority=-100))
    assert (simulated.written, simulated.evicted) == ([10], [0])
    offered: list[IncomingPrompt] = []
    monkeypatch.setattr(simulated.catalog.policies[0], "declined", offered.append)
    simulated.answer_ended(3.0, second, [], ChunkHints(priority=-100))
    [rest] = offered
    assert (rest.keys, rest.now) == (second[1:], 3.0)
    assert (simulated.stored_again, simulated.written) == (0, [10])


@pytest.mark.parametrize(("eviction", "fills"), [("resume", True), ("lru", False)])
def test_simulation_fills_a_tier_that_may_decline(eviction: str, fills: bool) -> None:
    """There are no watermarks then, as in the cache."""
    tier = {"name": "ram", "type": "cpu", "capacity": 10 * LENGTH, "eviction": eviction}
    settings = Settings(tiers=[{**tier, "high_watermark": 0.5, "low_watermark": 0.25}])
    simulated = SimulatedCache(PLUGINS, configured(PLUGINS, settings, None, {}), LENGTH)
    for number in range(10):
        simulated.serve(1.0 + number, prompt_of(number, 1))
    assert (simulated.catalog.count(0) == 10) == fills
