"""A catalog of one tier with any eviction policy, to be asked for prompts on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.policies.returns import AGES, Returns
from kvtier.catalog.policies.visits import Visits
from kvtier.memory.keys import ChunkKey
from kvtier.testing.eviction import LENGTH

PolicyT = TypeVar("PolicyT", bound=EvictionPolicy)


class OneTier(Generic[PolicyT]):
    """Stores what it did not hold: all of it, or, with ``declines``, what the policy does not decline."""

    def __init__(
        self,
        policy: type[PolicyT],
        capacity: int,
        *,
        declines: bool = False,
        seconds_per_prompt: float = 0.0,
        **settings: float,
    ) -> None:
        """``capacity``: in chunks. ``settings``: of the policy."""
        self.now, self.capacity = 1000.0, capacity
        self.hits = self.asked = 0
        self._declines, self._seconds_per_prompt = declines, seconds_per_prompt
        chosen = policy.settings_type.model_validate({"type": "", **settings})
        self.catalog = Catalog([policy.factory(chosen, capacity * LENGTH)], clock=lambda: self.now)
        [made] = self.catalog.policies
        assert isinstance(made, policy)
        self.policy = made

    def ask(self, keys: list[ChunkKey], hints: ChunkHints | None = None) -> int:
        """Look up a prompt, and store what is missing. Return the hits."""
        catalog = self.catalog
        self.now += self._seconds_per_prompt
        rows, _ = catalog.prefix_rows(keys)
        if hints is not None:
            catalog.set_hints(rows, hints)
        catalog.touch_rows(rows)
        self.hits += len(rows)
        self.asked += len(keys)
        catalog.report_missed(keys[len(rows) :])
        self._store(keys, rows, hints)
        return len(rows)

    def store(self, keys: list[ChunkKey]) -> None:
        """Store what is missing, without a lookup: the chunks of an answer, or what is offered again."""
        self._store(keys, self.catalog.prefix_rows(keys)[0], None)

    def end(
        self, keys: list[ChunkKey], *signature: int, answer: Sequence[ChunkKey] = (), again: bool = False
    ) -> None:
        """End the answer to a prompt. ``again``: the engine offers what is missing of it again."""
        self.catalog.report_answer_ended([*keys[-2:], *answer[-2:]], signature)
        if again:
            self.store(keys)

    def _store(self, keys: list[ChunkKey], rows: list[int], hints: ChunkHints | None) -> None:
        catalog = self.catalog
        if missing := keys[len(rows) :]:
            parent, sizes = keys[len(rows) - 1] if rows else None, [LENGTH] * len(missing)
            excess = catalog.used(0) + sum(sizes) - self.capacity * LENGTH
            if excess > 0:
                prompt = catalog.incoming_prompt(missing, sizes, parent, hints) if self._declines else None
                catalog.remove_all(catalog.victims(0, excess, set(rows).__contains__, prompt=prompt), 0)
            room = self.capacity - catalog.count(0) if self._declines else len(missing)
            if missing[:room]:
                catalog.add_chain(missing[:room], 0, sizes[:room], State.READY, parent, hints=hints)
            if rest := missing[room:]:
                before = missing[room - 1] if room else parent
                catalog.decline(0, catalog.incoming_prompt(rest, sizes[room:], before, hints))

    def rate_of(self, ask: Callable[[], None]) -> float:
        """Return the hit rate while something is asked."""
        hits, asked = self.hits, self.asked
        ask()
        return (self.hits - hits) / (self.asked - asked)


class Visit(NamedTuple):
    """What the resume policy knows of a prompt's last visit."""

    number: int
    kind: int
    age: int
    """Its span."""
    typical_gap: float
    added: int
    held: int


class ResumeTier(OneTier[ResumePolicy]):
    """A tier with the resume policy, whose visits tests see only through this rig."""

    def __init__(self, capacity: int, *, declines: bool = False, **settings: float) -> None:
        super().__init__(ResumePolicy, capacity, declines=declines, **settings)
        self.visits: Visits = self.policy._visits
        self.returns: Returns = self.policy._returns

    def visit(self, key: ChunkKey) -> Visit:
        """Return the visit that has a chunk or, if that is not held, is remembered by it."""
        visits, row = self.visits, self.catalog.row(key)
        at = visits.ghosts[hash(key)] if row is None else visits.visit(row)
        kind, age = self.policy._kind(at), visits.rings[at] % AGES
        return Visit(at, kind, age, visits.typical[at], visits.added[at], visits.counts[at])

    def worth(self, key: ChunkKey) -> float:
        """Return the hits per second that the visit of a held chunk is worth now."""
        self.policy._settle(self.now)
        row = self.catalog.row(key)
        assert row is not None
        return self.policy._worth(self.visits.rings[self.visits.visit(row)])
