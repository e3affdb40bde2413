"""The setting `depth`: what takes longer to compute again is worth more."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import ClassVar

import pytest
from pydantic import ValidationError

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.adaptive import AdaptivePolicy, AdaptiveSettings
from kvtier.catalog.policies.gdsf import GdsfPolicy, GdsfSettings
from kvtier.catalog.policies.resume import GHOST, KINDS, ResumePolicy, ResumeSettings
from kvtier.catalog.policies.returns import AGES
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.miniature import Miniature
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings
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
    assert candidate._deeper(candidate._depth_of(tail)) == 3
    tier.catalog.columns.parents[row - 1] = row - 2


def test_hits_of_adaptive_count_by_the_time_that_they_save() -> None:
    """A hit of a prompt of 40 chunks counts for as much as it takes: the first chunk is the unit."""
    tier = OneTier(AdaptivePolicy, 1000, sampling=1.0, depth=10)
    for number in (1, 1, 2):
        tier.ask(prompt_of(number, 40))
    while tier.policy._open:
        tier.policy._observe_oldest()
    one = 40 + 40 * 39 / 20
    assert tier.policy._asked == 3 * one
    assert tier.policy.hit_rates == pytest.approx({"lru": 1 / 3, "arc": 1 / 3, "resume": 1 / 3})
    tier.ask([*prompt_of(2, 40)[:10], *prompt_of(3, 40)])
    while tier.policy._open:
        tier.policy._observe_oldest()
    found, asked = 10 + 10 * 9 / 20, 50 + 50 * 49 / 20
    assert tier.policy.hit_rates["lru"] == pytest.approx((one + found) / (3 * one + asked))


def test_samples_have_their_part_of_the_depth() -> None:
    tier = OneTier(AdaptivePolicy, 100_000, depth=100)
    tier.ask(prompt_of(1, 4))
    policies = [policy for shadow in tier.policy._shadows for policy in shadow._catalog.policies]
    [candidate] = [policy for policy in policies if isinstance(policy, ResumePolicy)]
    assert candidate._depth == tier.policy._shadow_depth == pytest.approx(2.048, rel=0.01)


@pytest.mark.parametrize(
    ("policy", "depth"), [("resume", 100.0), ("gdsf", 100.0), ("gdsf", None), ("lru", None)]
)
def test_estimates_scale_the_depth_of_a_policy_that_has_one(policy: str, depth: float | None) -> None:
    eviction = {"type": policy} if depth is None else {"type": policy, "depth": depth}
    tier = {"name": "ram", "type": "cpu", "capacity": 1 << 20, "eviction": eviction}
    settings, plugins = Settings(tiers=[tier]), Plugins.load([])
    [described] = plugins.tier_settings(settings)
    assert isinstance(described, LocalTierSettings)
    [made] = Miniature(plugins, settings, [described], LENGTH, 0.25).cache.catalog.policies
    if policy != "lru":
        assert isinstance(made, ResumePolicy | GdsfPolicy)
        assert made._depth == (depth or GdsfSettings(type="gdsf").depth) / 4


@pytest.mark.parametrize("depth", [inf, nan, -1.0])
def test_useless_depths_are_refused(depth: float) -> None:
    for settings in (ResumeSettings, AdaptiveSettings):
        with pytest.raises(ValidationError, match="depth"):
            settings.model_validate({"type": "", "depth": depth})


def test_smallest_depth_is_one_at_which_all_are_deep() -> None:
    tier = ResumeTier(100, depth=5e-324)
    tier.ask(prompt_of(1, 3))
    assert tier.policy._deeper(0) == 0
    assert tier.policy._deeper(1) == 3


def test_depth_of_a_prompt_that_is_declined_in_parts() -> None:
    """As engines offer them: behind a declined part, the next one has no parent with a row."""
    tier, keys = ResumeTier(8, declines=True, depth=DEEP), prompt_of(1, 12)
    tier.ask(prompt_of(2, 8), ChunkHints(priority=100))
    low = ChunkHints(priority=-100)
    tier.catalog.report_missed(keys)
    for at in (0, 5, 10):
        part = keys[at : at + 5]
        prompt = tier.catalog.incoming_prompt(part, [LENGTH] * len(part), keys[at - 1] if at else None, low)
        assert tier.catalog.victims(0, len(part) * LENGTH, prompt=prompt) == []
        tier.catalog.decline(0, prompt)
        [visit] = set(tier.visits.ghosts.values())
        assert tier.visits.rings[visit] % GHOST // (AGES * KINDS) == 2, (
            "as for all 12, and priority -100 is level 0"
        )


class Finds:
    """In place of a shadow cache: it finds so many chunks of short prompts, and of long ones."""

    def __init__(self, short: int, long: int) -> None:
        self.now, self._short, self._long = 0.0, short, long

    def access(self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: ChunkKey | None) -> int:
        return self._short if len(keys) == 10 else self._long


@pytest.mark.parametrize(("depth", "policy"), [(0, "lru"), (10, "resume")])
def test_adaptive_follows_who_saves_more_time(depth: float, policy: str) -> None:
    """All of four short prompts are 40 hits, most of a long one 30; but those take longer to compute."""
    tier = OneTier(AdaptivePolicy, 1000, sampling=1.0, window=1000, depth=depth)
    tier.ask(prompt_of(1000, 1))
    tier.policy._shadows[:] = [Finds(10, 0), Finds(0, 0), Finds(0, 30)]  # type: ignore[list-item]
    for number in range(40):
        tier.ask(prompt_of(number, 10 if number % 5 else 40))
    while tier.policy._open:
        tier.policy._observe_oldest()
    assert tier.policy.follows == policy
    assert tier.policy._seen == 1 + 8 * 80, "the window counts chunks, whatever they are worth"


def test_one_long_prompt_does_not_decide() -> None:
    """It is worth 4,000 of the 20,000 chunks of a window, but it has 99."""
    tier = OneTier(AdaptivePolicy, 1000, sampling=1.0, depth=1.25)
    tier.ask(prompt_of(1000, 1))
    tier.policy._shadows[:] = [Finds(0, 0), Finds(0, 0), Finds(0, 12)]  # type: ignore[list-item]
    tier.ask(prompt_of(0, 99))
    while tier.policy._open:
        tier.policy._observe_oldest()
    assert tier.policy._asked > 20_000 / 8
    assert tier.policy.follows == "lru"
