"""The decisions of a cache, without bytes and without waiting.

The same classes decide as in ``kvtier/pipeline``: the catalog with its eviction policies, the watermarks
of :class:`~kvtier.tiers.level.Level` and the plans of :class:`~kvtier.tiers.planner.TransferPlanner`. Only
the execution of a plan differs: it takes no time and never fails. Each method names the stage that it
replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from pydantic import ValidationError

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.hints import ChunkHints
from kvtier.errors import SettingsError
from kvtier.events import Evict, Prefetch, Store
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.ahead import MAX_PROMPTS
from kvtier.pipeline.load_or_compute import worth_loading
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings, TierSettings
from kvtier.tiers.level import Level, may_decline
from kvtier.tiers.planner import FIRST, Transfer, TransferPlanner
from kvtier.tiers.tenants import configured_tenants, shared_policy

GB = 1e9
MEMORY_GB_S, DISK_GB_S, OTHER_GB_S = 20.0, 3.0, 1.0
DEFAULT_GB_S = {"cpu": MEMORY_GB_S, "hugepage": MEMORY_GB_S, "disk": DISK_GB_S}
"""What common media read, by tier type. All others: :data:`OTHER_GB_S`."""
ONE_TIER = "ram"


class SimulatedCache:
    """Serves one request after the other. All chunks have one size. Counts are numbers of chunks."""

    def __init__(
        self, plugins: Plugins, tiers: SimulatedTiers, chunk_bytes: int, compute: float | None = None
    ) -> None:
        """``compute``: seconds in which the engine computes a chunk, which it may prefer to loading it."""
        self._clock = Clock()
        self._chunk_bytes = chunk_bytes
        prefetch = tiers.cache.prefetch
        adaptive = prefetch.adaptive and prefetch.policy == "timeout"
        self._compute = compute if adaptive else None
        self.catalog = make_catalog(plugins, tiers, self._clock)
        self.tiers = [
            SimulatedTier(index, settings, self.catalog, gb_s)
            for index, (settings, gb_s) in enumerate(zip(tiers.settings, tiers.gb_s, strict=True))
        ]
        self._planner = TransferPlanner(self.catalog, self.tiers, self._clock.read)
        self._leased: set[int] = set()
        """Rows of the prompt that is looked up, stored or read. They stay where they are meanwhile."""
        count = len(self.tiers)
        self.hits = [0] * count
        """By the tier that had the chunk."""
        self.read = [0] * count
        """From each tier to a higher one or to the engine, or on the way to a lower one."""
        self.loaded = [0] * count
        """Of these, those that a request waited for."""
        self.written = [0] * count
        self.evicted = [0] * count
        self.stored_again = 0
        """Of those written to the first tier, the ones that :meth:`answer_ended` has."""
        self.ahead = 0
        """Those that :meth:`prefetch_ahead` has read."""
        self.demoted = 0
        self.not_admitted = 0
        """Chunks that were dropped because no lower tier admitted them."""
        self.computed_instead = 0
        """Held chunks that would have arrived later than they were computed."""
        self.no_room = 0
        """Held chunks for which there was no room in the first tier."""

    def serve(self, time: float, keys: Sequence[ChunkKey], hints: ChunkHints | None = None) -> int:
        """Look up the chunks of a prompt, and store those that are missing. Return the number of hits."""
        self._clock.now = time
        found = self._look_up(keys, hints)
        self.catalog.report_missed(keys[found:], hints)
        if found < len(keys):
            self._store(keys, found, hints)
        if self.tiers[FIRST].tenants is not None:
            for tier in range(len(self.tiers)):
                while over := self.tiers[tier].victims_over_maximum(0):
                    self._evict(tier, over)
        return found

    def answer_ended(
        self, time: float, keys: Sequence[ChunkKey], signature: Sequence[int], hints: ChunkHints | None = None
    ) -> None:
        """Report the end of an answer, and offer again what the first tier has declined or evicted before."""
        self._clock.now = time
        self.catalog.report_answer_ended(keys[-2:], signature)
        if self.tiers[FIRST].declines:
            self._leased = set(self.catalog.prefix_rows(keys)[0])
            self.stored_again += self._store(keys, 0, hints, again=True)

    def prefetch_ahead(self, time: float) -> None:
        """Do what :func:`~kvtier.pipeline.ahead.prefetch_ahead` does, at one time."""
        self._clock.now = time
        for keys in self.catalog.returning(MAX_PROMPTS):
            prompt = self.catalog.to_promote(keys)
            if prompt is None or not self.tiers[FIRST].declines:
                continue
            self._leased = set(self.catalog.prefix_rows(keys)[0])
            self._make_room(FIRST, len(prompt.keys), prompt)
            promoted = prompt.keys[: self._fitting(FIRST, len(prompt.keys))]
            for transfer in self._planner.prefetch(Prefetch(keys=promoted)):
                self.read[transfer.source] += len(transfer.keys)
            self._add_copies(promoted, FIRST)
            self.ahead += len(promoted)

    def store(self, keys: Sequence[ChunkKey]) -> None:
        """Store those of consecutive chunks that are missing, at the time of the last request."""
        self._store(keys, 0, None)

    def _look_up(self, keys: Sequence[ChunkKey], hints: ChunkHints | None) -> int:
        """Do what :class:`~kvtier.pipeline.look_up.LookUpStage` does. Return how many chunks are loaded."""
        rows, sources = self.catalog.prefix_rows(keys)
        if self._compute is not None and sources.count(FIRST) < len(rows):
            worth = worth_loading(self._arrivals(sources), self._compute)
            self.computed_instead += len(rows) - worth
            rows, sources = rows[:worth], sources[:worth]
        if hints is not None:
            self.catalog.set_hints(rows, hints)
        self.catalog.touch_rows(rows)
        self._leased = set(rows)
        found = len(rows)
        if sources.count(FIRST) < found:
            found = self._prefetch(keys[:found], sources)
            self.no_room += len(rows) - found
        for tier in range(len(self.tiers)):
            self.hits[tier] += sources.count(tier, 0, found)
        if again := self._planner.admission.used(rows):
            source_of = dict(zip(rows, sources, strict=True))
            held = self.catalog.columns.keys_of(row for row in again if source_of[row] == FIRST)
            self._execute(self._planner.store_later(Store(keys=held)))
        self.read[FIRST] += found
        self.loaded[FIRST] += found
        return found

    def _arrivals(self, sources: bytes) -> list[float]:
        """Return in how many seconds each chunk would be in memory, which ``LoadOrCompute`` measures."""
        one = [tier.cost(self._chunk_bytes) for tier in self.tiers]
        waits = [0.0] * len(self.tiers)
        arrivals = []
        for source in sources:
            if source != FIRST:
                waits[source] += one[source]
            arrivals.append(waits[source])
        return arrivals

    def _prefetch(self, keys: Sequence[ChunkKey], sources: bytes) -> int:
        """Do what :class:`~kvtier.pipeline.read.Reader` does: promote chunks while there is room.

        Return how many leading chunks are in memory then.
        """
        for transfer in self._planner.prefetch(Prefetch(keys=keys)):
            self._make_room(FIRST, len(transfer.keys))
            promoted = transfer.keys[: self._fitting(FIRST, len(transfer.keys))]
            self._add_copies(promoted, FIRST)
            self.read[transfer.source] += len(promoted)
            self.loaded[transfer.source] += len(promoted)
            if len(promoted) < len(transfer.keys):
                return keys.index(transfer.keys[len(promoted)])
        return len(keys)

    def _store(
        self, keys: Sequence[ChunkKey], found: int, hints: ChunkHints | None, *, again: bool = False
    ) -> int:
        """Do what :class:`~kvtier.pipeline.store.StoreStage` does. Return how many chunks were written."""
        missing = keys[found:]
        absent = self.catalog.absent(missing, FIRST)
        self._make_room(FIRST, len(absent), self._incoming_prompt(keys, found, absent, hints, again))
        fitting = self._fitting(FIRST, len(absent))
        absent, left = absent[:fitting], absent[fitting:]
        for start, stop in _runs(absent):
            chain = missing[start:stop]
            before = found + start - 1
            parent = keys[before] if before >= 0 else None
            lengths = [self._chunk_bytes] * len(chain)
            self.catalog.add_chain(chain, FIRST, lengths, State.READY, parent, hints=hints)
        if prompt := self._incoming_prompt(keys, found, left, hints, again):
            self.catalog.decline(FIRST, prompt)
        self.written[FIRST] += len(absent)
        if len(self.tiers) > 1 and absent:
            event = Store(keys=[missing[at] for at in absent])
            self._planner.admission.stored(event.keys)
            self._execute(self._planner.store(event))
        return len(absent)

    def _incoming_prompt(
        self, keys: Sequence[ChunkKey], found: int, new: Sequence[int], hints: ChunkHints | None, again: bool
    ) -> IncomingPrompt | None:
        """Describe new chunks to a policy that may decline them. Their positions count from ``found`` on."""
        if not new or not (again or may_decline(self.tiers)):
            return None
        first, lengths = found + new[0], [self._chunk_bytes] * len(new)
        parent = keys[first - 1] if first else None
        return self.catalog.incoming_prompt([keys[found + at] for at in new], lengths, parent, hints)

    def _execute(self, plan: Sequence[Transfer]) -> None:
        for transfer in plan:
            assert transfer.target is not None
            self._write(transfer.target, transfer.keys)

    def _write(self, target: int, keys: Sequence[ChunkKey]) -> int:
        """Do what ``Writer.write`` does: write chunks to a lower tier, as far as they fit."""
        self._make_room(target, len(keys))
        absent = [keys[at] for at in self.catalog.absent(keys, target)]
        absent = absent[: self._fitting(target, len(absent))]
        self._add_copies(absent, target)
        return len(absent)

    def _make_room(self, tier: int, incoming: int, prompt: IncomingPrompt | None = None) -> None:
        """Do what ``Writer.make_room`` does, in the first tier as well: its eviction is never late."""
        level = self.tiers[tier]
        if over := level.over_limit():
            self.catalog.remove_all(over, tier)
        leased = self._leased.__contains__ if self._leased else None
        if victims := level.victims_for(incoming * self._chunk_bytes, leased, prompt):
            self._evict(tier, victims)

    def _evict(self, tier: int, victims: Sequence[ChunkKey]) -> None:
        """Drop or demote chunks, as the planner plans it."""
        for transfer in self._planner.evict(Evict(keys=victims, tier=tier)):
            if transfer.target is not None:
                self.demoted += self._write(transfer.target, transfer.keys)
                if tier != FIRST:
                    self.read[tier] += len(transfer.keys)
            elif not transfer.admitted:
                self.not_admitted += len(transfer.keys)
            self.catalog.remove_all(transfer.keys, tier)
            self.evicted[tier] += len(transfer.keys)

    def _fitting(self, tier: int, count: int) -> int:
        """Return how many of ``count`` more chunks fit into a tier."""
        level, size = self.tiers[tier], self._chunk_bytes
        if level.capacity is None or level.fits(count * size):
            return count
        return max(0, level.capacity - level.used_bytes) // size

    def _add_copies(self, keys: Sequence[ChunkKey], tier: int) -> None:
        self.catalog.add_copies(keys, tier)
        for key in keys:
            self.catalog.set_ready(key, tier)
        self.written[tier] += len(keys)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, stop) of each run of consecutive positions."""
    breaks = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    parts = pairwise([0, *breaks, len(positions)])
    return [(positions[start], positions[stop - 1] + 1) for start, stop in parts if start < stop]


