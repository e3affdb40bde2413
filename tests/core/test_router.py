"""Plans: from which tier each chunk is read, in how few runs, and what eviction may drop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog import Catalog, State
from kvtier.events import Evict, Prefetch
from kvtier.eviction.lru import LruPolicy
from kvtier.keys import chunk_keys, root_key
from kvtier.router import FIRST, Router

LENGTH = 1 << 20
PROMPT = chunk_keys(root_key(bytes(32)), range(128), 1)
RAM, SSD, POOL, PEERS = range(4)


@dataclass
class FakeTier:
    """A tier whose costs the test sets, in seconds for any length."""

    seconds: float | None = None
    write: str = "through"
    available: bool = True
    keeps: bool = True
    asked: int = 0

    def cost(self, length: int) -> float | None:
        self.asked += 1
        return self.seconds


class House:
    """Four tiers, what they hold, and their router."""

    def __init__(self) -> None:
        self.tiers = [FakeTier() for _ in range(4)]
        self.catalog = Catalog([LruPolicy() for _ in self.tiers])
        self.router = Router(self.catalog, self.tiers)

    def hold(self, *tiers: int, chunks: range = range(128), state: State = State.READY) -> None:
        for at in chunks:
            for tier in tiers:
                self.catalog.add(PROMPT[at], tier, LENGTH, state)

    def costs(self, ssd: float | None, pool: float | None, peers: float | None) -> None:
        for tier, seconds in zip(self.tiers[1:], (ssd, pool, peers), strict=True):
            tier.seconds = seconds

    def runs(self, among: int = 0xFF) -> list[tuple[int, int]]:
        """The plan for the whole prompt: the source and the number of chunks of each run."""
        plan = self.router.prefetch(Prefetch(keys=PROMPT, among=among))
        assert all(transfer.target == FIRST for transfer in plan)
        return [(transfer.source, len(transfer.keys)) for transfer in plan]


@pytest.fixture
def house() -> House:
    return House()


def test_one_source_is_not_asked_what_it_costs(house: House) -> None:
    house.costs(9.0, 1.0, 1.0)
    house.hold(SSD)
    assert house.runs() == [(SSD, 128)]
    assert not any(tier.asked for tier in house.tiers)


def test_each_is_asked_once_a_plan(house: House) -> None:
    house.hold(SSD, PEERS)
    house.hold(POOL, chunks=range(0, 128, 3))
    house.runs()
    assert [tier.asked for tier in house.tiers] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("costs", "source"),
    [
        ((None, None, None), SSD),
        ((None, 0.1, 0.001), SSD),  # What has not been measured keeps its place.
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
def test_the_place_in_the_settings_stands_unless_another_is_clearly_cheaper(
    house: House, costs: tuple[float | None, float | None, float | None], source: int
) -> None:
    house.costs(*costs)
    house.hold(SSD, POOL, PEERS)
    assert house.runs() == [(source, 128)]


def test_what_does_not_answer_is_no_source(house: House) -> None:
    house.costs(1.0, 0.5, 0.1)
    house.hold(SSD, POOL, PEERS, chunks=range(64))
    house.hold(PEERS, chunks=range(64, 128))
    house.tiers[PEERS].available = False
    assert house.runs() == [(POOL, 64)]


def test_sources_that_are_ruled_out_are_not_read(house: House) -> None:
    house.costs(1.0, 0.5, 0.1)
    house.hold(SSD, POOL, PEERS, chunks=range(64))
    house.hold(PEERS, chunks=range(64, 128))
    assert house.runs(among=1 << RAM | 1 << SSD) == [(SSD, 64)]


def test_what_is_in_memory_or_on_its_way_there_is_passed_over(house: House) -> None:
    house.hold(SSD)
    house.hold(RAM, chunks=range(10))
    house.hold(RAM, chunks=range(20, 30), state=State.PENDING)
    house.catalog.remove(PROMPT[60], SSD)
    assert house.runs() == [(SSD, 40)]


def test_a_prompt_is_not_cut_for_a_small_difference(house: House) -> None:
    """One chunk that only the pool holds is no reason to go there and back, where both cost the same."""
    house.costs(1.0, 1.05, None)
    house.hold(POOL)
    house.hold(SSD, chunks=range(50))
    house.hold(SSD, chunks=range(51, 128))
    assert house.runs() == [(SSD, 50), (POOL, 78)]


def test_a_prompt_is_cut_where_that_is_worth_it(house: House) -> None:
    house.costs(1.0, 2.0, None)
    house.hold(POOL)
    house.hold(SSD, chunks=range(50))
    house.hold(SSD, chunks=range(51, 128))
    assert house.runs() == [(SSD, 50), (POOL, 1), (SSD, 77)]
    house.costs(None, 2.0, None)
    assert house.runs() == [(SSD, 50), (POOL, 1), (SSD, 77)], "nor is it known that the pool is as good"


def test_three_sources_for_one_prompt(house: House) -> None:
    house.hold(SSD, chunks=range(40))
    house.hold(POOL, chunks=range(40, 80))
    house.hold(PEERS, chunks=range(80, 120))
    assert house.runs() == [(SSD, 40), (POOL, 40), (PEERS, 40)]


def test_the_next_source_is_the_cheapest_of_those_that_are_left(house: House) -> None:
    house.costs(1.0, 0.5, 0.1)
    house.hold(SSD, POOL, PEERS, chunks=range(3))
    house.hold(POOL, chunks=range(3, 4))
    keys = PROMPT[:5]
    everywhere = 0b1110
    assert house.router.sources(keys, [everywhere] * 5) == [PEERS, PEERS, PEERS, POOL, None]
    untried = [everywhere ^ 1 << PEERS, 1 << SSD, 0, everywhere ^ 1 << POOL, everywhere]
    assert house.router.sources(keys, untried) == [POOL, SSD, None, None, None]
    assert house.router.sources([], []) == []


@given(
    st.lists(st.sets(st.sampled_from([RAM, SSD, POOL, PEERS])), max_size=12),
    st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_every_plan_is_complete_in_order_and_from_those_that_hold(
    held: list[set[int]], costs: list[float | None], available: list[bool]
) -> None:
    house = House()
    house.costs(*costs)
    for tier, answers in zip(house.tiers[1:], available, strict=True):
        tier.available = answers
    for at, tiers in enumerate(held):
        house.hold(*tiers, chunks=range(at, at + 1))
    sources = [{tier for tier in tiers if tier == RAM or house.tiers[tier].available} for tiers in held]
    reach = next((at for at, tiers in enumerate(sources) if not tiers), len(held))
    plan = house.router.prefetch(Prefetch(keys=PROMPT[: len(held)]))
    planned = [(key, transfer.source) for transfer in plan for key in transfer.keys]
    assert [key for key, _ in planned] == [PROMPT[at] for at in range(reach) if RAM not in sources[at]]
    assert all(source in sources[PROMPT.index(key)] for key, source in planned)
    assert all(one.source != two.source for one, two in itertools.pairwise(plan))
    for key, source in planned:
        cost = house.tiers[source].seconds
        for other in sources[PROMPT.index(key)]:
            other_cost = house.tiers[other].seconds
            if cost is not None and other_cost is not None and other > source:
                assert not other_cost < cost * 2 / 3, "no later one is clearly cheaper"


def evicted(house: House, tier: int = RAM) -> dict[int | None, list[int]]:
    """Which chunks of the prompt go where when they are evicted."""
    plan = house.router.evict(Evict(keys=PROMPT[:3], tier=tier))
    return {transfer.target: [PROMPT.index(key) for key in transfer.keys] for transfer in plan}


def test_what_only_peers_hold_is_demoted_all_the_same(house: House) -> None:
    house.tiers[PEERS].keeps = False
    house.tiers[PEERS].write = "never"
    house.hold(RAM, chunks=range(3))
    house.hold(PEERS, chunks=range(2))
    house.hold(SSD, chunks=range(1))
    assert evicted(house) == {None: [0], SSD: [1, 2]}
    assert evicted(house, SSD) == {POOL: [0, 1, 2]}
    house.hold(POOL, chunks=range(3))
    assert evicted(house) == {None: [0, 1, 2]}


def test_where_nobody_takes_it_it_goes(house: House) -> None:
    for tier in house.tiers:
        tier.write = "never"
    house.tiers[PEERS].keeps = False
    house.hold(RAM, PEERS, chunks=range(3))
    assert evicted(house) == {None: [0, 1, 2]}
