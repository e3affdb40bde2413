"""Verify: compare chunks and states with what an engine has computed again, and quarantine what differs.

The engine copies such a chunk into room of its own, as for a store. When all ranks have committed it, a
thread compares it with the chunk in memory, and the room is free again. If they differ, the chunk is deleted.
Its namespace is in quarantine in the tier that the chunk came from, if it must be that of other tokens, or if
many differ: what an engine computes in another batch may be a little different.

What a canary has computed twice has not been in any tier: it measures how much that is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import ALL_TIERS, State
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.events import Observer, Prefetch, Report
from kvtier.logs import RateLimitedLog, printable
from kvtier.memory.difference import BYTES_TOLERANCE, TOLERANCES, Difference, difference
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.pipeline.clear import ClearStage
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.tiers.host_memory import Reservation
from kvtier.tiers.planner import FIRST
from kvtier.units import MIB

logger = logging.getLogger("kvtier")

MAX_BYTES = 64 * MIB
"""Room for chunks that are compared, unless a single one needs more. It is free memory: none is evicted."""
RESULTS = ("equal", "tolerable", "different", "unknown")
"""Outcomes of comparisons, as in the metrics; ``unknown``: could not be compared, as numpy is missing."""
MARGIN = 2.0
"""A tolerance is that many times the largest distance of what was computed twice."""
UNRELATED = 0.5
"""Farther than that are only pages of other tokens, layers or weights: no tolerance is larger."""
MANY, OFTEN = 3, 0.25
"""With chunks that differ less, there must be that many, and that part of all that were compared."""


class Recomputation(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks that an engine computes though they are held, to be compared."""

    request_id: str
    start: int
    """Position of the first token of the first one in the prompt."""
    dtype: str
    """Type of the values of the KV cache."""


@dataclass(slots=True, kw_only=True)
class Recomputed(Reservation):
    """Room for a chunk that is computed again, and a lease on the one that is held."""

    in_catalog: ClassVar[bool] = False

    stage: VerifyStage
    held: Lease
    source: int
    """The tier that the held one came from."""
    of: Recomputation
    measures: bool
    """Whether a canary has had both computed."""

    def complete(self) -> bool:
        """Start to compare both."""
        self.stage.tasks.start_soon(self.stage.compare, self)
        return False

    def give_up(self) -> None:
        """Release both: there is nothing to compare."""
        self.stage.release(self)


