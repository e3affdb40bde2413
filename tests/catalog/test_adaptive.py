"""The adaptive policy: it follows the candidate whose shadow cache has the highest hit rate."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.policies.adaptive import (
    CANDIDATES,
    OPEN_REQUESTS,
    AdaptivePolicy,
    AdaptiveSettings,
    ShadowCache,
)
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.sampling import POLICY_SAMPLE, SAMPLED
from kvtier.testing.eviction import LENGTH, EvictionConformance, prompt_of
from tests.catalog.one_tier import OneTier


class TestConformance(EvictionConformance):
    policy = AdaptivePolicy


class TestSmallShadows(EvictionConformance):
    policy = AdaptivePolicy
    settings: ClassVar = {"shadow_chunks": 64, "window": 100}


Cache = OneTier[AdaptivePolicy]


def cache_of(capacity: int, **settings: float) -> Cache:
    return OneTier(AdaptivePolicy, capacity, seconds_per_prompt=1.0, **{"sampling": 1.0, **settings})


def loop(cache: Cache, prompts: int, rounds: int) -> None:
    for _ in range(rounds):
        for number in range(prompts):
            cache.ask(prompt_of(number, 5))


def test_a_loop_that_does_not_fit_is_not_left_to_lru() -> None:
    """LRU hits nothing of a loop over twice its capacity."""
    cache = cache_of(200, window=1000)
    loop(cache, 80, 30)
    assert cache.policy.follows == "resume"
    assert cache.rate_of(lambda: loop(cache, 80, 5)) > 0.3
    assert cache.policy.hit_rates["lru"] < 0.1


@pytest.mark.parametrize("active", range(len(CANDIDATES)))
def test_a_search_without_eviction_changes_no_order(active: int) -> None:
    cache = cache_of(100)
    for number in range(5):
        cache.ask(prompt_of(number, 2))
    cache.policy._active = active
    first = cache.catalog.victims(0, 6 * LENGTH)
    assert len(first) == 6
    assert cache.catalog.victims(0, 6 * LENGTH) == first


def test_it_goes_back_when_the_traffic_changes() -> None:
    """Each prompt is asked for twice, 20 prompts apart: LRU hits each second time."""
    cache = cache_of(200, window=1000)
    loop(cache, 80, 30)
    before = cache.policy.hit_rates

    def pairs() -> None:
        for number in range(1000):
            cache.ask(prompt_of(1000 + number, 5))
            if number >= 20:
                cache.ask(prompt_of(1000 + number - 20, 5))

    pairs()
    rates = cache.policy.hit_rates
    assert rates["lru"] > before["lru"]
    assert rates[cache.policy.follows] >= max(rates.values()) - 0.01


def test_shadow_caches_see_a_part_of_the_chunks_also_in_small_tiers() -> None:
    cache = cache_of(2000, sampling=0.25, window=100_000)
    for number in range(600):
        cache.ask(prompt_of(number, 20))
    part = cache.policy._asked / cache.asked
    assert 0.2 < part < 0.3


def test_tier_of_few_chunks_is_sampled_enough_to_decide() -> None:
    cache = cache_of(120, sampling=0.25)
    assert cache.policy._threshold == 0
    loop(cache, 1, 1)
    assert cache.policy._threshold == SAMPLED
    larger = cache_of(2000, sampling=0.25, window=1000)
    loop(larger, 800, 4)  # LRU hits nothing.
    assert larger.policy._window == 250, "a quarter in place of all that 2,048 chunks are"
    assert larger.policy.follows != "lru"


def test_large_leads_decide_before_much_is_known() -> None:
    """The half of a loop that fits is soon 500 hits more, which is what a whole window must have."""
    cache = cache_of(200, window=100_000)
    loop(cache, 80, 3)
    assert 0 < cache.policy.hit_rates["resume"] * cache.policy._asked < 500
    assert cache.policy.follows == "lru"
    loop(cache, 80, 7)
    assert cache.asked < 100_000 / 8
    assert cache.policy.follows == "resume"


def test_small_leads_change_nothing() -> None:
    cache = cache_of(200, window=1000, margin=0.1)
    for number in range(400):
        cache.ask(prompt_of(number % 45, 5))
    rates = cache.policy.hit_rates
    assert cache.policy.follows == "lru" or rates[cache.policy.follows] - rates["lru"] > 0.05


@pytest.mark.parametrize("parts", [1, SAMPLED // 50, SAMPLED // 2, SAMPLED])
def test_sample_has_its_part_of_the_keys(parts: int) -> None:
    keys = [key for number in range(200) for key in prompt_of(number, 50)]
    expected = len(keys) * parts / SAMPLED
    assert abs(sum(POLICY_SAMPLE.of(keys, parts)) - expected) <= 5 * expected**0.5 + 1e-9


def test_shadow_cache_of_a_sample_hits_as_often_as_the_whole() -> None:
    """LRU over 2,000 chunks, and over a tenth of both the chunks and the capacity."""
    rates = []
    for parts in (SAMPLED, SAMPLED // 10):
        shadow = ShadowCache(LruPolicy.factory(), 2000 * LENGTH * parts // SAMPLED)
        hits = asked = 0
        for step in range(6000):
            number = step * 7919 % 350 if step % 3 else step % 40
            keys = prompt_of(number, 20)
            keys = [key for key, chosen in zip(keys, POLICY_SAMPLE.of(keys, parts), strict=True) if chosen]
            if keys:
                hits += shadow.access(keys, [LENGTH] * len(keys), None)
                asked += len(keys)
        rates.append(hits / asked)
    assert rates[1] == pytest.approx(rates[0], abs=0.05)
    assert 0.1 < rates[0] < 0.9


def test_shadow_cache_counts_only_a_prefix() -> None:
    shadow = ShadowCache(LruPolicy.factory(), 100 * LENGTH)
    keys = prompt_of(1, 6)
    assert shadow.access(keys, [LENGTH] * 6, None) == 0
    assert shadow.access(keys, [LENGTH] * 6, None) == 6
    shadow.remove(keys[3:4])
    assert shadow.access(keys, [LENGTH] * 6, None) == 3
    assert shadow.access(keys[3:], [LENGTH] * 3, keys[2]) == 3
    assert shadow.access(keys[3:], [LENGTH] * 3, prompt_of(2, 1)[0]) == 0


def test_of_prompts_longer_than_the_shadow_cache_the_beginning_is_stored() -> None:
    shadow = ShadowCache(LruPolicy.factory(), 5 * LENGTH)
    assert shadow.access(prompt_of(1, 6), [LENGTH] * 6, None) == 0
    assert shadow.access(prompt_of(1, 6), [LENGTH] * 6, None) == 5
    assert shadow.access(prompt_of(2, 3), [LENGTH] * 3, None) == 0
    assert shadow.access(prompt_of(1, 6), [LENGTH] * 6, None) == 2


def test_rows_that_another_tier_frees_and_reuses_do_not_mix_requests() -> None:
    """A prefix of a slower tier is used here; its rows are free before any of them is added."""
    make = AdaptivePolicy.factory(AdaptiveSettings(type="adaptive", sampling=1.0), 1000 * LENGTH)
    catalog = Catalog([make, LruPolicy.factory()])
    first, second = prompt_of(0, 1), prompt_of(1, 3)
    catalog.add_chain(prompt_of(9, 1), 0, [LENGTH], State.READY)
    catalog.add_chain(second, 1, [LENGTH] * 3, State.READY)
    catalog.touch(second)
    row = catalog.row(second[2])
    catalog.remove_all([second[2], second[0], second[1]], 1)
    catalog.add_chain(first, 0, [LENGTH], State.READY)
    for key, parent in zip(second, [None, *second], strict=False):
        catalog.add(key, 0, LENGTH, State.READY, parent)
    assert catalog.row(second[1]) == row
    catalog.remove_all([second[2], first[0]], 0)
    for number in range(2 * OPEN_REQUESTS):
        catalog.add_chain(prompt_of(10 + number, 1), 0, [LENGTH], State.READY)
    assert len(catalog) == 3 + 2 * OPEN_REQUESTS
    assert set(second[:2]) < set(catalog.victims(0))


def test_without_a_capacity_there_are_no_shadow_caches() -> None:
    catalog = Catalog([AdaptivePolicy.factory(AdaptiveSettings(type="adaptive"), 0)])
    catalog.add_chain(prompt_of(1, 3), 0, [LENGTH] * 3, State.READY)
    catalog.touch(prompt_of(1, 3))
    policy = catalog.policies[0]
    assert isinstance(policy, AdaptivePolicy)
    assert (policy.follows, policy._shadows, policy._open) == ("lru", [], {})


def test_chunks_on_their_way_from_another_tier_are_asked_for_once() -> None:
    make = AdaptivePolicy.factory(AdaptiveSettings(type="adaptive", sampling=1.0), 1000 * LENGTH)
    catalog = Catalog([make, LruPolicy.factory()])
    policy = catalog.policies[0]
    assert isinstance(policy, AdaptivePolicy)
    catalog.add_chain(prompt_of(0, 1), 0, [LENGTH], State.READY)
    keys = prompt_of(1, 10)
    catalog.add_chain(keys, 1, [LENGTH] * 10, State.READY)
    catalog.touch(keys)
    catalog.add_copies(keys, 0)
    for number in range(OPEN_REQUESTS):
        catalog.add_chain(prompt_of(2 + number, 1), 0, [LENGTH], State.READY)
    assert policy._asked == 1 + 10


def test_state_of_requests_is_bounded_and_forgets_reused_rows() -> None:
    cache = cache_of(50)
    for number in range(2000):
        cache.ask(prompt_of(number, 5))
    assert len(cache.policy._open) <= OPEN_REQUESTS
    assert cache.policy._asked > 0
    rates = cache.policy.hit_rates
    assert set(rates) == set(CANDIDATES)
    assert max(rates.values()) == 0.0
    held = cache.catalog.keys(0)
    cache.catalog.remove_all(held, 0, RemovalReason.CLEARED)
    assert not cache.catalog.keys(0)
