"""The estimate itself: takes lookups one after the other, and counts what other settings would hit.

If all tiers evict by LRU, and lower tiers get every chunk at once (``write: through``), reuse distances
give the hit rate at all capacities. Everything else needs a miniature cache for each question. Tiers of
other hosts and shared pools are excluded: their capacity is not this host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.bounded import remember
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.sampling import ESTIMATE_SAMPLE, SAMPLED
from kvtier.events import AnswerEnd, PromptLookup
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.observability.whatif.distances import HitCurve, ReuseDistances
from kvtier.observability.whatif.miniature import Miniature, with_changes
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings

POLICIES = ("lru", "arc", "resume")
"""The eviction policies to try. ``adaptive`` follows the best of them, and costs more than all of them."""
FACTORS = (0.5, 2.0, 4.0)
"""The capacities of each tier to try with miniature caches, as multiples of today's."""
MAX_FACTOR = 4.0
MINIATURE_PART = 0.125
"""Chunks of a miniature cache with the capacities of today, as a part of those in the sample."""
DECAYS = 16
"""Number of decays of the statistics in one half-life."""
MAX_OTHERS = 1000
"""Consecutive lookups of chunks of another size after which the miniature caches get chunks of that size."""
MAX_ANSWERS = 1024
"""Prompts with sampled chunks whose answers are waited for. The oldest are forgotten."""
MINIATURE_COST = 10
"""Time for a sampled chunk in a miniature cache, relative to that in the reuse distances; about."""


class Trial(NamedTuple):
    """A change of one tier that has a miniature cache."""

    tier: int
    factor: float | None
    """Of the capacity."""
    policy: str | None


class Totals:
    """Sums over the lookups, in which older ones have decayed."""

    def __init__(self) -> None:
        self.seconds = self.asked = self.found = self.tokens = 0.0
        self.timed_tokens = self.compute_seconds = 0.0
        """Of the lookups for which the engine has reported how fast it computes."""

    def decay(self, factor: float) -> None:
        """Decay all sums."""
        for name, value in vars(self).items():
            setattr(self, name, value * factor)


