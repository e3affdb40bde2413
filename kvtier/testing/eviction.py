"""The eviction policy conformance suite. Subclass :class:`EvictionConformance` to run it with pytest.

::

    class TestMyPolicy(EvictionConformance):
        policy = MyPolicy
        settings = {"decay": 0.5}

The tests drive the policy through a catalog, as a cache does.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import EvictionPolicy, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.testing.noise import noise

LENGTH = 4096
FAST, SLOW = 0, 1
MAX_OBJECTS = 2_000
"""Objects that the garbage collector may have to visit for 20,000 chunks."""


def prompt_of(number: int, chunks: int) -> list[ChunkKey]:
    """Return the keys of a prompt that shares no chunk with others."""
    joined = noise(b"prompt %d" % number, chunks * KEY_BYTES)
    return [ChunkKey(joined[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(chunks)]


class EvictionConformance:
    """Tests of the contract of :class:`~kvtier.catalog.eviction.EvictionPolicy`. Name it ``Test...``."""

    policy: ClassVar[type[EvictionPolicy]]
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the policy, without ``type``."""
    capacity: ClassVar[int] = 1000 * LENGTH

    @pytest.fixture
    def catalog(self) -> Catalog:
        """An empty catalog."""
        return self.make_catalog()

    def make_catalog(self) -> Catalog:
        """Return an empty catalog of two tiers that use the policy."""
        settings = self.policy.settings_type.model_validate({"type": "mine", **self.settings})
        return Catalog([self.policy.factory(settings, self.capacity)] * 2)

    def store(self, catalog: Catalog, keys: Sequence[ChunkKey], tier: int = FAST) -> None:
        """Add the chunks of one prompt."""
        catalog.add_chain(keys, tier, [LENGTH] * len(keys), State.READY)

    def evict_all(self, catalog: Catalog, tier: int = FAST, at_once: int = 3) -> Iterator[ChunkKey]:
        """Evict every chunk, some at a time, and yield them in order."""
        while victims := catalog.victims(tier, at_once * LENGTH):
            catalog.remove_all(victims, tier, RemovalReason.EVICTED)
            yield from victims

    def test_empty_tier_has_no_victims(self, catalog: Catalog) -> None:
        """Before the first chunk, and after the last one."""
        assert catalog.victims(FAST) == []
        self.store(catalog, prompt_of(1, 5))
        assert len(list(self.evict_all(catalog))) == 5
        assert catalog.victims(FAST) == []

    def test_every_chunk_is_evicted_once(self, catalog: Catalog) -> None:
        """Whatever was used in between. Otherwise a tier would fill up for ever."""
        prompts = [prompt_of(number, 7) for number in range(20)]
        for keys in prompts:
            self.store(catalog, keys)
            catalog.touch(keys)
        for keys in prompts[::3]:
            catalog.touch(keys[:4])
        evicted = list(self.evict_all(catalog))
        assert sorted(evicted) == sorted(key for keys in prompts for key in keys)
        assert len(set(evicted)) == len(evicted)

    def test_prompt_is_evicted_from_its_end(self, catalog: Catalog) -> None:
        """The catalog sees to it, for any order of the policy."""
        prompts = [prompt_of(number, 6) for number in range(8)]
        for keys in prompts:
            self.store(catalog, keys)
        catalog.touch(prompts[2][3:])
        evicted = list(self.evict_all(catalog, at_once=1))
        for keys in prompts:
            places = [evicted.index(key) for key in keys]
            assert places == sorted(places, reverse=True)

    def test_short_search_takes_nothing_from_the_middle_of_a_prompt(self, catalog: Catalog) -> None:
        """Even if the policy offers many chunks first whose children it offers last."""
        begin, end = prompt_of(1, 200), prompt_of(2, 20)
        self.store(catalog, begin)
        catalog.add_chain(end, FAST, [LENGTH] * 20, State.READY, begin[-1])
        for number in range(20):
            self.store(catalog, prompt_of(3 + number, 1))
        path = [*begin, *end]
        catalog.touch(path)
        for _ in range(1_000):
            for key in (victims := catalog.victims(FAST, LENGTH, limit=16)):
                if key in path:
                    assert key == path.pop()
            catalog.remove_all(victims, FAST, RemovalReason.EVICTED)
        assert catalog.victims(FAST) == []

    def test_search_stops_at_the_needed_bytes(self, catalog: Catalog) -> None:
        """A tier must not be emptied for one chunk, and a search must not visit every chunk."""
        for number in range(50):
            self.store(catalog, prompt_of(number, 1))
        assert 1 <= len(catalog.victims(FAST, LENGTH)) <= 2
        assert 10 <= len(catalog.victims(FAST, 10 * LENGTH)) <= 12

    def test_busy_chunks_are_omitted(self, catalog: Catalog) -> None:
        """They are victims again once they are idle."""
        keys = [prompt_of(number, 1)[0] for number in range(30)]
        for key in keys:
            self.store(catalog, [key])
        busy = {catalog.row(key) for key in keys[::2]}
        assert sorted(catalog.victims(FAST, is_leased=busy.__contains__)) == sorted(keys[1::2])
        catalog.pin(keys[1::2], None)
        assert catalog.victims(FAST, is_leased=busy.__contains__) == []
        catalog.pins.remove(keys)
        assert sorted(self.evict_all(catalog)) == sorted(keys)

    def test_search_without_result_ends(self, catalog: Catalog) -> None:
        """A policy yields each chunk once, so that a full tier of busy chunks does not stop the loop."""
        for number in range(200):
            self.store(catalog, prompt_of(number, 1))
        asked: list[int] = []

        def is_leased(row: int) -> bool:
            asked.append(row)
            return True

        assert catalog.victims(FAST, is_leased=is_leased) == []
        assert len(asked) == len(set(asked)) <= 200

    def test_chunk_that_was_not_evicted_after_all_is_a_victim_again(self, catalog: Catalog) -> None:
        """A chunk that was yielded may be in use by the time it would be removed."""
        keys = prompt_of(1, 4)
        self.store(catalog, keys)
        for _ in range(5):
            assert sorted(catalog.victims(FAST)) == sorted(keys)
        assert sorted(self.evict_all(catalog)) == sorted(keys)

    def test_chunk_added_again_is_evicted_again(self, catalog: Catalog) -> None:
        """Rows are reused, and a policy that remembers evicted keys must not lose them."""
        keys = prompt_of(1, 6)
        for reason in RemovalReason:
            self.store(catalog, keys)
            catalog.touch(keys)
            catalog.remove_all(keys, FAST, reason)
            other = prompt_of(2, 4)
            self.store(catalog, other)
            self.store(catalog, keys)
            assert sorted(self.evict_all(catalog)) == sorted([*keys, *other])

    def test_tiers_are_separate(self, catalog: Catalog) -> None:
        """Chunks of another tier are used together with those of this one, but are not victims here."""
        fast, both, slow = (prompt_of(number, 4) for number in range(3))
        for keys, tiers in ((fast, [FAST]), (both, [FAST, SLOW]), (slow, [SLOW])):
            for tier in tiers:
                self.store(catalog, keys, tier)
        catalog.touch([*fast, *both, *slow])
        assert sorted(self.evict_all(catalog, FAST)) == sorted([*fast, *both])
        assert sorted(self.evict_all(catalog, SLOW)) == sorted([*both, *slow])

    def test_hints_and_empty_batches_are_allowed(self, catalog: Catalog) -> None:
        """Hints may be used or ignored."""
        keys = prompt_of(1, 3)
        hints = ChunkHints(tenant="a", priority=5, retention=60, resume=1, recompute=0.1)
        catalog.add_chain(keys, FAST, [LENGTH] * 3, State.READY, hints=hints)
        catalog.add_chain([], FAST, [], State.READY)
        catalog.touch([])
        catalog.remove_all([], FAST)
        assert sorted(self.evict_all(catalog)) == sorted(keys)

    def test_random_operations(self, catalog: Catalog) -> None:
        """After any sequence of operations, the victims are exactly the chunks of the tier."""
        chance = random.Random(1)  # noqa: S311 - the same sequence in each run
        prompts = [prompt_of(number, 1 + number % 9) for number in range(60)]
        held: dict[int, set[ChunkKey]] = {FAST: set(), SLOW: set()}
        for _ in range(3_000):
            tier, keys = chance.choice((FAST, SLOW)), chance.choice(prompts)
            action = chance.random()
            if action < 0.4 and held[tier].isdisjoint(keys):
                self.store(catalog, keys, tier)
                held[tier].update(keys)
            elif action < 0.7:
                catalog.touch(keys[: chance.randint(0, len(keys))])
            elif action < 0.85:
                removed = [key for key in keys if key in held[tier]]
                catalog.remove_all(removed, tier, chance.choice(list(RemovalReason)))
                held[tier].difference_update(removed)
            else:
                victims = catalog.victims(tier, chance.randint(1, 20) * LENGTH)
                assert held[tier].issuperset(victims)
                assert bool(victims) is bool(held[tier])
                catalog.remove_all(victims, tier, RemovalReason.EVICTED)
                held[tier].difference_update(victims)
        for tier in (FAST, SLOW):
            assert sorted(self.evict_all(catalog, tier)) == sorted(held[tier])

    def test_random_ends_of_answers(self, catalog: Catalog) -> None:
        """What has left by then is offered again. The victims stay exactly the chunks of the tier."""
        chance = random.Random(2)  # noqa: S311 - the same sequence in each run
        prompts = [prompt_of(number, 1 + number % 9) for number in range(30)]
        prompts += [[*keys[:4], *prompt_of(100 + number, 3)] for number, keys in enumerate(prompts)]
        for _ in range(2_000):
            tier, keys = chance.choice((FAST, SLOW)), chance.choice(prompts)
            if chance.random() < 0.5:
                found = len(catalog.prefix(keys))
                catalog.touch(keys[:found])
                catalog.report_missed(keys[found:])
            else:
                signature = (1, chance.randint(2, 4))[: chance.randint(0, 2)]
                catalog.report_answer_ended(keys[-2:], signature, chance.choice((0.0, 1.0, 60.0)))
            self._offer(catalog, tier, keys, chance.randint(0, 9))
        for tier in (FAST, SLOW):
            held = catalog.keys(tier)
            rows = {catalog.row(key) for key in held}
            for age in range(0, 7200, 5):
                returning = catalog.policies[tier].returning(time.monotonic() + age)
                assert rows.issuperset(returning)
                assert len(set(returning)) == len(returning)
            assert sorted(self.evict_all(catalog, tier)) == sorted(held)

    def _offer(self, catalog: Catalog, tier: int, keys: Sequence[ChunkKey], room: int) -> None:
        """Store up to ``room`` chunks that are missing of a prompt."""
        missing = catalog.absent(keys, tier)
        if not missing:
            return
        first = missing[0]
        run, parent = keys[first:], keys[first - 1] if first else None
        busy = {catalog.row(key) for key in keys}
        prompt = catalog.incoming_prompt(run, [LENGTH] * len(run), parent)
        victims = catalog.victims(tier, len(run) * LENGTH, busy.__contains__, prompt=prompt)
        catalog.remove_all(victims, tier, RemovalReason.EVICTED)
        catalog.add_chain(run[:room], tier, [LENGTH] * len(run[:room]), State.READY, parent)
        if rest := run[room:]:
            parent = run[room - 1] if room else parent
            catalog.decline(tier, catalog.incoming_prompt(rest, [LENGTH] * len(rest), parent))

    def test_collector_does_not_visit_chunks(self, catalog: Catalog) -> None:
        """An object per chunk would cost seconds in every full garbage collection of ten million chunks."""
        gc.collect()
        before = len(gc.get_objects())
        for number in range(2_000):
            keys = prompt_of(number, 10)
            self.store(catalog, keys)
            catalog.touch(keys)
        gc.collect()
        assert len(gc.get_objects()) - before < MAX_OBJECTS
