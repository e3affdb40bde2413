"""Transfer plans: the source tier of each chunk, the number of runs, and demotion targets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.events import Evict, Prefetch
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.tiers.planner import FIRST, TransferPlanner

LENGTH = 1 << 20
PROMPT = chunk_keys(root_key(bytes(32)), range(128), 1)
RAM, SSD, POOL, PEERS = range(4)


@dataclass
class FakeTier:
    """A tier whose costs the test sets, in seconds for any length."""

    seconds: float | None = None
    write: str = "through"
    admit: str = "first_use"
    available: bool = True
    is_durable: bool = True
    queries: int = 0

    def cost(self, length: int) -> float | None:
        self.queries += 1
        return self.seconds


class RouterSetup:
    """Four tiers, their contents, and a router."""

    def __init__(self) -> None:
        self.tiers = [FakeTier() for _ in range(4)]
        self.catalog = Catalog([LruPolicy.factory() for _ in self.tiers])
        self.planner = TransferPlanner(self.catalog, self.tiers)

    def hold(self, *tiers: int, chunks: range = range(128), state: State = State.READY) -> None:
        for at in chunks:
            for tier in tiers:
                self.catalog.add(PROMPT[at], tier, LENGTH, state)

    def costs(self, ssd: float | None, pool: float | None, peers: float | None) -> None:
        for tier, seconds in zip(self.tiers[1:], (ssd, pool, peers), strict=True):
            tier.seconds = seconds

    def runs(self, among: int = 0xFF) -> list[tuple[int, int]]:
        """Return the plan for the whole prompt: source and number of chunks of each run."""
        plan = self.planner.prefetch(Prefetch(keys=PROMPT, among=among))
        assert all(transfer.target == FIRST for transfer in plan)
        return [(transfer.source, len(transfer.keys)) for transfer in plan]


@pytest.fixture
def setup() -> RouterSetup:
    return RouterSetup()


def test_cost_of_a_single_source_is_not_queried(setup: RouterSetup) -> None:
    setup.costs(9.0, 1.0, 1.0)
    setup.hold(SSD)
    assert setup.runs() == [(SSD, 128)]
    assert not any(tier.queries for tier in setup.tiers)


def test_cost_of_each_source_is_queried_once_per_plan(setup: RouterSetup) -> None:
    setup.hold(SSD, PEERS)
    setup.hold(POOL, chunks=range(0, 128, 3))
    setup.runs()
    assert [tier.queries for tier in setup.tiers] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("costs", "source"),
    [
        ((None, None, None), SSD),
        ((None, 0.1, 0.001), SSD),  # An unmeasured tier keeps its place.
        ((1.0, None, None), SSD),
        ((1.0, None, 0.5), PEERS),
        ((1.0, 0.95, 1.05), SSD),
        ((1.0, 0.67, 0.7), SSD),
        ((1.0, 0.66, 1.0), POOL),
        ((1.0, 0.6, 0.5), POOL),  # The third is not clearly cheaper than the second.
        ((1.0, 0.9, 0.5), PEERS),
        ((1.0, 0.6, 0.3), PEERS),
        ((0.0, 0.0, 0.0), SSD),
        ((float("inf"), 0.6, 0.3), PEERS),
    ],
)
def test_configured_order_holds_unless_another_is_clearly_cheaper(
    setup: RouterSetup, costs: tuple[float | None, float | None, float | None], source: int
) -> None:
    setup.costs(*costs)
    setup.hold(SSD, POOL, PEERS)
    assert setup.runs() == [(source, 128)]


def test_unavailable_tier_is_not_a_source(setup: RouterSetup) -> None:
    setup.costs(1.0, 0.5, 0.1)
    setup.hold(SSD, POOL, PEERS, chunks=range(64))
    setup.hold(PEERS, chunks=range(64, 128))
    setup.tiers[PEERS].available = False
    assert setup.runs() == [(POOL, 64)]


def test_excluded_sources_are_not_read(setup: RouterSetup) -> None:
    setup.costs(1.0, 0.5, 0.1)
    setup.hold(SSD, POOL, PEERS, chunks=range(64))
    setup.hold(PEERS, chunks=range(64, 128))
    assert setup.runs(among=1 << RAM | 1 << SSD) == [(SSD, 64)]


def test_chunks_in_memory_or_in_flight_are_skipped(setup: RouterSetup) -> None:
    setup.hold(SSD)
    setup.hold(RAM, chunks=range(10))
    setup.hold(RAM, chunks=range(20, 30), state=State.PENDING)
    setup.catalog.remove(PROMPT[60], SSD)
    assert setup.runs() == [(SSD, 40)]


def test_prompt_is_not_split_for_a_small_difference(setup: RouterSetup) -> None:
    """At equal cost, a single chunk that only the pool holds is no reason to switch sources twice."""
    setup.costs(1.0, 1.05, None)
    setup.hold(POOL)
    setup.hold(SSD, chunks=range(50))
    setup.hold(SSD, chunks=range(51, 128))
    assert setup.runs() == [(SSD, 50), (POOL, 78)]


def test_prompt_is_split_if_worthwhile(setup: RouterSetup) -> None:
    setup.costs(1.0, 2.0, None)
    setup.hold(POOL)
    setup.hold(SSD, chunks=range(50))
    setup.hold(SSD, chunks=range(51, 128))
    assert setup.runs() == [(SSD, 50), (POOL, 1), (SSD, 77)]
    setup.costs(None, 2.0, None)
    assert setup.runs() == [(SSD, 50), (POOL, 1), (SSD, 77)], "an unmeasured source must not count as equal"


def test_three_sources_for_one_prompt(setup: RouterSetup) -> None:
    setup.hold(SSD, chunks=range(40))
    setup.hold(POOL, chunks=range(40, 80))
    setup.hold(PEERS, chunks=range(80, 120))
    assert setup.runs() == [(SSD, 40), (POOL, 40), (PEERS, 40)]


def test_next_source_is_the_cheapest_remaining(setup: RouterSetup) -> None:
    setup.costs(1.0, 0.5, 0.1)
    setup.hold(SSD, POOL, PEERS, chunks=range(3))
    setup.hold(POOL, chunks=range(3, 4))
    keys = PROMPT[:5]
    everywhere = 0b1110
    assert setup.planner.sources(keys, [everywhere] * 5) == [PEERS, PEERS, PEERS, POOL, None]
    untried = [everywhere ^ 1 << PEERS, 1 << SSD, 0, everywhere ^ 1 << POOL, everywhere]
    assert setup.planner.sources(keys, untried) == [POOL, SSD, None, None, None]
    assert setup.planner.sources([], []) == []


@given(
    st.lists(st.sets(st.sampled_from([RAM, SSD, POOL, PEERS])), max_size=12),
    st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_every_plan_is_complete_in_order_and_from_holders(
    held: list[set[int]], costs: list[float | None], available: list[bool]
) -> None:
    setup = RouterSetup()
    setup.costs(*costs)
    for tier, is_available in zip(setup.tiers[1:], available, strict=True):
        tier.available = is_available
    for at, tiers in enumerate(held):
        setup.hold(*tiers, chunks=range(at, at + 1))
    sources = [{tier for tier in tiers if tier == RAM or setup.tiers[tier].available} for tiers in held]
    prefix_length = next((at for at, tiers in enumerate(sources) if not tiers), len(held))
    plan = setup.planner.prefetch(Prefetch(keys=PROMPT[: len(held)]))
    planned = [(key, transfer.source) for transfer in plan for key in transfer.keys]
    assert [key for key, _ in planned] == [
        PROMPT[at] for at in range(prefix_length) if RAM not in sources[at]
    ]
    assert all(source in sources[PROMPT.index(key)] for key, source in planned)
    assert all(first.source != second.source for first, second in itertools.pairwise(plan))
    for key, source in planned:
        cost = setup.tiers[source].seconds
        for other in sources[PROMPT.index(key)]:
            other_cost = setup.tiers[other].seconds
            if cost is not None and other_cost is not None and other > source:
                assert not other_cost < cost * 2 / 3, "a later source is clearly cheaper"


def evicted(setup: RouterSetup, tier: int = RAM) -> dict[int | None, list[int]]:
    """Return the chunks of the prompt by their demotion target when evicted."""
    plan = setup.planner.evict(Evict(keys=PROMPT[:3], tier=tier))
    return {transfer.target: [PROMPT.index(key) for key in transfer.keys] for transfer in plan}


def test_chunks_held_only_by_peers_are_demoted(setup: RouterSetup) -> None:
    setup.tiers[PEERS].is_durable = False
    setup.tiers[PEERS].write = "never"
    setup.hold(RAM, chunks=range(3))
    setup.hold(PEERS, chunks=range(2))
    setup.hold(SSD, chunks=range(1))
    assert evicted(setup) == {None: [0], SSD: [1, 2]}
    assert evicted(setup, SSD) == {POOL: [0, 1, 2]}
    setup.hold(POOL, chunks=range(3))
    assert evicted(setup) == {None: [0, 1, 2]}


def test_chunks_without_a_demotion_target_are_dropped(setup: RouterSetup) -> None:
    for tier in setup.tiers:
        tier.write = "never"
    setup.tiers[PEERS].is_durable = False
    setup.hold(RAM, PEERS, chunks=range(3))
    assert evicted(setup) == {None: [0, 1, 2]}
