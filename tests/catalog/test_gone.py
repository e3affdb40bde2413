"""What the catalog remembers of chunks that are in no tier."""

from __future__ import annotations

import os

import pytest

from kvtier.catalog import gone as gone_chunks
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.gone import Gone, GoneChunks
from kvtier.catalog.misses import MissReason
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from tests.rigs.clock import Clock


def keys(count: int) -> list[ChunkKey]:
    return [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]


def test_what_is_gone_is_known_with_its_tier_and_times() -> None:
    clock = Clock()
    gone = GoneChunks(1000, clock)
    [old, new] = keys(2)
    stored = gone.now()
    clock.now += 40
    gone.note([old], MissReason.EVICTED, 1, [stored])
    clock.now += 5
    assert gone.find(old) == Gone(MissReason.EVICTED, 1, kept=40.0, ago=5.0)
    assert gone.find(new) is None
    gone.note([old], MissReason.CLEARED, 0)
    assert gone.find(old) == Gone(MissReason.CLEARED, 0, kept=0.0, ago=0.0)


def test_long_times_are_known_to_a_minute() -> None:
    clock = Clock()
    gone = GoneChunks(8, clock)
    [key] = keys(1)
    stored = gone.now()
    clock.now += 7 * 86_400
    gone.note([key], MissReason.EVICTED, 0, [stored])
    found = gone.find(key)
    assert found is not None
    assert 7 * 86_400 - 60 < found.kept <= 7 * 86_400


def test_what_is_forgotten_is_unknown_and_what_was_never_there_is_not() -> None:
    gone = GoneChunks(1000)
    stored, never = keys(20_000), keys(10_000)
    gone.note(stored, MissReason.EVICTED)
    found = [gone.find(key) for key in stored]
    known = [one for one in found if one is not None and one.reason is MissReason.EVICTED]
    assert 990 <= len(known) <= 1000
    assert {one.reason for one in found if one is not None} == {MissReason.EVICTED, MissReason.UNKNOWN}
    assert None not in found
    assert sum(gone.find(key) is not None for key in never) == 0


def test_filters_are_replaced_before_they_take_what_was_never_there_for_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With the real ones, the same takes half a minute.
    monkeypatch.setattr(gone_chunks, "FILTER_BITS", gone_chunks.FILTER_BITS >> 4)
    monkeypatch.setattr(gone_chunks, "FILTER_CHUNKS", gone_chunks.FILTER_CHUNKS >> 4)
    gone = GoneChunks(8)
    for _ in range(3 * gone_chunks.FILTER_CHUNKS // 10_000):
        gone.note(keys(10_000), MissReason.EVICTED)
    never = keys(20_000)
    assert sum(gone.find(key) is not None for key in never) < 0.03 * len(never)


def test_nothing_is_remembered_with_no_room() -> None:
    gone = GoneChunks(0)
    [key] = keys(1)
    gone.note([key], MissReason.EVICTED)
    assert gone.find(key) is None


def test_the_catalog_notes_why_a_chunk_has_left_its_last_tier() -> None:
    clock = Clock()
    catalog = Catalog([LruPolicy.factory()] * 2, clock=clock, remembered=1000)
    [key, other] = keys(2)
    catalog.add(key, 0, 100, State.READY)
    catalog.add(key, 1, 100, State.READY)
    catalog.add(other, 0, 100, State.PENDING)
    clock.now += 10
    catalog.remove(key, 0, RemovalReason.EVICTED)
    assert catalog.gone.find(key) is None
    catalog.remove(key, 1, RemovalReason.EXPIRED)
    assert catalog.gone.find(key) == Gone(MissReason.EXPIRED, 1, kept=10.0, ago=0.0)
    catalog.remove(other, 0, RemovalReason.ABORTED)
    assert catalog.gone.find(other) == Gone(MissReason.STORE_FAILED, 0, kept=10.0, ago=0.0)


def test_a_copy_that_did_not_arrive_does_not_hide_that_the_chunk_was_lost() -> None:
    catalog = Catalog([LruPolicy.factory()] * 2, clock=Clock(), remembered=1000)
    [key] = keys(1)
    catalog.add(key, 1, 100, State.READY)
    catalog.add_copies([key], 0)
    catalog.remove(key, 1, RemovalReason.LOST)
    catalog.remove(key, 0, RemovalReason.ABORTED)
    found = catalog.gone.find(key)
    assert found is not None
    assert (found.reason, found.tier) == (MissReason.LOST, 1)
