"""With and without the native core, every policy evicts the same chunks of the same traffic."""

from __future__ import annotations

import random

import pytest

from kvtier import native
from kvtier.catalog import kvtier_eviction_policies
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import EvictionPolicy
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH, prompt_of

CHUNKS = 300
POLICIES = kvtier_eviction_policies()


def evicted(policy: type[EvictionPolicy]) -> list[ChunkKey]:
    """Return what a tier of :data:`CHUNKS` chunks evicts while sessions come, return, grow and end."""
    chance, now = random.Random(7), 1000.0
    catalog = Catalog([policy.factory(capacity_bytes=CHUNKS * LENGTH)], clock=lambda: now)
    sessions = list(range(30))
    lengths = dict.fromkeys(sessions, 4)
    gone: list[ChunkKey] = []
    for _ in range(600):
        now += chance.expovariate(1.0)
        at = chance.randrange(len(sessions))
        if chance.random() < 0.05:
            sessions[at] = len(lengths)
            lengths[sessions[at]] = chance.randint(1, 30)
        number = sessions[at]
        lengths[number] = min(40, lengths[number] + chance.randint(0, 3))
        keys = prompt_of(number % 5, 2) + prompt_of(1000 + number, lengths[number])
        rows, _ = catalog.prefix_rows(keys)
        catalog.touch_rows(rows)
        missing, parent = keys[len(rows) :], keys[len(rows) - 1] if rows else None
        late = None
        needed = catalog.used(0) + len(missing) * LENGTH - CHUNKS * LENGTH
        if needed > 0:
            leased = set(rows)
            prompt = catalog.incoming_prompt(missing, [LENGTH] * len(missing), parent)
            victims = catalog.victims(0, needed, leased.__contains__, prompt=prompt)
            catalog.remove_all(victims, 0)
            gone += victims
            if declined := missing[CHUNKS - catalog.count(0) :]:
                missing = missing[: -len(declined)]
                late = declined, [LENGTH] * len(declined), missing[-1] if missing else parent
        missing = [key for key in missing if key not in catalog]
        if missing:
            catalog.add_chain(missing, 0, [LENGTH] * len(missing), State.READY, parent)
        if late is not None:
            catalog.decline(0, catalog.incoming_prompt(*late))
    return gone


@pytest.mark.skipif(not native.available(), reason=native.summary())
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_do_not_depend_on_the_native_core(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = evicted(POLICIES[name])
    monkeypatch.setattr(native, "available", lambda: False)
    assert evicted(POLICIES[name]) == with_it
    assert len(set(with_it)) > CHUNKS