class Estimate:
    """Synchronous and not thread-safe."""

    def __init__(self, plugins: Plugins, settings: Settings, tiers: Sequence[LocalTierSettings]) -> None:
        """``tiers``: those of this host, fastest first."""
        self._plugins, self._settings = plugins, settings
        self.tiers = tiers
        self.by_distance = not settings.tenants and all(
            tier.eviction == {"type": "lru"} and (at == 0 or _gets_every_chunk(tier))
            for at, tier in enumerate(tiers)
        )
        """Whether reuse distances are enough for capacities."""
        self._reach = int(MAX_FACTOR * max(tier.capacity for tier in tiers))
        self.distances = ReuseDistances(settings.whatif.sample_chunks, self._reach)
        self.curve = HitCurve()
        """The hits by capacity, with LRU."""
        self._chunk_bytes = 0
        """Of the miniature caches; 0 before the first lookup."""
        self._others = 0
        self._threshold = 0
        """Of the sample of the miniature caches."""
        self.base: Miniature | None = None
        """The settings of today."""
        self.trials: dict[Trial, Miniature] = {}
        self._answers: dict[ChunkKey, tuple[Sequence[ChunkKey], ChunkHints | None]] = {}
        """What the miniature caches were asked for, by the last chunk of the whole prompt."""
        self._counting = True
        """Whether the hits of miniature caches count. If they were started anew, not until they are full."""
        self.compared = 0.0
        """Chunks of the prompts that they have served while these counted."""
        self.totals = Totals()
        self.began = 0.0
        """When the first lookup was; 0 before it."""
        self._decayed = 0.0
        self.chunks = self.sampled = 0

    def observe(self, seen: PromptLookup) -> None:
        """Take a lookup. Takes 5 µs, and 10 to 30 µs for each sampled chunk."""
        count = len(seen.keys)
        if not self._chunk_bytes:
            self.began = self._decayed = seen.time
            self._start(seen.chunk_bytes)
            # What will be needed, so that not even the first lookups take long.
            part = self._settings.whatif.sample_chunks * seen.chunk_bytes / self._reach
            if part < 1:
                self.distances.lower(part)
        self._pass_time(seen.time)
        self._add_totals(seen, count)
        keys, positions = self._sample(seen.keys)
        threshold = self.distances.threshold
        self.sampled += len(keys)
        self._serve(seen, keys, positions)
        if threshold < self._threshold:
            keys, positions = _of_smaller(keys, positions, threshold)
        distances = self.distances.access(keys, [seen.chunk_bytes] * len(keys))
        self.curve.add(positions, distances, count, threshold / SAMPLED)

    def stored(self, keys: Sequence[ChunkKey]) -> None:
        """Take chunks that were stored, which are often those of an answer that was never looked up."""
        if not self._chunk_bytes:
            return
        chosen, positions = self._sample(keys)
        of_miniatures, _ = _of_smaller(chosen, positions, self._threshold)
        if of_miniatures:
            for miniature in self._miniatures():
                miniature.cache.store(of_miniatures)
        of_distances, _ = _of_smaller(chosen, positions, self.distances.threshold)
        self.distances.add(of_distances, [self._chunk_bytes] * len(of_distances))

    def answer_ended(self, end: AnswerEnd) -> None:
        """Take the end of an answer. Takes 10 to 30 µs for each miniature cache, if any chunk is sampled."""
        if end.key in self._answers:
            keys, hints = self._answers.pop(end.key)
            for miniature in self._miniatures():
                miniature.cache.answer_ended(end.time, keys, end.signature, hints)

    def _sample(self, keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], Sequence[int]]:
        """Return the keys in the larger of the two samples, and their positions."""
        joined = b"".join(keys)
        positions = ESTIMATE_SAMPLE.positions(joined, max(self.distances.threshold, self._threshold))
        return [ChunkKey(joined[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in positions], positions

    def lower(self, halvings: int = 1) -> None:
        """Halve, so often, what costs more: the sample of the miniature caches or of the reuse distances."""
        before, factor = self._threshold, 1.0
        for _ in range(halvings):
            cost = self._threshold * len(self._miniatures()) * MINIATURE_COST
            if self._threshold > 1 and cost > self.distances.threshold * factor:
                self._threshold //= 2
            else:
                factor /= 2
        if factor < 1:
            self.distances.lower(factor)
        if self._threshold < before:
            self._restart()  # Once: it takes 5 to 80 ms.

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """As measured by the engines; ``None`` if none has."""
        seconds = self.totals.compute_seconds
        return self.totals.timed_tokens / seconds if seconds else None

    def seconds(self, now: float) -> float:
        """Return how many seconds the totals are of."""
        return self.totals.seconds + max(0.0, now - self._decayed)

    def _add_totals(self, seen: PromptLookup, count: int) -> None:
        totals, tokens = self.totals, count * seen.chunk_tokens
        self.chunks += count
        totals.asked += count
        totals.found += seen.found
        totals.tokens += tokens
        if seen.compute_seconds > 0 and seen.chunk_tokens:
            totals.timed_tokens += tokens
            totals.compute_seconds += seen.compute_seconds * count

    def _pass_time(self, now: float) -> None:
        """Decay the statistics, if enough time has passed."""
        half_life, passed = self._settings.whatif.half_life, now - self._decayed
        if passed < half_life / DECAYS:
            return
        factor = 0.5 ** (passed / half_life)
        self.totals.seconds += passed
        self._decayed = now
        self.totals.decay(factor)
        self.curve.decay(factor)
        self.compared *= factor
        for miniature in self._miniatures():
            miniature.decay(factor)

    def _start(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        chunks = max(1.0, max(tier.capacity for tier in self.tiers) / chunk_bytes)
        size = MINIATURE_PART * self._settings.whatif.sample_chunks
        self._threshold = max(1, min(SAMPLED, int(SAMPLED * size / chunks)))
        self._restart()

    def _restart(self) -> None:
        """Create the miniature caches for the present sample. They keep what those before have counted."""

        def make(tiers: Sequence[LocalTierSettings]) -> Miniature:
            rate = self._threshold / SAMPLED
            return Miniature(self._plugins, self._settings, tiers, self._chunk_bytes, rate)

        self._answers.clear()
        before = {Trial(0, None, None): self.base, **self.trials}
        self._counting = self.base is None
        decisive = [at for at in range(len(self.tiers)) if self._matters(at)]
        # The others do not change the hit rate. They are needed only to know which tier has the hits.
        chosen = decisive if self.by_distance else range(len(self.tiers))
        tiers = [self.tiers[at] for at in chosen]
        self.base = make(tiers)
        self.trials = {}
        for place, at in enumerate(chosen):
            tier = self.tiers[at]
            for policy in POLICIES if at in decisive else ():
                if policy != tier.eviction["type"]:
                    changed = with_changes(tiers, place, eviction={"type": policy})
                    self.trials[Trial(at, None, policy)] = make(changed)
            for factor in () if self.by_distance else FACTORS:
                changed = with_changes(tiers, place, capacity=int(tier.capacity * factor))
                self.trials[Trial(at, factor, None)] = make(changed)
        for trial, miniature in {Trial(0, None, None): self.base, **self.trials}.items():
            if (former := before.get(trial)) is not None:
                miniature.hits = former.hits

    def _matters(self, tier: int) -> bool:
        """Whether the hits depend on the policy of a tier: not if a lower one always has all its chunks."""
        capacity = self.tiers[tier].capacity
        lower = self.tiers[tier + 1 :]
        return not any(_gets_every_chunk(below) and below.capacity >= capacity for below in lower)

    def _miniatures(self) -> list[Miniature]:
        return [] if self.base is None else [self.base, *self.trials.values()]

    def _serve(self, seen: PromptLookup, keys: Sequence[ChunkKey], positions: Sequence[int]) -> None:
        assert self.base is not None
        if seen.chunk_bytes != self._chunk_bytes:
            self._others += 1
            if self._others > MAX_OTHERS:
                self._others = 0
                self._start(seen.chunk_bytes)
            return
        self._others = 0
        if self._threshold < self.distances.threshold:
            keys, positions = _of_smaller(keys, positions, self._threshold)
        count, rate = len(seen.keys), self._threshold / SAMPLED
        for miniature in self._miniatures():
            if keys:
                miniature.serve(seen.time, keys, positions, count, rate, seen.hints, counts=self._counting)
            elif self._counting:
                miniature.skip(count)
        if keys:
            remember(self._answers, seen.keys[-1], (keys, seen.hints), MAX_ANSWERS)
        if self._counting:
            self.compared += count
        else:
            self._counting = self.base.full


def _gets_every_chunk(tier: LocalTierSettings) -> bool:
    """Whether a lower tier holds what faster ones hold, if it is not smaller."""
    return tier.write == "through" and tier.admit == "first_use"


def _of_smaller(
    keys: Sequence[ChunkKey], positions: Sequence[int], threshold: int
) -> tuple[list[ChunkKey], list[int]]:
    chosen = ESTIMATE_SAMPLE.of(keys, threshold)
    return list(compress(keys, chosen)), list(compress(positions, chosen))
