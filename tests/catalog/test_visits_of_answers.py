"""What the resume policy knows of visits stays consistent, whatever happens to their chunks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies import resume
from kvtier.catalog.policies.resume import GHOST, ResumePolicy
from kvtier.catalog.policies.visits import NONE
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH, prompt_of

CAPACITIES = 30, 60
SIGNATURES = ((), (1,), (1, 2), (1, 2, 5), (1, 3, 6))
HINTS = (None, None, None, ChunkHints(resume=5.0), ChunkHints(retention=30.0, priority=50))
SECONDS = (0.0, 0.0, 0.01, 0.3, 1.0, 5.0, 60.0)


class TwoTiers:
    """Two tiers with the policy, prompts that begin alike, and a clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        settings = ResumePolicy.settings_type.model_validate({"type": "", "ghosts": seed % 3})
        policies = [ResumePolicy.factory(settings, chunks * LENGTH) for chunks in CAPACITIES]
        self.catalog = Catalog(policies, clock=lambda: self.now)
        self._prompts = [prompt_of(number, 1 + number % 9) for number in range(12)]
        self._new = 100

    def prompt(self) -> list[ChunkKey]:
        """Return a known prompt, or one that begins like one of those."""
        keys = self.chance.choice(self._prompts)
        if self.chance.random() < 0.5 and len(keys) < 25:
            self._new += 1
            begin = keys[: self.chance.randint(0, len(keys))]
            keys = [*begin, *prompt_of(self._new, self.chance.randint(1, 5))]
            self._prompts[self.chance.randrange(len(self._prompts))] = keys
        return keys

    def step(self) -> None:
        """Do anything that a cache does."""
        self.now += self.chance.choice(SECONDS)
        action, keys = self.chance.random(), self.prompt()
        if action < 0.45:
            self._ask(keys, self.chance.choice(HINTS))
        elif action < 0.8:
            end = self.chance.randint(1, len(keys))
            signature, late = self.chance.choice(SIGNATURES), self.chance.choice((0.0, 0.1, 60.0))
            answer = keys[end:][-2:] if self.chance.random() < 0.5 else []
            self.catalog.report_answer_ended([*keys[:end][-2:], *answer], signature, late)
            self._store(keys[: self.chance.choice((end, len(keys)))], 0)
        elif action < 0.9:
            tier = self.chance.choice((0, 1))
            held = [key for key in keys if self.catalog.state(key, tier) is State.READY]
            gone = self.chance.sample(held, self.chance.randint(0, len(held)))
            self.catalog.remove_all(gone, tier, self.chance.choice(list(RemovalReason)))
        elif action < 0.95:
            for prompt in self.catalog.returning(16):
                self._lift(prompt)
        else:
            for tier in (0, 1):
                assert sorted(self.catalog.victims(tier)) == sorted(self.catalog.keys(tier))

    def _ask(self, keys: list[ChunkKey], hints: ChunkHints | None) -> None:
        rows, _ = self.catalog.prefix_rows(keys)
        self.catalog.touch_rows(rows)
        if self.chance.random() < 0.7:
            self._lift(keys[: len(rows)])
        self.catalog.report_missed(keys[len(rows) :])
        self._store(keys, 0, hints)
        if self.chance.random() < 0.5:
            self._store(keys, 1)

    def _lift(self, keys: Sequence[ChunkKey]) -> None:
        if (prompt := self.catalog.to_promote(keys)) is not None:
            self._evict(0, len(prompt.keys), keys)
            lifted = prompt.keys[: self._room(0)]
            self.catalog.add_copies(lifted, 0)
            for key in lifted:
                self.catalog.set_ready(key, 0)

    def _room(self, tier: int) -> int:
        return max(0, CAPACITIES[tier] - self.catalog.count(tier))

    def _evict(self, tier: int, chunks: int, used: Sequence[ChunkKey], *, declines: bool = False) -> None:
        if (excess := chunks - self._room(tier)) > 0:
            busy = {self.catalog.row(key) for key in used}
            absent = [key for key in used if self.catalog.state(key, tier) is State.ABSENT]
            prompt = self.catalog.incoming_prompt(absent, [LENGTH] * len(absent), None) if declines else None
            victims = self.catalog.victims(tier, excess * LENGTH, busy.__contains__, prompt=prompt)
            self.catalog.remove_all(victims, tier)

    def _store(self, keys: Sequence[ChunkKey], tier: int, hints: ChunkHints | None = None) -> None:
        """Store a prompt in one or in several parts. The policy may decline them."""
        at = 0
        while at < len(keys):
            if self.catalog.state(keys[at], tier) is not State.ABSENT:
                at += 1
                continue
            stop = at + 1
            while stop < len(keys) and self.catalog.state(keys[stop], tier) is State.ABSENT:
                stop += 1
            stop = self.chance.choice((stop, self.chance.randint(at + 1, stop)))
            self._evict(tier, stop - at, keys, declines=self.chance.random() < 0.7)
            parent, fits = keys[at - 1] if at else None, at + min(stop - at, self._room(tier))
            lengths = [LENGTH] * (stop - at)
            self.catalog.add_chain(
                keys[at:fits], tier, lengths[: fits - at], State.READY, parent, hints=hints
            )
            if fits < stop:
                parent = keys[fits - 1] if fits > at else parent
                rest = self.catalog.incoming_prompt(keys[fits:stop], lengths[fits - at :], parent, hints)
                self.catalog.decline(tier, rest)
                if self.chance.random() < 0.7:
                    return
            at = stop


def check(catalog: Catalog, tier: int) -> None:
    """Each chunk is in one visit, each visit in one ring, and what is counted is there."""
    policy = catalog.policies[tier]
    assert isinstance(policy, ResumePolicy)
    visits = policy._visits
    rows = {row for row, visit in enumerate(visits.of_row) if visit != NONE}
    assert rows == {catalog.row(key) for key in catalog.keys(tier)}
    counts = Counter(visits.of_row[row] for row in rows)
    ring_of: dict[int, int] = {}
    for ring in policy._used:
        members = list(visits.in_ring(ring))
        assert (len(members), list(visits.in_ring(ring, newest_first=True))) == (
            visits.sizes[ring],
            members[::-1],
        )
        ring_of.update(dict.fromkeys(members, ring))
    assert len(ring_of) == sum(visits.sizes) == len(visits)
    assert counts.keys() <= ring_of.keys()
    for visit, ring in ring_of.items():
        path = list(visits.path(visit))
        assert visits.rings[visit] == ring
        assert len(set(path)) == len(path) == visits.counts[visit] == counts[visit]
        assert all(visits.of_row[row] == visit for row in path)
        assert (ring >= GHOST) == (visits.tails[visit] == NONE) == (not path)
        if (key := visits.ghost_keys[visit]) or ring >= GHOST:
            assert visits.ghosts[key] == visit
    assert policy._ghosts == sum(ring >= GHOST for ring in ring_of.values())
    assert len(visits.ghosts) == sum(map(bool, visits.ghost_keys))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("implementation")
def test_visits_stay_consistent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MIN_GHOSTS", 8)
    monkeypatch.setattr(resume, "MAX_SETTLED", 16)
    tiers = TwoTiers(seed)
    for step in range(1_200):
        tiers.step()
        if step % 8 == 0:
            for tier in (0, 1):
                check(tiers.catalog, tier)