@dataclass(frozen=True, slots=True)
class SimulatedTiers:
    """The tiers to simulate, fastest first, and what their settings imply."""

    settings: Sequence[TierSettings]
    gb_s: Sequence[float]
    """How fast each is read."""
    cache: Settings
    """The settings of the cache, for what is not a tier's own."""
    label: str
    """What distinguishes them from others: policy or policies."""

    @property
    def names(self) -> list[str]:
        """The names of the tiers."""
        return [tier.name for tier in self.settings]

    @property
    def capacity(self) -> int | None:
        """Bytes of all tiers together; ``None`` with a shared pool, whose capacity is unknown."""
        capacities = [tier.capacity for tier in self.settings if isinstance(tier, LocalTierSettings)]
        return sum(capacities) if len(capacities) == len(self.settings) else None


class SimulatedTier(Level):
    """A level without a medium. It reads at a given speed, whatever the number of requests."""

    def __init__(self, index: int, settings: TierSettings, catalog: Catalog, gb_s: float) -> None:
        super().__init__(index, settings, catalog)
        self._bytes_per_second = gb_s * GB

    def cost(self, length: int) -> float:
        """Return the seconds to read ``length`` bytes."""
        return length / self._bytes_per_second


def one_tier(plugins: Plugins, policy: str, capacity: int, speeds: Mapping[str, float]) -> SimulatedTiers:
    """Return a single memory tier, which is used up to its capacity, without watermarks.

    Raises :class:`SettingsError`, which lists the known policies.
    """
    tier = {"name": ONE_TIER, "type": "cpu", "capacity": capacity, "eviction": policy}
    settings = Settings(tiers=[{**tier, "high_watermark": 1.0, "low_watermark": 1.0}])
    return configured(plugins, settings, policy, speeds)


