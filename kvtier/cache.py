"""The façade over all tiers of one host.

Deciding is synchronous: :meth:`TieredCache.look_up`, :meth:`~TieredCache.reserve` and
:meth:`~TieredCache.commit` answer in microseconds and never wait. Only bytes move asynchronously, in
tasks that belong to the open cache. All of it runs in one event loop and none of it is thread-safe:
from other threads and processes use the bridge (:mod:`kvtier.bridge`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
from anyio.abc import TaskGroup

from kvtier.arena import Arena
from kvtier.backends.base import Backend, SupportsArena, SupportsRegistration, SupportsScan
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.sealer import Sealer
from kvtier.backends.wrapped import open_wrapped
from kvtier.catalog import ALL_TIERS, Catalog, State
from kvtier.errors import SettingsError
from kvtier.events import Move, Observer, Prefetch, Priority
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.model import ModelCache
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.clear import Cleared, ClearStage
from kvtier.pipeline.discover import DiscoverStage, Expected
from kvtier.pipeline.evict import EvictStage
from kvtier.pipeline.expect import Expectation, ExpectStage
from kvtier.pipeline.forget import ForgetStage
from kvtier.pipeline.found import FoundChunk, LookUp, ReportProgress, Staged
from kvtier.pipeline.gather import Gathering, GatherStage
from kvtier.pipeline.held import HeldChunk, eviction_of, parents_first
from kvtier.pipeline.move import MoveStage
from kvtier.pipeline.prefetch import PrefetchStage
from kvtier.pipeline.store import Reservation, StoreStage
from kvtier.plugins import Plugins
from kvtier.router import FIRST, Router
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.tasks import open_tasks
from kvtier.tier import Tier

logger = logging.getLogger("kvtier")

DRAIN_POLL_SECONDS = 0.02

Progress = Callable[[int], None]
"""Told how many bytes are left."""


class TieredCache:
    """Chunks in tiers. Made with :meth:`open`."""

    def __init__(self, settings: Settings, hierarchy: Hierarchy) -> None:
        self.settings = settings
        self.hierarchy = hierarchy
        capacity = hierarchy.memory.arena.capacity
        queue_bytes = [tier.settings.queue or capacity // 4 for tier in hierarchy.tiers]
        self._evicting = EvictStage(hierarchy)
        self._storing = StoreStage(hierarchy, self._evicting, queue_bytes)
        self._prefetching = PrefetchStage(hierarchy, self._evicting)
        self._discovering = DiscoverStage(hierarchy)
        self.expecting = ExpectStage(hierarchy)
        """What peers push into the first tier: whoever takes that in tells it."""
        self._forgetting = ForgetStage(hierarchy)
        self._clearing = ClearStage(hierarchy, self._evicting)
        self._moving = MoveStage(hierarchy, self._evicting, self._prefetching)
        self._gathering = GatherStage(hierarchy, self._evicting, self._moving, self._discovering)
        self._local = sum(1 << tier.index for tier in hierarchy.tiers if not tier.shared)
        self._finished = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings | None = None,
        *,
        plugins: Plugins | None = None,
        pools: Sequence[tuple[TierSettings, Backend]] = (),
    ) -> AsyncIterator[TieredCache]:
        """Open every tier, take in what they held, and serve until the block is left.

        Settings that are not given are read from the environment and the file that it names; plugins
        that are not given are those that the settings let in. ``pools`` come after the tiers of the settings.

        On the way out, what is still to be written is written, for ``drain_timeout`` at most. Raises
        :class:`kvtier.errors.SettingsError` and :class:`kvtier.errors.TierError`.
        """
        settings = settings or load_settings()
        plugins = plugins or Plugins.load(settings.plugins)
        media = [(tier, plugins.backend(tier.type)(tier)) for tier in plugins.tier_settings(settings)]
        media += pools
        tier_settings = [tier for tier, _ in media]
        catalog = Catalog([plugins.eviction(eviction_of(tier))() for tier in tier_settings])
        async with AsyncExitStack() as stack:
            sealer = Sealer(settings.checksum)
            backends = [
                await open_wrapped(stack, backend, name=tier.name, sealer=sealer if index > FIRST else None)
                for index, (tier, backend) in enumerate(media)
            ]
            memory = backends[FIRST].inner
            if not isinstance(memory, SupportsArena):
                raise SettingsError(f"tiers[0] is {tier_settings[FIRST].type}: the first tier must be memory")
            tasks = await stack.enter_async_context(open_tasks())
            tiers = [
                Tier(index, tier, backend, catalog, tasks)
                for index, (tier, backend) in enumerate(zip(tier_settings, backends, strict=True))
            ]
            router, observers = Router(catalog, tiers), list(plugins.observers(settings))
            hierarchy = Hierarchy(tiers, catalog, router, memory, tasks, observers, sealer)
            cache = cls(settings, hierarchy)
            await cache._take_in(backends)
            cache._start(tasks)
            try:
                yield cache
            finally:
                with anyio.CancelScope(shield=True):
                    await cache.finish()
                tasks.cancel_scope.cancel()

    async def _take_in(self, backends: Sequence[GuardedBackend]) -> None:
        """Enter what the tiers held when they were opened, the longest unused first."""
        catalog = self.hierarchy.catalog
        for index, backend in enumerate(backends):
            if index > FIRST and isinstance(backend, SupportsRegistration):
                await backend.register(self.arena)
            if index == FIRST or not isinstance(backend, SupportsScan):
                continue
            held: list[HeldChunk] = []
            async for batch in backend.scan():
                held += [HeldChunk.of(stored) for stored in batch]
            for chunk in parents_first(held):
                catalog.add(
                    chunk.key, index, chunk.length, State.READY, chunk.header.parent, chunk.header.namespace
                )
            await self._evicting.make_room(index, 0)
            if catalog.count(index):
                logger.info(
                    "tier %s: %d chunks (%.2f GiB) held from before",
                    self.hierarchy.name(index),
                    catalog.count(index),
                    catalog.used(index) / 2**30,
                )

    def _start(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._evicting.run)
        tasks.start_soon(self._forgetting.run)
        for tier in self.hierarchy.tiers[FIRST + 1 :]:
            tasks.start_soon(self._storing.run, tier.index)

    @property
    def arena(self) -> Arena:
        """The memory of the first tier."""
        return self.hierarchy.memory.arena

    def model(self, name: str, *, token_bytes: int, salt: str = "") -> ModelCache:
        """One model's chunks by token ids, for programs that hold ``token_bytes`` of KV for each token."""
        return ModelCache(self, name, token_bytes=token_bytes, salt=salt)

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of every transfer and change from now on."""
        self.hierarchy.observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """The inverse of :meth:`add_observer`."""
        self.hierarchy.observers.remove(observer)

    # Deciding: synchronous.

    def look_up(
        self,
        keys: Sequence[ChunkKey],
        expected: Expected | None = None,
        *,
        local: bool = False,
        expect: float = 0.0,
        expect_chunks: int | None = None,
        staged: Staged | None = None,
    ) -> LookUp:
        """Lease the longest prefix of ``keys`` that some tier holds, and start fetching what is below.

        With ``local``, only what tiers of this host alone hold counts. Where it is told what to expect, the
        shared pools are asked for the rest. What can be read now and what is on its way are told by the
        answer; nothing is waited for.

        ``expect``: for so many seconds chunks that a peer pushes here count as under way, of the first
        ``expect_chunks`` or of all. They join the answer, leased, as they become READY, until the push of the
        next one ends, or was never announced and does not begin soon; only then are the pools asked.

        ``staged`` has what was pushed past the tiers.
        """
        if not local:  # What peers ask for tells nothing of how well this host's engines are served.
            self.hierarchy.counts["looked_up"] += len(keys)
        found = LookUp(staged=staged)
        reached = self._extend(found, keys, self._local if local else ALL_TIERS)
        rest = keys[found.count :]
        if not rest or not reached:
            return found
        pushed = keys[found.count : expect_chunks]
        if expect > 0 and pushed and not self.expecting.is_hopeless(pushed[0]):
            found.unknown = len(rest)
            found.pushed = self.expecting.begin(pushed, partial(self._take_pushed, found))
            self.hierarchy.tasks.start_soon(self._await_pushed, found.pushed, found, keys, expected, expect)
        elif expected is not None and self._discovering.pools(expected.namespace):
            found.unknown = len(rest)
            self.hierarchy.tasks.start_soon(self._ask_pools, found, keys, expected)
        return found

    def _take_pushed(self, found: LookUp, key: ChunkKey) -> bool:
        lease = self.hierarchy.share(key)
        if lease is not None:
            self.hierarchy.catalog.touch([key])
            found.add([FoundChunk(key, lease)])
        elif not found.add_staged(key):
            return False
        self.hierarchy.counts["found_pushed"] += 1
        found.unknown -= 1
        return True

    async def _await_pushed(
        self,
        pushed: Expectation,
        found: LookUp,
        keys: Sequence[ChunkKey],
        expected: Expected | None,
        seconds: float,
    ) -> None:
        """Add to a look-up what is pushed here, then what only shared pools hold, while it is wanted."""

        def find_below() -> int:
            before = found.count
            self._extend(found, keys[len(keys) - found.unknown :])
            found.unknown -= found.count - before
            return found.count - before

        try:
            await pushed.wait(seconds, find_below)
            if found.unknown and expected is not None and self._discovering.pools(expected.namespace):
                await self._ask_pools(found, keys, expected)
        finally:
            found.unknown = 0
            found.answered.set()

    def _extend(self, found: LookUp, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> bool:
        """Add the chunks at the head of ``keys`` that are held; whether that are all that are known."""
        before = found.count
        while self._extend_from_tiers(found, keys[found.count - before :], among):
            rest = keys[found.count - before :]
            if not rest or not found.add_staged(rest[0]):
                return True
        return False

    def _extend_from_tiers(self, found: LookUp, keys: Sequence[ChunkKey], among: int) -> bool:
        hierarchy = self.hierarchy
        sources = hierarchy.catalog.prefix(keys, among)
        held = keys[: len(sources)]
        hierarchy.catalog.touch(held)
        if not found.count and sources.count(FIRST) == len(sources):
            return self._lead(found, held, among)
        if any(source != FIRST for source in sources):
            self._prefetching.start(Prefetch(keys=held, priority=Priority.REQUESTED, among=among))
        chunks: list[FoundChunk] = []
        for key, source in zip(held, sources, strict=True):
            chunk = self._find(key, source, among)
            if chunk is None:
                break
            chunks.append(chunk)
        found.add(chunks)
        if among == ALL_TIERS:
            for source, count in Counter(chunk.source for chunk in chunks).items():
                hierarchy.counts[f"found_{hierarchy.tiers[source].name}"] += count
        return len(chunks) == len(held)

    def _lead(self, found: LookUp, held: Sequence[ChunkKey], among: int) -> bool:
        """As :meth:`_extend_from_tiers`, of a prompt that memory holds as far as it is held: all at once."""
        leases = self.hierarchy.lease_all(held)
        found.lead(held, leases)
        if among == ALL_TIERS and len(leases):
            self.hierarchy.counts[f"found_{self.hierarchy.tiers[FIRST].name}"] += len(leases)
        return len(leases) == len(held)

    async def _ask_pools(self, found: LookUp, keys: Sequence[ChunkKey], expected: Expected) -> None:
        """Add to a look-up what only shared pools hold, if it is wanted by the time that they answer."""
        try:
            known = await self._discovering.ask(keys, expected)
            if found.unknown:
                self._extend(found, keys[len(keys) - found.unknown :])
            elif self.settings.prefetch.policy == "best_effort":
                self._prefetching.start(Prefetch(keys=keys[:known], priority=Priority.AHEAD))
        finally:
            found.unknown = 0
            found.answered.set()

    def _find(self, key: ChunkKey, source: int, among: int) -> FoundChunk | None:
        if source == FIRST:
            lease = self.hierarchy.memory.lease(key)
            return None if lease is None else FoundChunk(key, lease)
        flight = self._prefetching.flights.get(key)
        # Two hosts that fetch one chunk from each other must not each wait for the other's flight.
        if flight is None or not among >> flight.source & 1:
            return None
        return FoundChunk(key, flight.lease.share(), flight)

    async def settle(self, found: LookUp, progress: ReportProgress | None = None) -> None:
        """Wait for what is pushed, then for what is fetched as ``prefetch.policy`` says; keep that.

        Calls ``progress`` whenever some of it has arrived and more is in flight.
        """
        prefetch = self.settings.prefetch
        if found.pushed is not None:
            await found.pushed.ended.wait()
        if prefetch.policy == "best_effort":
            found.keep(found.ready)
            return
        deadline = prefetch.deadline if prefetch.policy == "timeout" else None
        wanted, started = found.count, time.monotonic()
        await found.settle(deadline, progress)
        if deadline is not None and time.monotonic() - started >= deadline and found.ready < wanted:
            message = "prefetch.deadline of %g s exceeded: %d of %d chunks are not there; they are computed"
            self.hierarchy.warn("deadline", message, deadline, wanted - found.ready, wanted)

    def reserve(self, header: ChunkHeader) -> Reservation | None:
        """Room in the arena for one chunk; ``None`` where it is held already or there is none to be had."""
        return self._storing.reserve(header)

    def reserve_all(self, headers: Sequence[ChunkHeader]) -> list[Reservation | None]:
        """As :meth:`reserve` of each, for chunks of one namespace, in a fifth of the time.

        Where there is no room for one, there is none for those after it.
        """
        return self._storing.reserve_all(headers)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """The chunks have been filled: serve them, and write them on to the tiers below."""
        self._storing.commit(reservations)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """The chunks will not be filled."""
        self._storing.abandon(reservations)

    def pin(self, keys: Sequence[ChunkKey], seconds: float | None = None) -> int:
        """Keep the leading chunks that are held from being evicted; how many there are."""
        held = keys[: len(self.hierarchy.catalog.prefix(keys))]
        self.hierarchy.catalog.pin(held, None if seconds is None else time.monotonic() + seconds)
        return len(held)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """The inverse of :meth:`pin`."""
        self.hierarchy.catalog.unpin(keys)

    # Moving: asynchronous.

    async def prefetch(self, keys: Sequence[ChunkKey], expected: Expected | None = None) -> int:
        """Bring the leading chunks up into the first tier; how many are there when it is done."""
        found = self.look_up(keys, expected)
        try:
            await found.settle(None)
            return found.ready
        finally:
            found.release()

    async def move(self, keys: Sequence[ChunkKey], source: str, target: str, *, copy: bool = False) -> int:
        """Bring chunks from one tier to another; how many ``target`` holds afterwards."""
        move = Move(keys=keys, source=self._index(source), target=self._index(target), copy=copy)
        return await self._moving.carry_out(move)

    def gather(self, keys: Sequence[ChunkKey], expected: Expected, target: str) -> Gathering:
        """What brings chunks of one prompt, in prefix order, into a tier, from wherever they are.

        Nothing happens before :meth:`Gathering.run`. All other tiers keep theirs.
        """
        return self._gathering.begin(keys, expected, self._index(target))

    async def clear(
        self,
        keys: Sequence[ChunkKey] | None = None,
        *,
        namespace: bytes | None = None,
        tiers: Sequence[str] | None = None,
    ) -> Cleared:
        """Remove chunks from every tier, or from some: those named, those of a namespace, or all. What went.

        A chunk that is on its way into a tier is not kept when it arrives; the bytes of one that is leased
        are freed with its last lease. From a shared pool goes what is known of it here. What others have left
        there stays, since they may need it. Where every tier is cleared of a namespace, or of all, that is
        not asked for any more while this cache is open.
        """
        every = self.hierarchy.tiers
        chosen = [tier.index for tier in every] if tiers is None else [self._index(name) for name in tiers]
        if keys is not None:
            return await self._clearing.clear(keys, chosen)
        if tiers is None:
            self.hierarchy.distrusted.add(namespace)
        return await self._clearing.clear_all(namespace, chosen)

    @property
    def pending_bytes(self) -> int:
        """Bytes that a lower tier has still to write."""
        return self._storing.pending_bytes + self._evicting.demoting_bytes

    async def drain(self, seconds: float, progress: Progress | None = None) -> bool:
        """Wait until everything that is queued is written, ``seconds`` at most; whether it is."""
        with anyio.move_on_after(seconds):
            while pending := self.pending_bytes:
                if progress is not None:
                    progress(pending)
                await anyio.sleep(DRAIN_POLL_SECONDS)
        return not self.pending_bytes

    async def finish(self, progress: Progress | None = None) -> None:
        """Write what would be lost with the arena, for ``drain_timeout`` at most; a second call does nothing.

        For the end, when no one stores any longer. ``progress`` is told the bytes that are left.
        """
        if self._finished:
            return
        self._finished = True
        self._storing.flush()
        if not await self.drain(self.settings.drain_timeout, progress):
            logger.warning(
                "%d bytes could not be written within drain_timeout (%g s) and are lost",
                self.pending_bytes,
                self.settings.drain_timeout,
            )

    def _index(self, name: str) -> int:
        for tier in self.hierarchy.tiers:
            if tier.name == name:
                return tier.index
        names = ", ".join(tier.name for tier in self.hierarchy.tiers)
        raise SettingsError(f"there is no tier {name!r}: there are {names}")

    def status(self) -> dict[str, object]:
        """What is held and what has happened, for people and tests."""
        hierarchy = self.hierarchy
        return {
            "tiers": [
                {
                    "name": tier.name,
                    "type": tier.settings.type,
                    "capacity_bytes": tier.capacity,
                    "used_bytes": tier.used_bytes,
                    "chunks": hierarchy.catalog.count(tier.index),
                    "available": tier.available,
                    "reading": tier.reading.status(),
                }
                for tier in hierarchy.tiers
            ],
            "arena": {"used_bytes": self.arena.used, "leases": self.arena.leases},
            "flights": len(self._prefetching.flights),
            "pushed": {"coming": self.expecting.coming, "waiting": self.expecting.waiting},
            "pending_bytes": self.pending_bytes,
            "counts": dict(hierarchy.counts),
        }
