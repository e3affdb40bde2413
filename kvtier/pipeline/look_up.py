"""Look up: lease the held prefix of a prompt, in whatever tier, and wait for the part in flight.

In this order: the tiers of this host, chunks that a peer pushes here, the shared pools, and at the end a
chunk that only begins like the next one of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvtier.catalog.catalog import ALL_TIERS
from kvtier.events import Prefetch, Priority
from kvtier.memory.keys import ChunkKey, state_key
from kvtier.pipeline.discover import DiscoverStage
from kvtier.pipeline.expect import Expectation, ExpectStage
from kvtier.pipeline.found import FoundChunk, FoundPrefix, ReportProgress
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.load_or_compute import LoadOrCompute, Pace
from kvtier.pipeline.query import Expected
from kvtier.pipeline.read import Reader
from kvtier.pipeline.store import StoreStage
from kvtier.settings import PrefetchSettings

MAX_WALK = 4096
"""Chunks to look at for superseded states."""


class Boundary(NamedTuple):
    """Where a prompt can be continued."""

    needed: list[ChunkKey]
    """The chunks before it, and the state there; empty if no state is stored."""
    chunks: int
    """The leading chunks that are held. If there are more, prompts branch there, and no state is stored."""


class Boundaries:
    """Finds the last boundary of a prompt.

    It is after whole chunks, and only where the state at the end of the last one is stored as well. States
    are stored at few chunks, so the longest prefix of chunks is of no use by itself.
    """

    def __init__(self, hierarchy: Hierarchy, discovering: DiscoverStage) -> None:
        self._hierarchy = hierarchy
        self._discovering = discovering

    def last(self, keys: Sequence[ChunkKey]) -> Boundary:
        """Return the last boundary of a prompt. Takes about 1 µs for each chunk that is held after it."""
        catalog = self._hierarchy.catalog
        chunks = len(catalog.prefix(keys))
        for count in range(chunks, 0, -1):
            state = state_key(keys[count - 1])
            if catalog.fastest(state) >= 0:
                return Boundary([*keys[:count], state], chunks)
        return Boundary([], chunks)

    def superseded(self, chunk: ChunkKey) -> list[ChunkKey]:
        """Return the states before the end of ``chunk`` that only served to reach it.

        Where prompts branch, a state stays, and so do those before. Takes about 2 µs for each chunk.
        """
        catalog = self._hierarchy.catalog
        states: list[ChunkKey] = []
        before = catalog.parent(chunk)
        for _ in range(MAX_WALK):
            if before is None:
                break
            state = state_key(before)
            held = catalog.fastest(state) >= 0
            if catalog.children(before) > 1 + held:
                break
            if held:
                states.append(state)
            before = catalog.parent(before)
        return states

    async def ask(self, keys: Sequence[ChunkKey], expected: Expected, state_bytes: int) -> None:
        """Query the shared pools for chunks, then for states after the last boundary held. Adds both."""
        known = await self._discovering.ask(keys, expected)
        after = max(0, len(self.last(keys).needed) - 1)
        chunks = keys[after:known]
        states = Expected(expected.namespace, [state_bytes] * len(chunks), chunks)
        await self._discovering.ask_each([state_key(chunk) for chunk in chunks], states)


class LookUpStage:
    """Fills a :class:`FoundPrefix`, at once as far as this host knows, then in tasks of the hierarchy."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        settings: PrefetchSettings,
        reader: Reader,
        discovering: DiscoverStage,
        expecting: ExpectStage,
        boundaries: Boundaries,
        storing: StoreStage,
    ) -> None:
        self._hierarchy = hierarchy
        self._settings = settings
        self._reader = reader
        self._discovering = discovering
        self._expecting = expecting
        self._boundaries = boundaries
        self._storing = storing
        self._local = sum(1 << tier.index for tier in hierarchy.tiers if not tier.shared)
        self._adaptive = settings.adaptive and settings.policy == "timeout"
        """Whether the time of computing a chunk is used; else it counts as unknown."""
        self.load_or_compute = LoadOrCompute(hierarchy, reader)

    def prefix(self, found: FoundPrefix, expected: Expected | None) -> None:
        """Add the longest held prefix. See :meth:`kvtier.TieredCache.look_up`."""
        query, keys = found.query, found.query.keys
        # The hit rate is that of this host's engines.
        if not (query.local or query.canary or query.counted is not None):
            self._hierarchy.counts["looked_up"] += len(keys)
        found.compute *= self._adaptive
        reached = self._extend(found, keys, self._local if query.local else ALL_TIERS)
        rest = keys[found.count :]
        if not reached:
            return
        pushed = keys[found.count : query.expect_chunks]
        if not rest:
            self._extend_partially(found)
        elif query.expect_seconds > 0 and pushed and not self._expecting.is_abandoned(pushed[0]):
            found.unknown = len(rest)
            found.pushed = self._expecting.begin(pushed, partial(self._add_pushed, found))
            self._hierarchy.tasks.start_soon(self._await_pushed, found.pushed, found, expected)
        elif expected is not None and query.counted is None and self._discovering.pools(expected.namespace):
            found.unknown = len(rest)
            self._hierarchy.tasks.start_soon(self._query_pools, found, expected)
        else:
            self._extend_partially(found)

    def boundary(self, found: FoundPrefix, expected: Expected, state_bytes: int) -> None:
        """Add the longest prefix that ends with a state. See :meth:`kvtier.TieredCache.look_up_state`."""
        keys = found.query.keys
        if not found.query.canary and found.query.counted is None:
            self._hierarchy.counts["looked_up"] += len(keys)
        found.compute *= self._adaptive
        boundary, asks = self._boundaries.last(keys), found.query.counted is None
        if asks and len(boundary.needed) <= len(keys) and self._discovering.pools(expected.namespace):
            found.unknown = len(keys) + 1
            self._hierarchy.tasks.start_soon(self._query_boundary, found, expected, state_bytes)
        else:
            self._extend_to(found, boundary)

    def count_tokens(self, found: FoundPrefix, expected: Expected | None) -> None:
        """Let the tokens of a lookup, if they are known, count for the hit rate: once for each request."""
        query = found.query
        if query.local or (query.repeated and query.counted is None):
            return
        layout = None if expected is None else self._hierarchy.layouts.get(expected.namespace)
        if expected is not None and layout is not None:
            found.chunk_tokens = layout.chunk_tokens
            found.tokens = min(query.tokens, len(query.keys) * layout.chunk_tokens)
            new = 0 if query.repeated else found.tokens
            self._hierarchy.counts["lookup_tokens"] += new
            found.counts = self._hierarchy.usage.look_up(expected.namespace, query.hints, new)

    async def settle(self, found: FoundPrefix, progress: ReportProgress | None) -> None:
        """Wait for what is in flight, according to ``prefetch.policy``; drop the rest."""
        if found.pushed is not None:
            await found.pushed.ended.wait()
        if self._settings.policy == "best_effort":
            found.give_up()
            return
        deadline = self._settings.deadline if self._settings.policy == "timeout" else None
        total, started, pace = found.total, time.monotonic(), Pace(found.compute)

        def worth_waiting(arrived: int, waiting: int) -> bool:
            # What was expected, and with states what is needed, is known once shared pools have answered.
            if found.expected is not None or found.needed or not found.compute:
                return True
            if pace.worth_waiting(arrived, waiting):
                return True
            sources = [chunk.source for chunk in found.chunks[-waiting:]]
            found.cut = self.load_or_compute.computed(sources, found.total, found.compute, pace.left_seconds)
            return False

        await found.settle(deadline, progress, worth_waiting)
        missing = total - found.total
        if found.expected and not missing:
            self.load_or_compute.ended(found.expected, time.monotonic() - found.began_at)
        late = deadline is not None and time.monotonic() - started >= deadline
        if late and missing > 0 and not pace.left_seconds:
            message = "prefetch.deadline of %g s exceeded: %d of %d chunks did not arrive and are recomputed"
            self._hierarchy.warn("deadline", message, deadline, missing, total)

    # What this host holds.

    def _extend(
        self, found: FoundPrefix, keys: Sequence[ChunkKey], among: int = ALL_TIERS, *, whole: bool = False
    ) -> bool:
        """Add the held prefix of ``keys``; ``whole``: it is of use only as a whole.

        Return ``False`` if a known chunk could not be leased, or is not worth waiting for.
        """
        before = found.count
        while self._extend_from_tiers(found, keys[found.count - before :], among, whole=whole):
            rest = keys[found.count - before :]
            if not rest or not found.add_staged(rest[0]):
                return True
        return False

    def _extend_from_tiers(
        self, found: FoundPrefix, keys: Sequence[ChunkKey], among: int, *, whole: bool = False
    ) -> bool:
        hierarchy, memory = self._hierarchy, self._hierarchy.memory
        among &= hierarchy.usable_of(keys)
        rows, sources = hierarchy.catalog.prefix_rows(keys, among)
        known = len(rows)
        if found.compute and sources.count(memory.index) < known:
            worth, found.expected, cut = self.load_or_compute.decide(
                keys[:known], sources, among, found.compute, whole=whole
            )
            found.cut = cut or found.cut
            rows, sources = rows[:worth], sources[:worth]
        held = keys[: len(rows)]
        if found.query.hints is not None:
            hierarchy.catalog.set_hints(rows, found.query.hints)
        reached = min(found.tokens, (found.total + len(rows)) * found.chunk_tokens)
        if found.query.counted is None or reached > found.query.counted:  # Otherwise, it was used before.
            hierarchy.catalog.touch_rows(rows)
            self._storing.used(rows)
        in_memory = sources.count(memory.index) == len(sources)
        if in_memory and not found.count:
            return self._extend_from_memory(found, held, rows) and len(held) == known
        if not in_memory:
            self._reader.start(Prefetch(keys=held, priority=Priority.REQUESTED, among=among))
        first = found.total
        chunks: list[FoundChunk] = []
        for key, source in zip(held, sources, strict=True):
            chunk = self._find(key, source, among)
            if chunk is None:
                break
            chunks.append(chunk)
        found.add(chunks)
        self._count(found, first, [chunk.source for chunk in chunks])
        return len(chunks) == known

    def _extend_from_memory(self, found: FoundPrefix, held: Sequence[ChunkKey], rows: Sequence[int]) -> bool:
        """Lease a prefix that is entirely in memory, in one batch."""
        leases = self._hierarchy.memory.lease_rows(rows)
        found.set_head(held, leases)
        self._count(found, found.taken, bytes([self._hierarchy.memory.index]) * len(leases))
        return len(leases) == len(held)

    def _count(self, found: FoundPrefix, first: int, sources: Sequence[int]) -> None:
        """Count the chunks found from the ``first`` one on, and their tokens, by the tier that held them."""
        if found.query.local or found.query.canary:
            return
        counts, tiers, tokens = self._hierarchy.counts, self._hierarchy.tiers, found.chunk_tokens
        counted = max(0, (found.query.counted or 0) - first * tokens)
        if counted:
            if first * tokens + counted >= found.tokens:
                return
            known, counted = divmod(counted, tokens)
            first, sources = first + known, sources[known:]
        for source in set(sources):
            count = sources.count(source)
            counts[f"found_{tiers[source].name}"] += count
            counts[f"hit_tokens_{tiers[source].name}"] += count * tokens
        if not sources or not found.tokens:
            return
        # The last chunk may be shorter, or hit in part.
        excess = max(0, (first + len(sources)) * tokens - found.tokens)
        counts[f"hit_tokens_{tiers[sources[-1]].name}"] -= excess
        counts[f"hit_tokens_{tiers[sources[0]].name}"] -= counted
        hit = len(sources) * tokens - excess - counted
        for usage in found.counts:
            usage.hit += hit
            usage.saved_seconds += found.query.compute_seconds * hit / found.query.tokens

    def _extend_partially(self, found: FoundPrefix) -> None:
        """Add a chunk that begins like the first one of the prompt that is not held."""
        prompt = found.query.block_tags
        if prompt is None:
            return
        parent, block_tags = prompt.after(found.query.keys[: found.total])
        chunk = self._hierarchy.catalog.partial_matches.like(parent, block_tags) if block_tags else None
        if chunk is not None:
            before = found.count
            equal = found.chunk_tokens * chunk.equal // prompt.per_chunk
            found.tokens = min(found.tokens, found.total * found.chunk_tokens + equal)
            self._extend_from_tiers(found, [chunk.key], ALL_TIERS)
            found.partial = chunk if found.count > before else None

    def _extend_to(self, found: FoundPrefix, boundary: Boundary) -> None:
        found.held = boundary.chunks
        # The last one needed is a state, which has no tokens.
        found.tokens = min(found.tokens, max(0, len(boundary.needed) - 1) * found.chunk_tokens)
        self._extend(found, boundary.needed, whole=True)
        found.needed = len(boundary.needed)
        if found.count < found.needed:
            found.release()

    def _find(self, key: ChunkKey, source: int, among: int) -> FoundChunk | None:
        if source == self._hierarchy.memory.index:
            lease = self._hierarchy.memory.lease(key)
            return None if lease is None else FoundChunk(key, lease)
        flight = self._reader.flights.get(key)
        # Avoid a deadlock of two hosts that fetch the same chunk from each other.
        if flight is None or not among >> flight.source & 1:
            return None
        return FoundChunk(key, flight.lease.share(), flight)

    # What is pushed here, or held by shared pools.

    async def _await_pushed(self, pushed: Expectation, found: FoundPrefix, expected: Expected | None) -> None:
        """Add pushed chunks to a lookup, then chunks that only shared pools hold, until it is released."""
        keys = found.query.keys

        def extend() -> int:
            before = found.count
            self._extend(found, keys[len(keys) - found.unknown :])
            found.unknown -= found.count - before
            return found.count - before

        try:
            await pushed.wait(found.query.expect_seconds, extend)
            if found.unknown and expected is not None and self._discovering.pools(expected.namespace):
                await self._query_pools(found, expected)
            elif found.unknown:
                self._extend_partially(found)
        finally:
            found.unknown = 0
            found.answered.set()

    def _add_pushed(self, found: FoundPrefix, key: ChunkKey) -> bool:
        lease = self._hierarchy.memory.lease(key)
        if lease is not None:
            self._hierarchy.catalog.touch([key])
            if (row := self._hierarchy.catalog.row(key)) is not None:
                self._storing.used([row])
            found.add([FoundChunk(key, lease)])
        elif not found.add_staged(key):
            return False
        self._hierarchy.counts["found_pushed"] += 1
        found.unknown -= 1
        return True

    async def _query_pools(self, found: FoundPrefix, expected: Expected) -> None:
        """Add chunks that only shared pools hold to a lookup, if it is still open when they answer."""
        keys = found.query.keys
        try:
            known = await self._discovering.ask(keys, expected)
            if not found.unknown:
                self._bring_up(keys[:known])
            elif self._extend(found, keys[len(keys) - found.unknown :]):
                self._extend_partially(found)
        finally:
            found.unknown = 0
            found.answered.set()

    async def _query_boundary(self, found: FoundPrefix, expected: Expected, state_bytes: int) -> None:
        """Add the chunks and the state of the longest usable prefix to a lookup, also of shared pools."""
        keys = found.query.keys
        try:
            await self._boundaries.ask(keys, expected, state_bytes)
            boundary = self._boundaries.last(keys)
            if found.unknown:
                self._extend_to(found, boundary)
            else:
                self._bring_up(boundary.needed)
        finally:
            found.unknown = 0
            found.answered.set()

    def _bring_up(self, keys: Sequence[ChunkKey]) -> None:
        """Load chunks for the next request, because this one has stopped waiting."""
        if self._settings.policy == "best_effort":
            self._reader.start(Prefetch(keys=keys, priority=Priority.AHEAD))
