"""The conformance suite, the order of this policy, and that kvtier loads the plugin."""

from __future__ import annotations

from typing import ClassVar

import pytest
from kvtier_lfu import LfuPolicy, LfuSettings

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import RemovalReason
from kvtier.errors import SettingsError
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.testing.eviction import LENGTH, EvictionConformance, prompt_of

KEYS = [prompt_of(number, 1)[0] for number in range(6)]


class TestConformance(EvictionConformance):
    policy = LfuPolicy


class TestWithoutGhosts(EvictionConformance):
    policy = LfuPolicy
    settings: ClassVar = {"ghosts": 0}


@pytest.fixture
def catalog() -> Catalog:
    return Catalog([LfuPolicy.factory(LfuSettings(type="fading_lfu", ghosts=2), 100 * LENGTH)])


def store(catalog: Catalog, *keys: ChunkKey, uses: int = 1) -> None:
    for key in keys:
        catalog.add(key, 0, LENGTH, State.READY)
        for _ in range(uses - 1):
            catalog.touch([key])


def test_rarely_used_chunks_are_evicted_first(catalog: Catalog) -> None:
    store(catalog, KEYS[0], uses=3)
    store(catalog, KEYS[1])
    store(catalog, KEYS[2], uses=2)
    assert catalog.victims(0) == [KEYS[1], KEYS[2], KEYS[0]]


def test_popularity_fades(catalog: Catalog) -> None:
    store(catalog, KEYS[0], uses=4)
    evicted = 0
    while KEYS[0] in catalog:
        store(catalog, *KEYS[1:3])
        for key in catalog.victims(0, 2 * LENGTH):
            catalog.remove(key, 0)
        evicted += 1
    assert 1 < evicted < 6


def test_uses_of_evicted_chunks_are_remembered(catalog: Catalog) -> None:
    store(catalog, KEYS[0], uses=3)
    catalog.remove(KEYS[0], 0, RemovalReason.EVICTED)
    store(catalog, *KEYS[:2])
    assert catalog.victims(0) == [KEYS[1], KEYS[0]]


@pytest.mark.parametrize("reason", [RemovalReason.CLEARED, RemovalReason.EVICTED])
def test_ghosts_are_bounded_and_only_of_evicted_chunks(catalog: Catalog, reason: RemovalReason) -> None:
    store(catalog, KEYS[0], uses=3)
    catalog.remove(KEYS[0], 0, reason)
    for key in KEYS[2:4]:
        store(catalog, key)
        catalog.remove(key, 0, RemovalReason.EVICTED)
    store(catalog, *KEYS[:2])
    assert catalog.victims(0) == KEYS[:2]


def test_kvtier_finds_it() -> None:
    plugins = Plugins.load(["kvtier-lfu"])
    assert plugins.eviction("fading_lfu") is LfuPolicy
    ram = {"name": "ram", "type": "cpu", "capacity": "1MiB"}
    (tier,) = plugins.tier_settings(
        Settings(tiers=[{**ram, "eviction": {"type": "fading_lfu", "ghosts": 7}}])
    )
    assert isinstance(Catalog([plugins.policy(tier)]).policies[0], LfuPolicy)
    with pytest.raises(SettingsError, match=r"tiers\[0\]\.eviction\.ghosts .*greater than or equal to 0"):
        plugins.tier_settings(Settings(tiers=[{**ram, "eviction": {"type": "fading_lfu", "ghosts": -1}}]))
