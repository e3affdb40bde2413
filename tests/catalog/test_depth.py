"""The setting `depth`: what takes longer to compute again is worth more."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.adaptive import AdaptivePolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.observability.whatif.miniature import Miniature
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.testing.eviction import LENGTH, EvictionConformance, prompt_of
from tests.catalog.one_tier import OneTier, ResumeTier

DEEP = 4
LEVELS = {1: 0, 3: 1, 5: 1, 8: 2, 15: 2, 28: 3, 1000: 3}
"""How often the worth of a prompt is doubled, by its chunks: the logarithm of 1 + chunks / 4, rounded."""


class TestResume(EvictionConformance):
    policy = ResumePolicy
    settings: ClassVar = {"depth": 2}


class TestAdaptive(EvictionConformance):
    policy = AdaptivePolicy
    settings: ClassVar = {"depth": 2, "window": 100, "sampling": 1.0}


@pytest.mark.parametrize(("chunks", "level"), LEVELS.items())
@pytest.mark.parametrize("priority", [0, 100, -100])
def test_worth_doubles_with_the_time_to_compute(chunks: int, level: int, priority: int) -> None:
    flat, deep = ResumeTier(2000), ResumeTier(2000, depth=DEEP)
    keys = prompt_of(1, chunks)
    for tier in (flat, deep):
        tier.ask(keys, ChunkHints(priority=priority))
    assert deep.worth(keys[-1]) == pytest.approx(2**level * flat.worth(keys[-1]))
    for tier in (flat, deep):
        tier.now += 10
        tier.ask(keys)
        tier.end(keys, 1)
    assert deep.visit(keys[-1])[1:] == flat.visit(keys[-1])[1:], "when it comes back is the same"
    assert deep.worth(keys[-1]) == pytest.approx(2**level * flat.worth(keys[-1]))


def test_depth_counts_from_the_beginning_of_the_prompt() -> None:
    """Also behind chunks that another prompt has used since."""
    flat, deep, keys = ResumeTier(100), ResumeTier(100, depth=DEEP), prompt_of(1, 28)
    for tier in (flat, deep):
        tier.ask(keys[:14])
        tier.ask(keys)
    assert deep.worth(keys[-1]) == 8 * flat.worth(keys[-1])
    for tier in (flat, deep):
        tier.ask(keys[:1])
        assert tier.visit(keys[0]).held == 1
    assert deep.worth(keys[0]) == flat.worth(keys[0])
    assert deep.worth(keys[-1]) == 8 * flat.worth(keys[-1]), "its end is as deep as before"


@pytest.mark.parametrize("depth", [0, 8])
def test_the_shorter_of_two_equal_prompts_leaves_first(depth: int) -> None:
    """8 to 15 new chunks are of one class. Without depth the older one leaves, and with it the shorter."""
    tier = ResumeTier(25, depth=depth)
    long, short = prompt_of(1, 15), prompt_of(2, 8)
    tier.ask(long)
    tier.now += 0.1
    tier.ask(short)
    [victim] = tier.catalog.victims(0, LENGTH)
    assert victim == (short if depth else long)[-1]


def test_deep_prompt_is_not_declined_for_short_ones() -> None:
    """One of 3 chunks, whose priority halves its worth, is worth as much as those of 2 only if it is deep."""
    for depth in (0, 6):
        tier = ResumeTier(20, declines=True, depth=depth)
        for number in range(10):
            tier.ask(prompt_of(number, 2))
            tier.now += 0.1
        new = prompt_of(100, 3)
        tier.ask(new, ChunkHints(priority=-50))
        assert (new[-1] in tier.catalog) == (depth > 0)


@pytest.mark.parametrize("policy", [ResumePolicy, AdaptivePolicy])
def test_walk_to_the_beginning_is_bounded(policy: type[EvictionPolicy]) -> None:
    """Prompts may be long: from where it decides nothing more, depth is not counted."""
    tier = OneTier(policy, 20_000, depth=1)
    candidate = tier.policy._orders[-1] if isinstance(tier.policy, AdaptivePolicy) else tier.policy
    assert isinstance(candidate, ResumePolicy)
    keys = prompt_of(1, 10_000)
    tier.ask(keys)
    row = tier.catalog.row(keys[20])
    assert row is not None
    # Were it walked, this cycle would never end.
    tier.catalog.columns.parents[row - 1] = row
    tail = tier.catalog.row(keys[-1])
    assert tail is not None
    assert candidate._deeper(tail) == 3
    tier.catalog.columns.parents[row - 1] = row - 2


def test_adaptive_prefers_who_saves_more_time() -> None:
    """A hit of a prompt of 40 chunks counts for as much as it takes: the first chunk is the unit."""
    tier = OneTier(AdaptivePolicy, 1000, sampling=1.0, depth=10)
    for number in (1, 1, 2):
        tier.ask(prompt_of(number, 40))
    while tier.policy._open:
        tier.policy._observe_oldest()
    one = 40 + 40 * 40 / 20
    assert tier.policy._asked == 3 * one
    assert tier.policy.hit_rates == pytest.approx({"lru": 1 / 3, "arc": 1 / 3, "resume": 1 / 3})
    tier.ask([*prompt_of(2, 40)[:10], *prompt_of(3, 40)])
    while tier.policy._open:
        tier.policy._observe_oldest()
    found, asked = 10 + 10 * 10 / 20, 50 + 50 * 50 / 20
    assert tier.policy.hit_rates["lru"] == pytest.approx((one + found) / (3 * one + asked))


def test_samples_have_their_part_of_the_depth() -> None:
    tier = OneTier(AdaptivePolicy, 100_000, depth=100)
    tier.ask(prompt_of(1, 4))
    for shadow in tier.policy._shadows:
        [candidate] = shadow._catalog.policies
        if isinstance(candidate, ResumePolicy):
            assert candidate._depth == pytest.approx(2.048, rel=0.01), "2,048 of 100,000 chunks"
    assert tier.policy._shadow_depth == pytest.approx(2.048, rel=0.01)
    settings = Settings.model_validate(
        {"tiers": [{"name": "ram", "type": "cpu", "capacity": 1 << 20, "eviction": {
            "type": "resume", "depth": 100}}]}
    )  # fmt: skip
    plugins = Plugins.load([])
    miniature = Miniature(plugins, settings, plugins.tier_settings(settings), LENGTH, 0.25)  # type: ignore[arg-type]
    [policy] = miniature.cache.catalog.policies
    assert isinstance(policy, ResumePolicy)
    assert policy._depth == 25
