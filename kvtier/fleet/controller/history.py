"""What the fleet did in the last hour, day and week: samples in the state file, which bound it.

A sample is of the whole fleet, an instance, a model or a tenant. Every :data:`STEP_SECONDS` one of each is
written, and summed up to one for ten minutes and one for an hour. Only instances that are connected then
have one, so the number of rows does not depend on how many names there have been. What is counted while no
controller runs is missing; what an instance counts while it is disconnected is in its next sample.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from kvtier.fleet.controller.member import Faults, Member
from kvtier.fleet.controller.registry import MAX_MEMBERS
from kvtier.fleet.controller.settings import Span
from kvtier.fleet.controller.state import State
from kvtier.fleet.member.protocol import TokenCount

STEP_SECONDS = 10
Kind = Literal["fleet", "instance", "model", "tenant"]
FLEET = "fleet:"
MAX_SERIES = 32
"""Models, and tenants, with samples of their own at a time. All others are one: :data:`OTHERS`."""
MAX_KEYS = 64
"""Tiers, routes or reasons of one sample. All others are one."""
OTHERS = "others"
ANY_TIER = "any"
"""In place of a tier in samples of models and tenants, whose hits are not counted by tier."""
SLICE = 50
"""Instances, rows or points in time between two yields to the event loop: a few milliseconds."""


class Level(NamedTuple):
    """One resolution."""

    step: int
    """Seconds of one sample."""
    points: int


LEVELS: dict[Span, Level] = {
    "hour": Level(STEP_SECONDS, 360),
    "day": Level(600, 144),
    "week": Level(3600, 168),
}
"""From the finest to the coarsest. Each step is a multiple of the one before."""
SPANS: Sequence[Span] = list(LEVELS)


class Sample(msgspec.Struct, array_like=True):
    """Counts within ``seconds``, and gauges at their end. In the order in which they are stored."""

    seconds: float = 0.0
    looked_up: int = 0
    """Tokens."""
    hits: dict[str, int] = {}
    """Tokens by tier."""
    misses: dict[str, int] = {}
    """Tokens by reason."""
    saved_seconds: float = 0.0
    gpu_seconds: float = 0.0
    moved: dict[str, int] = {}
    """Bytes by ``source → target``."""
    outages: int = 0
    corrupt: int = 0
    failed: int = 0
    instances: int = 0
    used: dict[str, int] = {}
    """Bytes by tier, without shared pools."""
    capacity: dict[str, int] = {}

    def add(self, other: Sample) -> None:
        """Add what another instance did in the same time."""
        self.seconds = max(self.seconds, other.seconds)
        self._count(other, 1)
        self.instances += other.instances
        _sum(self.used, other.used, 1)
        _sum(self.capacity, other.capacity, 1)

    def follow(self, later: Sample) -> None:
        """Append what the same ones did later."""
        self.seconds += later.seconds
        self._count(later, 1)
        self.instances, self.used, self.capacity = later.instances, dict(later.used), dict(later.capacity)

    def since(self, before: Sample) -> Sample:
        """Return the difference of two states of the same counters, with the gauges of this one."""
        changed = msgspec.structs.replace(
            self, hits=dict(self.hits), misses=dict(self.misses), moved=dict(self.moved)
        )
        changed._count(before, -1)
        return changed

    def _count(self, other: Sample, sign: int) -> None:
        # A counter never decreases, unless an instance reports nonsense.
        self.looked_up = max(0, self.looked_up + sign * other.looked_up)
        self.saved_seconds = max(0.0, self.saved_seconds + sign * other.saved_seconds)
        self.gpu_seconds = max(0.0, self.gpu_seconds + sign * other.gpu_seconds)
        self.outages = max(0, self.outages + sign * other.outages)
        self.corrupt = max(0, self.corrupt + sign * other.corrupt)
        self.failed = max(0, self.failed + sign * other.failed)
        _sum(self.hits, other.hits, sign)
        _sum(self.misses, other.misses, sign)
        _sum(self.moved, other.moved, sign)


def _sum(into: dict[str, int], values: Mapping[str, int], sign: int) -> None:
    for name, value in values.items():
        key = name if name in into or len(into) < MAX_KEYS else OTHERS
        into[key] = max(0, into.get(key, 0) + sign * value)


Samples = dict[str, Sample]
"""By series: ``KIND:NAME``."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Sample).decode


