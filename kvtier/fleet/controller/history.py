"""What the fleet did in the last hour, day and week: samples in the state, which bound it.

A sample is of the whole fleet, an instance, a model or a tenant. Every :data:`STEP_SECONDS` one of each is
written, and added to one for ten minutes and one for an hour. Only instances that are connected then have
one, so the number of rows does not depend on how many names there have been. What is counted while no
controller runs is missing; what an instance counts while it is disconnected is in its next sample.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

import anyio
import anyio.lowlevel
import msgspec

from kvtier.bounded import remember
from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import Counts
from kvtier.fleet.controller.answers import HistorySample as Sample
from kvtier.fleet.controller.member import Faults, Member
from kvtier.fleet.controller.registry import MAX_MEMBERS
from kvtier.fleet.controller.settings import Span
from kvtier.fleet.controller.state import State
from kvtier.fleet.member.protocol import TokenCount

logger = logging.getLogger("kvtier.controller")
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


LEVELS: dict[Span, tuple[int, int]] = {"hour": (STEP_SECONDS, 360), "day": (600, 144), "week": (3600, 168)}
"""The seconds of one sample and the number of samples, from the finest resolution to the coarsest.

Each step is a multiple of the one before.
"""
SPANS: Sequence[Span] = list(LEVELS)


NAMES = [each.name for each in fields(Sample)][1:]
"""The values of a sample besides its time, as they are stored."""
COUNTS, GAUGES = NAMES[1:-3], NAMES[-3:]
Samples = dict[str, Sample]
"""By series: ``KIND:NAME``."""
_decode = msgspec.msgpack.Decoder(
    tuple[float, int, Counts, Counts, float, float, Counts, int, int, int, int, Counts, Counts]
).decode


def _merge(into: Sample, other: Sample, names: Sequence[str], sign: int = 1) -> None:
    """Add the values with these names, or subtract them."""
    for name in names:
        more, value = getattr(other, name), getattr(into, name)
        # A counter never decreases, unless an instance reports nonsense.
        if not isinstance(value, dict):
            setattr(into, name, max(0, value + sign * more))
            continue
        for key, number in more.items():
            at = key if key in value or len(value) < MAX_KEYS else OTHERS
            value[at] = max(0, value.get(at, 0) + sign * number)


def _follow(into: Sample, later: Sample) -> None:
    """Append what the same ones did later."""
    _merge(into, later, ["seconds", *COUNTS])
    for name in ("time", *GAUGES):
        setattr(into, name, getattr(later, name))


class History:
    """The samples that a controller takes. :meth:`run` must be running."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._counted: dict[str, tuple[int, Samples]] = {}
        """By instance: its incarnation, and its counters at the last sample. The latest one is last."""
        self._sums: dict[int, tuple[int, Samples]] = {}
        """By level: the newest samples, and the time at which they begin."""

    async def run(self, members: Mapping[str, Member]) -> None:
        """Sample the connected instances until cancelled."""
        while True:
            await anyio.sleep(STEP_SECONDS - time.time() % STEP_SECONDS)
            try:
                await self.sample(members.values(), time.time())
            except ControllerError as error:
                logger.warning("no samples: %s", error)

    async def sample(self, members: Iterable[Member], now: float) -> None:
        """Add one sample of the fleet, and of each of these instances and their models and tenants.

        The first sample of an instance is of no time: its counters may be of days.
        """
        samples, kinds = {FLEET: Sample()}, Counter[str]()
        for number, member in enumerate(list(members)):
            for series, sample in self._since_last(member):
                kind = series.partition(":")[0]
                if kind == "instance":
                    _add(samples[FLEET], sample)
                elif series not in samples:
                    kinds[kind] += 1
                    series = series if kinds[kind] <= MAX_SERIES else f"{kind}:{OTHERS}"
                _add(samples.setdefault(series, Sample()), sample)
            if number % SLICE == 0:
                await anyio.lowlevel.checkpoint()
        for level in range(len(LEVELS)):
            await self._write(level, int(now), samples)

    async def _write(self, level: int, now: int, samples: Samples) -> None:
        """Add samples to the newest ones of a level, which a controller that was killed may have begun."""
        step, points = LEVELS[SPANS[level]]
        at = now // step * step
        begin, sums = self._sums.get(level, (0, {}))
        if begin != at:
            sums = dict(await self._rows(level, [at]))
            self._sums[level] = at, sums
        changed = list(samples.items())
        for start in range(0, len(changed), 4 * SLICE):
            rows = []
            for series, sample in changed[start : start + 4 * SLICE]:
                total = sums.setdefault(series, Sample())
                _follow(total, sample)
                values = [getattr(total, name) for name in NAMES]
                rows.append((series, msgspec.msgpack.encode(values)))
            self._state.add_samples(level, at, at - step * points, rows)
            await anyio.lowlevel.checkpoint()

    async def read(
        self, span: Span, kind: Kind, name: str | None = None, *, total: bool = False
    ) -> dict[str, list[Sample]]:
        """Return the samples of a span by name, oldest first; with ``total``, only their sum."""
        level, (step, points) = SPANS.index(span), LEVELS[span]
        newest = int(time.time()) // step * step
        begins = range(newest - (points - 1) * step, newest + step, step)
        found: dict[str, list[Sample]] = {}
        for start in range(0, len(begins), SLICE):
            for series, sample in await self._rows(level, begins[start : start + SLICE], kind, name):
                samples = found.setdefault(series.partition(":")[2], [])
                if total and samples:
                    _follow(samples[0], sample)
                else:
                    samples.append(sample)
            await anyio.lowlevel.checkpoint()
        return found

    def _since_last(self, member: Member) -> Iterator[tuple[str, Sample]]:
        """Yield what an instance has done since its last sample, by series."""
        counted = _counted(member)
        if not counted:
            return
        incarnation, before = self._counted.pop(member.id, (None, counted))
        if incarnation not in (None, member.hello.incarnation):
            before = {}  # It has started since then, from zero.
        remember(self._counted, member.id, (member.hello.incarnation, counted), 2 * MAX_MEMBERS)
        for series, sample in counted.items():
            changed = Sample(seconds=0 if incarnation is None else STEP_SECONDS)
            _merge(changed, sample, [*COUNTS, *GAUGES])
            _merge(changed, before.get(series, Sample()), COUNTS, -1)
            yield series, changed

    async def _rows(
        self, level: int, times: Sequence[int], kind: str = "", name: str | None = None
    ) -> list[tuple[str, Sample]]:
        """Return the samples that begin at these times, by series."""
        now, (step, _) = time.time(), LEVELS[SPANS[level]]
        # A sample of the finest level is taken at its end.
        ends = {at: at if level == 0 else min(now, at + step) for at in times}
        rows = await self._state.samples(level, times, kind, name)
        return self._state.decoded(rows, lambda row: (row[0], Sample(ends[row[1]], *_decode(row[2]))))


