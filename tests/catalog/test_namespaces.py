"""Generations: what was stored or copied before a clear is distinguished from what was stored since."""

from __future__ import annotations

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.table import Namespaces
from kvtier.memory.keys import chunk_keys, root_key

KEYS = chunk_keys(root_key(bytes(32)), range(4), 1)
OURS, OTHER = b"a" * 32, b"b" * 32


@pytest.fixture
def catalog() -> Catalog:
    return Catalog([LruPolicy.factory(), LruPolicy.factory()])


def test_namespaces_are_numbered_densely_from_one() -> None:
    namespaces = Namespaces()
    assert (namespaces.number(b""), namespaces.find(OURS)) == (0, -1)
    assert [namespaces.number(name) for name in (OURS, OTHER, OURS)] == [1, 2, 1]
    assert (namespaces.find(OTHER), namespaces.generation(1), namespaces.generation(2)) == (2, 0, 0)


def test_generation_is_that_of_one_namespace() -> None:
    namespaces = Namespaces()
    ours, other = namespaces.number(OURS), namespaces.number(OTHER)
    assert namespaces.begin_generation(ours) == namespaces.generation(ours) == 1
    assert (namespaces.generation_of(OURS), namespaces.generation(other)) == (1, 0)
    assert not namespaces.is_reset(OURS), "clearing chunks does not reset the model"


def test_reset_of_one_or_of_all_namespaces() -> None:
    namespaces = Namespaces()
    other, before = namespaces.number(OTHER), namespaces.generation_of(OURS)
    namespaces.reset(OURS)
    assert namespaces.generation_of(OURS) != before
    assert (namespaces.is_reset(OURS), namespaces.is_reset(OTHER)) == (True, False)
    assert namespaces.generation(other) == 0
    unknown = namespaces.generation_of(b"c" * 32)
    namespaces.reset(None)
    assert (namespaces.is_reset(OTHER), namespaces.generation(other)) == (True, 1)
    assert namespaces.is_reset(b"c" * 32)
    assert namespaces.generation_of(b"c" * 32) != unknown
    number = namespaces.number(b"c" * 32)
    assert namespaces.generation(number) == namespaces.generation_of(b"c" * 32), "known or not, the same"


def test_chunk_keeps_its_generation_until_it_is_cleared(catalog: Catalog) -> None:
    rows = catalog.add_chain(KEYS, 0, [100] * 4, State.PENDING, None, OURS)
    assert catalog.generations(rows) == [0] * 4
    catalog.begin_generation(KEYS[2:])
    assert [catalog.generation(key) for key in KEYS] == [0, 0, 1, 1]
    catalog.set_ready(KEYS[0], 0)
    catalog.add(KEYS[0], 1, 100, State.READY)
    assert catalog.generation(KEYS[0]) == 0, "a copy in another tier has the generation of the chunk"
    catalog.begin_generation([KEYS[1], b"x" * 32])
    assert [catalog.generation(key) for key in KEYS] == [0, 2, 1, 1]


def test_chunk_stored_after_a_clear_has_the_new_generation(catalog: Catalog) -> None:
    catalog.add(KEYS[0], 0, 100, State.READY, None, OURS)
    catalog.add(KEYS[1], 0, 100, State.READY, None, OTHER)
    catalog.begin_generation(KEYS[:1])
    catalog.remove(KEYS[0], 0)
    assert catalog.generation(KEYS[0]) == -1
    catalog.add(KEYS[0], 0, 100, State.READY, None, OURS)
    catalog.add(KEYS[2], 1, 100, State.READY, None, OTHER)
    assert [catalog.generation(key) for key in KEYS[:3]] == [1, 0, 0]


def test_parent_that_comes_back_has_the_new_generation(catalog: Catalog) -> None:
    catalog.add_chain(KEYS[:2], 0, [100] * 2, State.READY, None, OURS)
    catalog.begin_generation(KEYS[:1])
    catalog.remove(KEYS[0], 0)
    assert catalog.generation(KEYS[0]) == -1, "only its child is held"
    catalog.add(KEYS[0], 0, 100, State.READY, None, OURS)
    assert catalog.generation(KEYS[0]) == 1