class History:
    """The samples of one controller, in its state file. :meth:`run` must be running."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._counted: dict[str, tuple[int, Samples]] = {}
        """By instance: its incarnation, and its counters at the last sample. The latest one is last."""
        self._pending: dict[int, tuple[int, Samples]] = {}
        """By level: the sum that is not written yet, and the time at which it begins."""

    async def run(self, members: Mapping[str, Member]) -> None:
        """Sample the connected instances until cancelled."""
        await self.resume()
        while True:
            await anyio.sleep(STEP_SECONDS - time.time() % STEP_SECONDS)
            await self.sample(members.values(), time.time())

    async def resume(self) -> None:
        """Sum up what a controller that was killed had not."""
        for level in (2, 1):
            newest = self._state.read(
                "SELECT MAX(time) FROM history WHERE level = ?", lambda row: row[0], (level,)
            )[0]
            since = 0 if newest is None else newest + LEVELS[SPANS[level]].step
            times = self._state.read(
                "SELECT DISTINCT time FROM history WHERE level = ? AND time >= ? ORDER BY time",
                lambda row: row[0],
                (level - 1, since),
            )
            for at in times:
                await self._sum_up(
                    level, at, {series: found for series, _, found in self._rows(level - 1, at)}
                )
                await anyio.lowlevel.checkpoint()

    async def sample(self, members: Iterable[Member], now: float) -> None:
        """Add one sample of the fleet, and of each of these instances and their models and tenants.

        The first sample of an instance is of no time: its counters may be of days.
        """
        samples, kinds = {FLEET: Sample()}, Counter[str]()
        for number, member in enumerate(list(members)):
            for series, sample in self._since_last(member):
                if series.startswith("instance:"):
                    samples[FLEET].add(sample)
                kind = series.partition(":")[0]
                if series not in samples and kind != "instance" and kinds[kind] >= MAX_SERIES:
                    series = f"{kind}:{OTHERS}"
                if series in samples:
                    samples[series].add(sample)
                else:
                    samples[series] = sample
                    kinds[kind] += 1
            if number % SLICE == 0:
                await anyio.lowlevel.checkpoint()
        await self._write(0, int(now) // STEP_SECONDS * STEP_SECONDS, samples)

    async def read(
        self, span: Span, kind: Kind, name: str | None = None
    ) -> dict[str, list[tuple[float, Sample]]]:
        """Return the samples of a span by name, each with the time of its end, oldest first."""
        level, (step, points) = SPANS.index(span), LEVELS[span]
        first = f"{kind}:{name or ''}"
        # The next string after all that begin with it, or after it itself.
        bounds = first, f"{first}\0" if name is not None else f"{kind};"
        now = time.time()
        newest = int(now) // step * step
        begins = range(newest - (points - 1) * step, newest + step, step)
        found: dict[str, list[tuple[float, Sample]]] = {}
        for start in range(0, len(begins), SLICE):
            for series, at, sample in self._rows(level, begins[start : start + SLICE], *bounds):
                found.setdefault(series.partition(":")[2], []).append((_end(level, at, step), sample))
            await anyio.lowlevel.checkpoint()
        at, pending = self._pending.get(level, (0, {}))
        for series, sample in pending.items():
            if bounds[0] <= series < bounds[1] and at >= begins[0]:
                found.setdefault(series.partition(":")[2], []).append((min(now, at + step), sample))
        return found

    async def totals(self, span: Span, kind: Kind) -> Samples:
        """Return the sums of a span by name."""
        totals: Samples = {}
        for name, samples in (await self.read(span, kind)).items():
            totals[name] = Sample()
            for _, sample in samples:
                totals[name].follow(sample)
        return totals

    def _since_last(self, member: Member) -> Iterator[tuple[str, Sample]]:
        """Yield what an instance has done since its last sample, by series."""
        counted = dict(_counted(member))
        if not counted:
            return
        known = self._counted.pop(member.id, None)
        before = counted if known is None else known[1]
        if known is not None and known[0] != member.hello.incarnation:
            before = {}  # It has started since then, from zero.
        self._counted[member.id] = member.hello.incarnation, counted
        if len(self._counted) > 2 * MAX_MEMBERS:
            del self._counted[next(iter(self._counted))]
        for series, sample in counted.items():
            changed = sample.since(before.get(series, Sample()))
            changed.seconds = 0 if known is None else STEP_SECONDS
            yield series, changed

    async def _write(self, level: int, at: int, samples: Samples) -> None:
        rows = [(level, at, series, _encode(sample)) for series, sample in samples.items()]
        for start in range(0, len(rows), 4 * SLICE):
            part = rows[start : start + 4 * SLICE]
            self._state.write("REPLACE INTO history VALUES (?, ?, ?, ?)", part)
            await anyio.lowlevel.checkpoint()
        step, points = LEVELS[SPANS[level]]
        self._state.write("DELETE FROM history WHERE level = ? AND time <= ?", [(level, at - step * points)])
        if level + 1 < len(LEVELS):
            await self._sum_up(level + 1, at, samples)

    async def _sum_up(self, level: int, at: int, samples: Samples) -> None:
        """Add samples to the sum of a coarser level. Takes them over."""
        step = LEVELS[SPANS[level]].step
        begin = at // step * step
        before, pending = self._pending.get(level, (begin, {}))
        if before != begin:
            self._pending[level] = begin, {}
            await self._write(level, before, pending)
            pending = {}
        for number, (series, sample) in enumerate(samples.items()):
            if series in pending:
                pending[series].follow(sample)
            else:
                pending[series] = sample
            if number % (4 * SLICE) == 0:
                await anyio.lowlevel.checkpoint()
        self._pending[level] = begin, pending

    def _rows(
        self, level: int, times: int | Sequence[int], first: str = "", last: str = "~"
    ) -> list[tuple[str, int, Sample]]:
        """Return the samples at these times, one seek in the file for each."""
        asked = [times] if isinstance(times, int) else times
        values = ", ".join("(?)" for _ in asked)
        query = (
            f"WITH asked(time) AS (VALUES {values}) SELECT series, history.time, sample FROM asked "  # noqa: S608
            "CROSS JOIN history WHERE level = ? AND history.time = asked.time AND series >= ? AND series < ? "
            "ORDER BY history.time"
        )
        return self._state.read(
            query,
            lambda row: (row[0], row[1], _decode(row[2])),
            (*asked, level, first, last),
        )


def _end(level: int, at: int, step: int) -> float:
    # A sample of the finest level is taken at its end.
    return float(at if level == 0 else at + step)


def _counted(member: Member) -> Iterator[tuple[str, Sample]]:
    """Yield the counters of an instance since it started, by series; none before its first heartbeat."""
    heartbeat = member.heartbeat
    if heartbeat is None:
        return
    counters = heartbeat.counters
    models = {model.namespace.hex(): model for model in member.models}
    of_models: Samples = {}
    every = Sample()
    for count in counters.models if counters is not None else ():
        model = models.get(count.name)
        sample = _of(count, 1 if model is None else model.layout.ranks)
        every.add(sample)
        # Without a name it is counted later, when an engine has reported one.
        if model is not None:
            series = f"model:{model.names[0]}"
            of_models.setdefault(series, Sample(STEP_SECONDS, instances=1)).add(sample)
    local = list(zip(member.hello.tiers, heartbeat.tiers, strict=True))
    faults = Faults.of(counters)
    whole = Sample(
        STEP_SECONDS,
        heartbeat.looked_up_tokens,
        {tier.name: state.hit_tokens for tier, state in local},
        {} if counters is None else dict(counters.misses),
        every.saved_seconds,
        every.gpu_seconds,
        {f"{route.source} → {route.target}": route.bytes for route in counters.routes} if counters else {},
        faults.outages,
        faults.corrupt,
        faults.failed,
        1,
        {tier.name: state.used for tier, state in local if tier.capacity is not None},
        {tier.name: tier.capacity for tier, _ in local if tier.capacity is not None},
    )
    yield f"instance:{member.id}", whole
    yield from of_models.items()
    for count in counters.tenants if counters is not None else ():
        yield f"tenant:{count.name}", msgspec.structs.replace(_of(count), instances=1)


def _of(count: TokenCount, ranks: int = 1) -> Sample:
    seconds = count.saved_seconds
    return Sample(
        STEP_SECONDS,
        count.looked_up,
        {ANY_TIER: count.hit},
        saved_seconds=seconds,
        gpu_seconds=seconds * ranks,
    )