def _add(into: Sample, other: Sample) -> None:
    """Add what another one did in the same time."""
    into.seconds = max(into.seconds, other.seconds)
    _merge(into, other, [*COUNTS, *GAUGES])


def _counted(member: Member) -> Samples:
    """Return the counters of an instance since it started, by series; none before its first heartbeat."""
    heartbeat, counters = member.heartbeat, member.counters
    if heartbeat is None:
        return {}
    models = {model.namespace.hex(): model for model in member.models}
    samples: Samples = {}
    every = Sample()
    for count in counters.models:
        model = models.get(count.name)
        sample = _of(count, 1 if model is None else model.layout.ranks)
        _add(every, sample)
        # Without a name it is counted later, when an engine has reported one.
        if model is not None:
            _add(samples.setdefault(f"model:{model.names[0]}", Sample(instances=1)), sample)
    tiers = list(zip(member.hello.tiers, heartbeat.tiers, strict=True))
    samples[f"instance:{member.id}"] = Sample(
        looked_up_tokens=heartbeat.looked_up_tokens,
        hit_tokens={tier.name: state.hit_tokens for tier, state in tiers},
        missed_tokens=counters.misses,
        saved_seconds=every.saved_seconds,
        gpu_seconds=every.gpu_seconds,
        moved_bytes={f"{route.source} → {route.target}": route.bytes for route in counters.routes},
        **Faults.of(counters)._asdict(),
        instances=1,
        used_bytes={tier.name: state.used for tier, state in tiers if tier.capacity is not None},
        capacity_bytes={tier.name: tier.capacity for tier, _ in tiers if tier.capacity is not None},
    )
    for count in counters.tenants:
        samples[f"tenant:{count.name}"] = replace(_of(count), instances=1)
    return samples


def _of(count: TokenCount, ranks: int = 1) -> Sample:
    return Sample(
        looked_up_tokens=count.looked_up,
        hit_tokens={ANY_TIER: count.hit},
        saved_seconds=count.saved_seconds,
        gpu_seconds=count.saved_seconds * ranks,
    )
