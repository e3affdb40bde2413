"""Policies decide the same whether they learn of lookups at once or later."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.catalog import kvtier_eviction_policies
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import MakePolicy, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.tenants import Quota, Tenants
from kvtier.testing.backend import make_key

LENGTH = 100
RAM, SSD = 0, 1
CHUNKS = {RAM: 40, SSD: 80}
PROMPTS = [
    [make_key(chunk if chunk < 5 and prompt % 3 == 0 else 100 * prompt + chunk) for chunk in range(12)]
    for prompt in range(1, 15)
]
HINTS = [None, ChunkHints("a"), ChunkHints("b", resume=5.0), ChunkHints("c", priority=3)]


class Twin:
    """One of two catalogs that are used in the same way."""

    def __init__(
        self, policy: str, tenants: bool, later: Callable[[float, Callable[[], None]], object] | None
    ) -> None:
        self.now = 1.0
        plugin = kvtier_eviction_policies()[policy]

        def make(capacity: int) -> MakePolicy:
            return plugin.factory(plugin.settings_type(type=policy), capacity)

        sizes = [chunks * LENGTH for chunks in CHUNKS.values()]
        policies = [make(size) for size in sizes]
        if tenants:
            known, quotas = Tenants({"a": "a", "b": "b"}), {"a": Quota(0.3, 0.6), "b": Quota(0.2, 1.0)}
            policies = [
                known.policy(lambda share, size=size: make(int(size * share)), quotas, size) for size in sizes
            ]
        self.catalog = Catalog(policies, [SSD], clock=lambda: self.now, later=later, remembered=100)

    def step(self, seed: float) -> list[object]:
        """Do what follows from ``seed``, and return what could be seen of it."""
        chance, catalog = random.Random(seed), self.catalog
        self.now += 3 * chance.random()
        keys = chance.choice(PROMPTS)[: chance.randint(1, 12)]
        hints, action = chance.choice(HINTS), chance.random()
        if action < 0.5:
            rows, _ = catalog.prefix_rows(keys)
            if hints is not None:
                catalog.set_hints(rows, hints)
            catalog.touch_rows(rows)
            catalog.report_missed(keys[len(rows) :], hints)
            return list(rows)
        if action < 0.8:
            return self.store(keys, hints)
        if action < 0.85:
            catalog.report_answer_ended(keys[-2:], (5, 7), 0.1)
            return []
        if action < 0.9:
            held = [key for key in keys if catalog.state(key, RAM) is State.READY]
            catalog.remove_all(held, RAM, RemovalReason.CLEARED)
            return list(held)
        if action < 0.95:
            if catalog.state(keys[-1], SSD) is State.READY:
                catalog.resize(keys[-1], SSD, LENGTH // 2)
            return list(catalog.returning(5))
        new = [make_key(10_000 + chance.randrange(10_000) + at) for at in range(3)]
        prompt = catalog.incoming_prompt(new, [LENGTH] * 3, keys[-1], hints)
        victims = catalog.victims(RAM, 2 * LENGTH, prompt=prompt)
        catalog.decline(RAM, prompt)
        return [*victims, *([policy.expects(row) for row in range(5)] for policy in catalog.policies)]

    def store(self, keys: list, hints: ChunkHints | None) -> list[object]:
        """Store what a prompt lacks in memory, and demote what has no room."""
        catalog = self.catalog
        held = next((at for at, key in enumerate(keys) if catalog.state(key, RAM) is State.ABSENT), len(keys))
        absent = keys[held:]
        if not absent or any(catalog.state(key, RAM) is not State.ABSENT for key in absent):
            return []
        missing = catalog.used(RAM) + (len(absent) - CHUNKS[RAM]) * LENGTH
        victims = [key for key in catalog.victims(RAM, max(missing, 0)) if key not in keys]
        for key in victims:
            if catalog.state(key, SSD) is State.ABSENT:
                catalog.add(key, SSD, LENGTH, State.READY)
        catalog.remove_all(victims, RAM)
        parent = keys[held - 1] if held else None
        catalog.add_chain(absent, RAM, [LENGTH] * len(absent), State.READY, parent, hints=hints)
        over = catalog.victims(SSD, max(catalog.used(SSD) - CHUNKS[SSD] * LENGTH, 0))
        catalog.remove_all(over, SSD)
        return [*victims, *over]


@pytest.mark.parametrize("tenants", [False, True])
@pytest.mark.parametrize("policy", sorted(kvtier_eviction_policies()))
def test_all_decisions_are_the_same(policy: str, tenants: bool) -> None:
    due: list[Callable[[], None]] = []
    at_once = Twin(policy, tenants, None)
    late = Twin(policy, tenants, lambda _, function: due.append(function))
    chance = random.Random(policy)
    learned_late = 0
    for _ in range(400):
        seed = chance.random()
        assert at_once.step(seed) == late.step(seed)
        learned_late += bool(late.catalog._unreported)
        if chance.random() < 0.3:
            late.now += 1  # When no lookup has come for a while. They learn of each with its own time.
            while due:
                due.pop()()
            late.now -= 1
    assert learned_late > 50