def configured(
    plugins: Plugins,
    settings: Settings,
    policy: str | None,
    speeds: Mapping[str, float],
    ratios: Mapping[str, float] = MappingProxyType({}),
) -> SimulatedTiers:
    """Return the tiers of settings. ``policy`` replaces that of every tier of this host.

    ``speeds``: GB/s by name; tiers without one get that of their type. ``ratios``: how many times its
    capacity a tier holds, by name; tiers without one hold what their codec usually makes of it. Raises
    :class:`SettingsError`, which names the key.
    """
    tiers = [_enlarged(plugins, tier, ratios) for tier in plugins.tier_settings(settings)]
    if policy is not None:
        plugins.eviction(policy)
        tiers = [
            tier.model_copy(update={"eviction": {"type": policy}})
            if isinstance(tier, LocalTierSettings)
            else tier
            for tier in tiers
        ]
    gb_s = [speeds.get(tier.name, DEFAULT_GB_S.get(tier.type, OTHER_GB_S)) for tier in tiers]
    return SimulatedTiers(tiers, gb_s, settings, policy or _label(tiers))


def _enlarged(plugins: Plugins, tier: TierSettings, ratios: Mapping[str, float]) -> TierSettings:
    ratio = ratios.get(tier.name, plugins.codec(tier.codec["type"]).usual_ratio)
    if ratio == 1 or not isinstance(tier, LocalTierSettings):
        return tier
    return tier.model_copy(update={"capacity": round(ratio * tier.capacity)})


def _label(tiers: Sequence[TierSettings]) -> str:
    policies = [tier.eviction["type"] for tier in tiers if isinstance(tier, LocalTierSettings)]
    return ", ".join(dict.fromkeys(policies))


def make_catalog(plugins: Plugins, tiers: SimulatedTiers, clock: Clock) -> Catalog:
    """Return an empty catalog. Raises :class:`SettingsError` if a policy's settings are invalid."""
    tenants = configured_tenants(tiers.cache)
    try:
        policies = [shared_policy(plugins.policy, tier, tiers.cache, tenants) for tier in tiers.settings]
        return Catalog(policies, clock=clock.read)
    except ValidationError as error:
        raise SettingsError(f"{tiers.label}: {error}") from error


class Clock:
    """A clock that is set."""

    # Not a part of the cache: the catalog would refer to it, and only garbage collection would free both.
    def __init__(self) -> None:
        self.now = 0.0
        """In seconds."""

    def read(self) -> float:
        """Return the time."""
        return self.now