class VerifyStage(Observer):
    """Compares chunks, and acts on differences. All methods must be called from the event loop."""

    def __init__(self, hierarchy: Hierarchy, clearing: ClearStage, *, follows: bool) -> None:
        """``follows``: whether to remember from which tier chunks in memory came. Else it is the first."""
        self._hierarchy, self.tasks = hierarchy, hierarchy.tasks
        self._clearing = clearing
        self._origins: dict[ChunkKey, int] = {}
        """From which tier chunks in memory were read."""
        if follows:
            hierarchy.observers.append(self)
        self._thread = WorkerThreads(1)
        self._bytes = 0
        self._log = RateLimitedLog(logger, level=logging.ERROR, burst=4)
        self._measured: dict[bytes, float] = {}
        """The largest distance of what was computed twice, by namespace."""
        self._compared: Counter[tuple[bytes, int]] = Counter()
        self._differing: Counter[tuple[bytes, int]] = Counter()
        """Chunks that were compared, and those that differ, by namespace and tier, since its quarantine."""

    def observe(self, report: Report) -> None:
        """Note the tier of the chunks that a request has brought into memory."""
        memory = self._hierarchy.memory
        source = next((tier.index for tier in self._hierarchy.lower if tier.name == report.source), None)
        if source is None or report.target != memory.name or not isinstance(report.event, Prefetch):
            return
        for key, outcome in zip(report.keys, report.outcomes, strict=True):
            if outcome is Outcome.OK and memory.state(key) is State.READY:
                self._origins[key] = source

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Forget the chunks that leave memory."""
        for key in removed if tier == FIRST else ():
            self._origins.pop(key, None)

    def reserve(self, header: ChunkHeader, of: Recomputation, *, measures: bool) -> Reservation | None:
        """Reserve room to compare a chunk; ``None`` if memory does not hold it, or has no free room.

        ``measures``: see :class:`Recomputed`.
        """
        memory, length = self._hierarchy.memory, object_bytes(header.payload_bytes)
        if self._bytes and self._bytes + length > MAX_BYTES:
            return None
        held = memory.lease(header.key)
        if held is None:
            return None
        room = memory.arena.allocate(length) if held.length == length else None
        if room is None:
            held.release()
            return None
        self._bytes += length
        source = self._origins.get(header.key, FIRST)
        measures = measures and source == FIRST
        return Recomputed(header, room, stage=self, held=held, source=source, of=of, measures=measures)

    def release(self, chunk: Recomputed) -> None:
        """Release the memory of a chunk that is not compared any more."""
        self._bytes -= chunk.lease.length
        chunk.lease.release()
        chunk.held.release()

    async def compare(self, chunk: Recomputed) -> None:
        """Compare a chunk, and act on a difference. Releases its memory."""
        hierarchy, views = self._hierarchy, (chunk.held.view, chunk.lease.view)
        result, found, dtype = "unknown", None, chunk.of.dtype
        try:
            layout = hierarchy.layouts.get(chunk.header.namespace)
            assert layout is not None
            found = await in_thread(partial(difference, layout, chunk.header, *views, dtype), self._thread)
            result = "equal" if found is None else self._judge(chunk, found)
        except Exception as error:  # No numpy, no thread, or a type that does not fit an engine's layout.
            hierarchy.warn("verify", "chunks that are not equal could not be compared: %r", error)
        finally:
            self.release(chunk)
        if not chunk.measures:
            hierarchy.counts[f"verified_{result}_{hierarchy.tiers[chunk.source].name}"] += 1
            self._compared[chunk.header.namespace, chunk.source] += 1
            if found is not None and result == "different":
                await self._remove(chunk, found)

    def _tolerance(self, chunk: Recomputed) -> float:
        layout = self._hierarchy.layouts.get(chunk.header.namespace)
        # What was stored with loss differs, and what was computed from it.
        lossy = UNRELATED if layout is not None and layout.accepts_loss else 0.0
        measured = max(lossy, MARGIN * self._measured.get(chunk.header.namespace, 0.0))
        return max(TOLERANCES.get(chunk.of.dtype, BYTES_TOLERANCE), min(measured, UNRELATED))

    def _judge(self, chunk: Recomputed, found: Difference) -> str:
        """Return a result for chunks that are not equal. Measures the tolerance with those of a canary."""
        namespace = chunk.header.namespace
        if chunk.measures:
            self._measured[namespace] = max(self._measured.get(namespace, 0.0), found.distance)
        return "tolerable" if found.distance <= self._tolerance(chunk) else "different"

    async def _remove(self, chunk: Recomputed, found: Difference) -> None:
        """Delete a chunk that differs. Quarantine its namespace in the tier that it came from, or wait."""
        hierarchy, header, key = self._hierarchy, chunk.header, chunk.key
        place, tier = (header.namespace, chunk.source), hierarchy.tiers[chunk.source].name
        self._differing[place] += 1
        many = self._differing[place] >= max(MANY, OFTEN * self._compared[place])
        quarantine = many or found.distance > UNRELATED
        name = key.hex()[:16]
        what = f"chunk {name} of {header.tokens} tokens" if header.tokens else f"state {name}"
        then = "is not used in this tier until it is cleared, or this process restarts"
        self._log(
            f"tier {tier}: {what} at token {chunk.of.start} of request %s is not what the engine computes: "
            f"{found.differing} of {found.values} values differ, and the distance of two pages is "
            f"{found.distance:.3g} of their length, more than {self._tolerance(chunk):.3g}; it is deleted; "
            f"namespace {header.namespace.hex()[:16]} {then if quarantine else 'stays in use'}",
            printable(chunk.of.request_id),
        )
        if quarantine:
            del self._differing[place], self._compared[place]
            await self._quarantine(*place)
        await self._clearing.clear([key], [tier.index for tier in hierarchy.tiers])

    async def _quarantine(self, namespace: bytes, source: int) -> None:
        hierarchy = self._hierarchy
        # What an engine has stored was written to the tiers below as well.
        mask = (1 << len(hierarchy.tiers)) - 1 if source == FIRST else 1 << source
        hierarchy.quarantined[namespace] = hierarchy.quarantined.get(namespace, 0) | mask
        # What is in memory would still be pushed, or written to other tiers.
        if source == FIRST:
            await self._clearing.clear_all(namespace, [FIRST])
        else:
            read = [key for key, origin in self._origins.items() if origin == source]
            own = [each for each in read if hierarchy.catalog.namespace(each) == namespace]
            await self._clearing.clear(own, [FIRST])

    def lift(self, namespace: bytes | None, tiers: Sequence[int]) -> None:
        """Use a namespace, or every one, in these tiers again: its chunks are about to be removed there."""
        kept = ~sum(1 << tier for tier in tiers)
        quarantined = self._hierarchy.quarantined
        for space in list(quarantined):
            quarantined[space] &= kept if namespace in (None, space) else ALL_TIERS
            if not quarantined[space]:
                del quarantined[space]

    def status(self) -> dict[str, list[str]]:
        """Return the tiers in which namespaces are in quarantine."""
        places, tiers = self._hierarchy.quarantined.items(), self._hierarchy.tiers
        return {space.hex()[:16]: [t.name for t in tiers if mask >> t.index & 1] for space, mask in places}
