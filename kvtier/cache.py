"""Facade over all tiers of one host: by keys, and for one model and tenant by token IDs.

The control path is synchronous: :meth:`TieredCache.look_up`, :meth:`~TieredCache.reserve` and
:meth:`~TieredCache.commit` return within microseconds and never block. Data moves asynchronously, in tasks
owned by the open cache. Everything runs in one event loop and is not thread-safe; other threads and processes
use the bridge (:mod:`kvtier.bridge`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import SupportsIndex

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup

from kvtier.backends.base import Backend
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.misses import Miss
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.catalog.tenants import tenant_of_salt
from kvtier.concurrency.tasks import call_later, open_background_tasks
from kvtier.errors import CorruptChunk, KVTierError, LayoutError, SettingsError
from kvtier.events import AnswerEnd, Move, Observer, PromptLookup
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.host import check_memory, rooms, tmpfs_bytes
from kvtier.memory.keys import (
    BLOCK_HASH_BYTES,
    ChunkKey,
    block_hashes,
    chunk_keys,
    encode_tokens,
    equal_blocks,
    root_key,
)
from kvtier.memory.layout import CHUNK_TOKENS, ChunkLayout, GroupLayout, has_weights, namespace
from kvtier.memory.rows import Rows, bytes_of, copy_all
from kvtier.pipeline.ahead import prefetch_ahead
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.clear import Cleared, ClearStage
from kvtier.pipeline.discover import DiscoverStage
from kvtier.pipeline.encode import EncodeStage
from kvtier.pipeline.evict import EvictStage
from kvtier.pipeline.expect import ExpectStage
from kvtier.pipeline.explain import MissStage
from kvtier.pipeline.found import FoundPrefix, ReportProgress, Staged
from kvtier.pipeline.held import HeldStage, TtlExpiry
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.look_up import Boundaries, LookUpStage
from kvtier.pipeline.move import Gathering, MoveStage
from kvtier.pipeline.query import Expected, Query
from kvtier.pipeline.read import Reader
from kvtier.pipeline.store import StoreStage
from kvtier.pipeline.usage import Usage
from kvtier.pipeline.verify import VerifyStage
from kvtier.pipeline.write import Writer
from kvtier.plugins import IDENTITY, Plugins, is_memory
from kvtier.settings import LocalTierSettings, Settings, TierSettings, load_settings
from kvtier.tiers.encoded_seal import Encoder, Layouts, keys_of
from kvtier.tiers.host_memory import HostMemory, Reservation
from kvtier.tiers.planner import TransferPlanner
from kvtier.tiers.sealer import Sealer
from kvtier.tiers.tenants import configured_tenants, shared_policy, tenant_names, tenants_status
from kvtier.tiers.tier import Tier

logger = logging.getLogger("kvtier")

DRAIN_POLL_SECONDS = 0.02
CANARY_SECONDS, MAX_CANARIES = 120.0, 64
"""How long the chunks of a canary are kept, and of how many at most. What exceeds that is only evicted."""
CLOSED = "the cache is closed: use it within the `with` block that opens it"

ObserveLookup = Callable[[PromptLookup], None]
"""Receives each lookup of a prompt. Called in the event loop; must neither block nor raise."""

ObserveReserved = Callable[[Sequence[Reservation | None]], None]
"""Receives what was reserved. Called in the event loop; must neither block nor raise."""

ObserveModel = Callable[[str, bytes, ChunkLayout], None]
"""Receives the name, namespace and layout of each model that a program uses."""

Progress = Callable[[int], None]
"""Callback that receives the number of remaining bytes."""


class TieredCache:
    """A cache of chunks over several tiers. Created with :meth:`open`.

    Once closed, methods that look up, store or change chunks raise :class:`KVTierError`.
    """

    def __init__(self, settings: Settings, hierarchy: Hierarchy) -> None:
        self.settings = settings
        self._hierarchy = hierarchy
        self.catalog = hierarchy.catalog
        """Which chunk is in which tier."""
        self.memory = hierarchy.memory
        """The first tier."""
        self.lower = hierarchy.lower
        """The tiers below it, fastest first."""
        self.tiers = hierarchy.tiers
        """All tiers, in the order of the settings."""
        self.quarantined = hierarchy.quarantined
        """A bit mask of the tiers in which a namespace is in quarantine."""
        self.counts = hierarchy.counts
        """Outcomes since the start, by name."""
        self.usage = hierarchy.usage
        """Tokens looked up and hit since the start, by model and tenant."""
        self.layouts = hierarchy.layouts
        """The layouts of the models in use, by namespace. Add that of each model before its chunks."""
        self.observers = hierarchy.observers
        self.tasks = hierarchy.tasks
        """Tasks that end when the cache is closed."""
        self.warn = hierarchy.warn
        """Logs an unexpected miss, at most once a minute per kind."""
        self.findings = hierarchy.findings
        """What was found out about the settings."""
        quarter = hierarchy.memory.arena.capacity // 4
        queue_bytes = {tier.index: tier.settings.queue or quarter for tier in hierarchy.lower}
        # In the order in which they use each other.
        self._allocator = Allocator(hierarchy)
        self._reader = Reader(hierarchy, self._allocator)
        self._writer = Writer(hierarchy, self._reader, queue_bytes)
        self._evicting = EvictStage(hierarchy, self._allocator, self._writer)
        self._storing = StoreStage(hierarchy, self._allocator, self._writer)
        self._encoding = EncodeStage(hierarchy, self._reader)
        self._holding = HeldStage(hierarchy, self._writer)
        self._expiry = TtlExpiry(hierarchy)
        self._clearing = ClearStage(hierarchy, self._writer)
        discovering = DiscoverStage(hierarchy)
        self.verifying = VerifyStage(hierarchy, self._clearing, follows=settings.verify > 0)
        """Compares chunks with what engines compute."""
        self._moving = MoveStage(
            hierarchy, self._allocator, self._reader, self._writer, discovering, self._clearing
        )
        self._boundaries = Boundaries(hierarchy, discovering)
        self.expecting = ExpectStage(hierarchy)
        """Chunks that peers push into the first tier, reported by the code that receives them."""
        self._looking_up = LookUpStage(
            hierarchy,
            settings.prefetch,
            self._reader,
            discovering,
            self.expecting,
            self._boundaries,
            self._storing,
        )
        self._misses = MissStage(hierarchy, discovering)
        self.identify = self._misses.identify
        """See :meth:`MissStage.identify`."""
        self.explain_prompt = self._misses.explain_prompt
        """See :meth:`MissStage.explain_prompt`."""
        self.note_dropped = self._storing.note_dropped
        """Counts chunks that an engine may not store."""
        self.load_or_compute = self._looking_up.load_or_compute
        """Decides what is loaded and what is computed."""
        self._finished = self._closed = False
        self._expiring = 0
        self.observe_lookup: ObserveLookup | None = None
        """Receives every lookup with ``expected`` that is neither local nor repeated."""
        self.observe_reserved: ObserveReserved | None = None
        """Receives all chunks that are about to be filled."""
        self.observe_answer_end: Callable[[AnswerEnd], None] | None = None
        """Receives the end of every answer that an engine reports."""
        self.observe_model: ObserveModel | None = None
        """Receives every model passed to :meth:`model`."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings | None = None,
        *,
        plugins: Plugins | None = None,
        pools: Sequence[tuple[TierSettings, Backend]] = (),
    ) -> AsyncIterator[TieredCache]:
        """Open every tier, load the existing chunks into the catalog, and serve until the context exits.

        ``settings`` defaults to :func:`~kvtier.settings.load_settings`, ``plugins`` to those selected by the
        settings. ``pools`` are appended to the tiers of the settings.

        On exit, pending writes are completed for up to ``drain_timeout``. Raises
        :class:`kvtier.errors.SettingsError` and :class:`kvtier.errors.TierError`.
        """
        settings = settings or load_settings()
        plugins = plugins or Plugins.load(settings.plugins)
        media = [(tier, plugins.backend(tier.type)(tier)) for tier in plugins.tier_settings(settings)]
        check_memory([tier for tier, backend in media if is_memory(type(backend)) or tmpfs_bytes(tier)])
        media += pools
        codecs = [None, *(plugins.codecs(tier, backend) for tier, backend in media[1:])]
        encoded = [index for index, found in enumerate(codecs) if found is not None]
        tenants = configured_tenants(settings)
        policies = [shared_policy(plugins.policy, tier, settings, tenants) for tier, _ in media]
        catalog = Catalog(policies, encoded, remembered=settings.why.remembered_chunks, later=call_later)
        layouts = Layouts()
        async with AsyncExitStack() as stack:
            first, medium = media[0][0], media[0][1].capabilities().arena
            assert medium is not None, "the settings are valid only if the first tier is memory"
            memory = HostMemory(first, medium.create_arena(), catalog, Sealer(settings.checksum))
            stack.callback(memory.close)
            for _, backend in media[1:]:
                await backend.open()
                stack.push_async_callback(backend.close)
            tasks = await stack.enter_async_context(open_background_tasks())
            encoders = [
                None
                if found is None
                else Encoder(found, layouts, checksum=settings.checksum, keys=keys_of(tier))
                for found, (tier, _) in zip(codecs, media, strict=True)
            ]
            lower = [
                Tier(index, tier, backend, catalog, tasks, memory.sealer, encoders[index])
                for index, (tier, backend) in enumerate(media[1:], 1)
            ]
            planner, observers = TransferPlanner(catalog, [memory, *lower]), list(plugins.observers(settings))
            usage = Usage(tenant_names(settings))
            hierarchy = Hierarchy(memory, lower, catalog, planner, tasks, observers, layouts, usage)
            cache = cls(settings, hierarchy)
            await cache._start(tasks)
            try:
                yield cache
            finally:
                # Shielded: what only memory holds is written, even if the program is cancelled.
                with anyio.CancelScope(shield=True):
                    await cache.finish()
                cache._closed = True

    async def _start(self, tasks: TaskGroup) -> None:
        """Find the chunks in the tiers, and start the background tasks."""
        for tier in self.lower:
            # Before anything is read: such a medium transfers only from and to registered memory.
            if tier.capabilities.registration is not None:
                await tier.capabilities.registration.register(self.arena)
            await self._holding.load(tier)
        await self._check_room()
        tasks.start_soon(self._evicting.run)
        tasks.start_soon(self._expiry.run)
        if self.lower and self.settings.prefetch.ahead:
            stages = self._hierarchy, self._allocator, self._reader
            tasks.start_soon(prefetch_ahead, *stages, lambda: self._finished)
        for tier in self.lower:
            tasks.start_soon(self._writer.run, tier.index)
            tasks.start_soon(tier.contact)
            tasks.start_soon(self._holding.find_unseen, tier)
            tasks.start_soon(self._holding.forget_lost, tier)
            if tier.settings.codec["type"] != IDENTITY and not tier.shared:
                tasks.start_soon(self._encoding.run, tier)

    async def _check_room(self) -> None:
        """Find whether the disks have room for what the tiers may still store."""
        tiers = [
            (tier.settings, self.catalog.used(tier.index) + tier.unseen_bytes)
            for tier in self.lower
            if isinstance(tier.settings, LocalTierSettings)
        ]
        with suppress(OSError):
            for room in await to_thread.run_sync(rooms, tiers):
                if room.remedy:
                    self.findings.note(f"room {room.tiers}", f"{room.tiers}: {room}", room.remedy)

    @property
    def arena(self) -> Arena:
        """The memory of the first tier."""
        return self.memory.arena

    def _check_open(self) -> None:
        if self._closed:
            raise KVTierError(CLOSED)

    def model(self, name: str, *, token_bytes: int, salt: str = "") -> ModelCache:
        """Return access to one model's chunks by token IDs, with ``token_bytes`` bytes of KV per token."""
        self._check_open()
        model = ModelCache(self, name, token_bytes=token_bytes, salt=salt)
        if self.observe_model is not None:
            self.observe_model(name, model.namespace, model.layout)
        return model

    def add_observer(self, observer: Observer) -> None:
        """Notify ``observer`` of every transfer and change from now on."""
        self.observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Undo :meth:`add_observer`."""
        self.observers.remove(observer)

    # Control path: synchronous.

    def look_up(
        self, query: Query, expected: Expected | None = None, *, staged: Staged | None = None
    ) -> FoundPrefix:
        """Lease the longest held prefix of a prompt, and start to prefetch chunks of lower tiers.

        Does not block: the result has ready chunks and chunks in flight. With ``expected``, the shared pools
        are queried for the rest. Chunks that a peer pushes here are added to the result, leased, as they
        become READY, until the push of the next one ends, or was not announced and does not begin soon. Only
        then are the pools queried. ``staged`` holds chunks that were pushed into staging buffers instead of
        tiers.
        """
        self._check_open()
        found = FoundPrefix(query, staged)
        self._looking_up.count_tokens(found, expected)
        self._looking_up.prefix(found, expected)
        if not query.local and not query.repeated:
            whole = found.count - (found.partial is not None)
            self.catalog.report_missed(query.keys[whole:], query.hints)
            self._report_lookup(query, expected, whole)
        return found

    def look_up_state(self, query: Query, expected: Expected, state_bytes: int) -> FoundPrefix:
        """Lease the longest prefix of whole chunks at whose end a state is stored, and that state.

        For models with states, where every other prefix is useless: either all of these chunks arrive or
        none is returned, and the state, an object of ``state_bytes``, is the last of them. Otherwise like
        :meth:`look_up`, but nothing is expected to be pushed.
        """
        self._check_open()
        found = FoundPrefix(query)
        self._looking_up.count_tokens(found, expected)
        self._looking_up.boundary(found, expected, state_bytes)
        if not query.repeated:
            self.catalog.report_missed(query.keys[found.held :], query.hints)
            self._report_lookup(query, expected, max(0, found.count - 1))
        return found

    def _report_lookup(self, query: Query, expected: Expected | None, found: int) -> None:
        if self.observe_lookup is None or expected is None or not query.keys:
            return
        layout = self.layouts.get(expected.namespace)
        tokens = 0 if layout is None else layout.chunk_tokens
        size = object_bytes(layout.payload_bytes(tokens)) if layout is not None else expected.lengths[0]
        compute = query.compute_seconds / len(query.keys)
        self.observe_lookup(
            PromptLookup(time.monotonic(), query.keys, size, tokens, found, compute, query.hints)
        )

    def supersede_tails(self, chunk: ChunkKey, *, whole: bool) -> None:
        """Remove shorter chunks that begin like one just stored, or that one if a longer one does.

        Not from shared pools.
        """
        if shorter := self.catalog.superseded(chunk, whole=whole):
            self._replace(shorter)

    def supersede_states(self, chunk: ChunkKey) -> None:
        """Remove the states before the end of a chunk at which a prompt was continued, and a new one stored.

        The next turn of a chat continues at the new state, another answer to this turn at the one at the end
        of ``chunk``. States stay where prompts branch, and in shared pools.
        """
        if states := self._boundaries.superseded(chunk):
            self._replace(states)

    def uncover(self, keys: Sequence[ChunkKey], tier: str) -> None:
        """Have a canary's chunks read from a tier: see :meth:`ClearStage.uncover`.

        If that is none of this cache, another one has them removed: what it reads from there is, too.
        """
        at = next((each.index for each in self.tiers if each.name == tier), None)
        if at is None:
            self.tasks.start_soon(self.expire, keys)
        elif at:
            self._clearing.uncover(keys, at)

    async def expire(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the chunks of a canary from all tiers after :data:`CANARY_SECONDS`."""
        if self._expiring < MAX_CANARIES:
            self._expiring += 1
            await anyio.sleep(CANARY_SECONDS)
            self._expiring -= 1
            await self.clear(keys)

    def _replace(self, keys: Sequence[ChunkKey]) -> None:
        own = [tier.index for tier in self.tiers if not tier.shared]
        self.tasks.start_soon(self._clearing.clear, keys, own, RemovalReason.REPLACED)

    async def settle(self, found: FoundPrefix, progress: ReportProgress | None = None) -> None:
        """Wait for pushed chunks, then for fetched chunks according to ``prefetch.policy``; drop the rest.

        Calls ``progress`` when chunks have arrived and more are in flight; it may take those.
        """
        await self._looking_up.settle(found, progress)

    def explain(
        self, found: FoundPrefix, namespace: bytes = b"", adapter: str = "", beginning: bytes = b""
    ) -> list[Miss]:
        """Return why the tokens behind what a settled lookup has found were not a hit, in prefix order.

        ``adapter``: what identifies the prompt's adapter. ``beginning``: see
        :func:`~kvtier.memory.keys.beginning_of`. Does not block; takes a few microseconds for each chunk that
        was not found. Call it before chunks of the prompt are stored.
        """
        return self._misses.explain(found, namespace, adapter, beginning)

    def reserve(self, header: ChunkHeader, hints: ChunkHints | None = None) -> Reservation | None:
        """Reserve arena memory for one chunk. Return ``None`` if it is already held or memory is full."""
        [reservation] = self.reserve_all([header], [hints])
        return reservation

    def reserve_all(
        self,
        headers: Sequence[ChunkHeader],
        hints: Sequence[ChunkHints | None] = (),
        *,
        declining: bool = False,
        again: bool = False,
    ) -> list[Reservation | None]:
        """Call :meth:`reserve` for each chunk of one namespace, in a fifth of the time.

        ``hints``: those of each chunk, or none at all. Once one reservation fails for lack of memory, so do
        all after it. ``declining``, ``again``: see :meth:`StoreStage.reserve_all`.
        """
        self._check_open()
        reserved = self._storing.reserve_all(headers, hints, declining=declining, again=again)
        if self.observe_reserved is not None:
            self.observe_reserved(reserved)
        return reserved

    @property
    def lacks_room(self) -> bool:
        """Whether chunks have been evicted or declined, because there was no room."""
        return self.counts["evicted"] + self.counts["store_declined"] > 0

    @property
    def wants_again(self) -> bool:
        """Whether engines are to offer the chunks of a prompt again when its answer has ended."""
        return self.lacks_room and self.memory.declines

    def commit(self, reservations: Sequence[Reservation], *, pushed: bool = False) -> None:
        """Publish filled chunks, and write them to the tiers below that admit them.

        ``pushed``: by a peer, for a request that will look them up. That lookup is their first use.
        """
        self._storing.commit(reservations, pushed=pushed)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Cancel reservations whose chunks will not be filled, and free their memory."""
        self._storing.abandon(reservations)

    def cancel(self, reservations: Sequence[Reservation]) -> None:
        """Cancel reservations whose memory may still be written to: the caller releases their leases."""
        self._storing.cancel(reservations)

    def pin(self, keys: Sequence[ChunkKey], seconds: float | None = None) -> int:
        """Protect the held prefix of ``keys`` from eviction. Return its length in chunks."""
        self._check_open()
        held = keys[: len(self.catalog.prefix(keys))]
        self.catalog.pin(held, None if seconds is None else time.monotonic() + seconds)
        if self._hierarchy.planner.admission.selective:
            self._storing.admit(held)
        return len(held)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Undo :meth:`pin`."""
        self._check_open()
        self.catalog.pins.remove(keys)

    # Data path: asynchronous.

    async def prefetch(self, query: Query, expected: Expected | None = None) -> int:
        """Prefetch the held prefix into the first tier. Return its length there in chunks."""
        found = self.look_up(query, expected)
        try:
            await found.settle(None)
            return found.ready
        finally:
            found.release()

    async def move(self, keys: Sequence[ChunkKey], source: str, target: str, *, copy: bool = False) -> int:
        """Move chunks between tiers. Return how many of them ``target`` holds afterwards."""
        self._check_open()
        move = Move(keys=keys, source=self.index_of(source), target=self.index_of(target), copy=copy)
        return await self._moving.execute(move)

    def gather(self, keys: Sequence[ChunkKey], expected: Expected, target: str) -> Gathering:
        """Return an operation that copies a prompt's chunks, in prefix order, from any tier to ``target``.

        It starts with :meth:`Gathering.run`. The other tiers keep their chunks.
        """
        self._check_open()
        return Gathering(self._moving, keys, expected, self.index_of(target))

    async def clear(
        self,
        keys: Sequence[ChunkKey] | None = None,
        *,
        namespace: bytes | None = None,
        tiers: Sequence[str] | None = None,
    ) -> Cleared:
        """Remove ``keys``, the chunks of a namespace, or all chunks, from ``tiers`` or all tiers.

        Chunks in flight into a tier are dropped on arrival; the memory of leased chunks is freed with the
        last lease. From a shared pool, only chunks in this host's catalog are removed: other hosts may need
        the rest. After clearing a namespace, or everything, in all tiers, pools are not queried for it while
        this cache is open. Returns what was removed.
        """
        self._check_open()
        every = self.tiers
        chosen = [tier.index for tier in every] if tiers is None else [self.index_of(name) for name in tiers]
        if keys is not None:
            return await self._clearing.clear(keys, chosen)
        self.verifying.lift(namespace, chosen)
        if tiers is None:
            self.catalog.namespaces.reset(namespace)
        return await self._clearing.clear_all(namespace, chosen)

    async def clear_weights(self, weights_id: str, *, tiers: Sequence[str] | None = None) -> Cleared:
        """Remove the chunks of the weights that an id names, of all models, from ``tiers`` or all tiers.

        Returns what was removed. Raises :class:`SettingsError` for an unknown tier.
        """
        names = [tier.name for tier in self.tiers] if tiers is None else tiers
        chunks = freed = 0
        for space in self.catalog.namespaces.known():
            if has_weights(space, weights_id):
                cleared = await self.clear(namespace=space, tiers=names)
                chunks += cleared.chunks
                freed += cleared.bytes
        return Cleared([], chunks, freed)

    @property
    def pending_bytes(self) -> int:
        """Bytes still to be written to lower tiers."""
        return self._writer.pending_bytes

    async def drain(self, seconds: float, progress: Progress | None = None) -> bool:
        """Wait up to ``seconds`` until all queued chunks are written. Return whether they are."""
        with anyio.move_on_after(seconds):
            while pending := self.pending_bytes:
                if progress is not None:
                    progress(pending)
                await anyio.sleep(DRAIN_POLL_SECONDS)
        return not self.pending_bytes

    async def finish(self, progress: Progress | None = None) -> None:
        """Write chunks that only the arena holds, for up to ``drain_timeout``. Idempotent.

        Call it on shutdown, after the last store. ``progress`` receives the number of remaining bytes.
        """
        if self._finished:
            return
        self._finished = True
        self._storing.flush()
        if not await self.drain(self.settings.drain_timeout, progress):
            logger.warning(
                "lost %d bytes that were not written within drain_timeout (%g s)",
                self.pending_bytes,
                self.settings.drain_timeout,
            )

    def index_of(self, name: str) -> int:
        """Return the index of a tier. Raises :class:`SettingsError` if no tier has this name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier.index
        names = ", ".join(tier.name for tier in self.tiers)
        raise SettingsError(f"unknown tier {name!r}: use one of {names}")

    def status(self) -> dict[str, object]:
        """Return the state of all tiers and the counters, for display and tests."""
        return {
            "tiers": [tier.status() for tier in self.tiers],
            "tenants": tenants_status(self.tiers),
            "arena": {"used_bytes": self.arena.used, "leases": self.arena.leases},
            "flights": len(self._reader.flights),
            "pushed": {"announced": self.expecting.announced, "waiting": self.expecting.waiting},
            "pending_bytes": self.pending_bytes,
            "pinned_chunks": self.catalog.pinned,
            "quarantined": self.verifying.status(),
            "counts": dict(self.counts),
        }


class ModelCache:
    """View of a :class:`~kvtier.cache.TieredCache` for one model and one tenant.

    The KV of a token is ``token_bytes`` opaque bytes. The end of a prompt is a shorter chunk, unless
    ``partial_chunks`` is off. Prefixes are found in steps of :attr:`ChunkLayout.granularity` tokens.
    Raises :class:`LayoutError` unless ``token_bytes`` is a positive integer. All methods raise
    :class:`KVTierError` once the cache is closed, and for token IDs that are not integers from 0 to
    2**32 - 1.
    """

    def __init__(self, cache: TieredCache, name: str, *, token_bytes: int, salt: str = "") -> None:
        # SupportsIndex: an integer of numpy, but no float.
        if not isinstance(token_bytes, SupportsIndex) or token_bytes < 1:  # type: ignore[redundant-expr]
            raise LayoutError(
                f"token_bytes is {token_bytes!r}: set it to the bytes of KV per token, of all layers together"
            )
        token_bytes = int(token_bytes)  # Products of an integer of numpy could overflow.
        settings = cache.settings
        self._cache = cache
        chunk_tokens = CHUNK_TOKENS if settings.chunk_tokens == "auto" else settings.chunk_tokens
        self.layout = ChunkLayout(chunk_tokens, (GroupLayout(1, (token_bytes,)),), platform="rows")
        """How the KV of its chunks is laid out."""
        self.namespace = namespace(name, self.layout)
        """What identifies the model and its layout in keys."""
        cache.layouts.add(self.namespace, self.layout)
        self._root = root_key(self.namespace, salt)
        self._tenant = tenant_of_salt(salt) if settings.tenants else ""
        self._token_bytes = token_bytes
        self._partial = settings.partial_chunks
        self._chunk_bytes = chunk_tokens * token_bytes
        """Of the KV of a whole chunk."""
        self._hashes_bytes = chunk_tokens // self.layout.granularity * BLOCK_HASH_BYTES
        """Of the block hashes of a whole chunk."""

    def keys(self, tokens: Sequence[int] | bytes) -> list[ChunkKey]:
        """Return the keys of a prompt's chunks in prefix order."""
        return chunk_keys(self._root, self._encode(tokens), self.layout.chunk_tokens, tail=self._partial)

    async def store(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Store the KV of a prompt. Return the number of tokens held afterwards, including those held before.

        Copies in a worker thread. Skips chunks for which there is no memory. ``hints`` are for the eviction
        policies of the tiers. Raises :class:`LayoutError` if ``rows`` is not as :data:`Rows` describes, or is
        smaller than the KV of all ``tokens``.
        """
        encoded, view = self._encode(tokens), self._view(rows, len(tokens))
        keys, hashes = self.keys(encoded), self._hashes(encoded)
        parents = [self._root, *keys]
        headers, sources = [], []
        for index, key in enumerate(keys):
            source = view[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]
            blocks = hashes[index * self._hashes_bytes : (index + 1) * self._hashes_bytes]
            length = len(source) // self._token_bytes
            headers.append(ChunkHeader(key, parents[index], self.namespace, len(source), blocks, length))
            sources.append(source)
        reservations, copies = [], []
        room = self._cache.reserve_all(headers, [self._owned(hints)] * len(headers))
        for reservation, source in zip(room, sources, strict=True):
            if reservation is not None:
                reservations.append(reservation)
                copies.append((reservation.lease.view[HEADER_BYTES:], source))
        try:
            await to_thread.run_sync(copy_all, copies)
        except BaseException:
            self._cache.abandon(reservations)
            raise
        self._cache.commit(reservations)
        for header in [reservation.header for reservation in reservations]:
            self._cache.supersede_tails(header.key, whole=len(header.block_hashes) == self._hashes_bytes)
        return self._tokens(len(self._cache.catalog.prefix(keys)), len(tokens))

    async def retrieve(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Fill ``rows`` with the KV of the longest held prefix. Return its length in tokens.

        ``hints`` replace those of the chunks that are found. Raises :class:`LayoutError` as :meth:`store`
        does, also if less is held than ``rows`` has room for, and if it is read-only.
        """
        encoded, view = self._encode(tokens), self._view(rows, len(tokens))
        if view.readonly:
            raise LayoutError("the memory for the KV is read-only: pass memory that can be written to")
        keys, hashes = self.keys(encoded), self._hashes(encoded)
        block_tags = PromptTags(self._root, block_tags_of(hashes), self._hashes_bytes // BLOCK_HASH_BYTES)
        query = Query(keys, len(tokens), hints=self._owned(hints), block_tags=block_tags)
        found = self._cache.look_up(query, self._expected(len(tokens)))
        try:
            await self._cache.settle(found)
            copies, filled = [], 0
            for index, chunk in enumerate(found.chunks):
                stop = self._tokens(index + 1, len(tokens))
                if found.partial and index == found.count - 1:
                    stop = filled + self._equal(chunk.lease.view, hashes[index * self._hashes_bytes :])
                target = view[filled * self._token_bytes : stop * self._token_bytes]
                copies.append((target, chunk.lease.view[HEADER_BYTES : HEADER_BYTES + len(target)]))
                filled = stop
            await to_thread.run_sync(copy_all, copies)
            return filled
        finally:
            found.release()

    def _encode(self, tokens: Sequence[int] | bytes) -> bytes:
        """Encode token IDs. Every method that takes some calls this first, so it checks whether it may."""
        self._cache._check_open()
        try:
            return encode_tokens(tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise KVTierError(f"token IDs must be integers from 0 to 4294967295: {error}") from error

    def _view(self, rows: Rows, tokens: int) -> memoryview:
        """Return the first bytes of ``rows``, for the KV of ``tokens``."""
        view = bytes_of(rows)
        length = tokens * self._token_bytes
        if len(view) < length:
            raise LayoutError(
                f"{tokens} tokens with {self._token_bytes} bytes of KV each do not fit {len(view)} bytes: "
                "pass fewer tokens or a larger buffer"
            )
        return view[:length]

    def _owned(self, hints: ChunkHints | None) -> ChunkHints | None:
        """Return hints with the tenant whom the salt names, if they name none."""
        if not self._tenant or (hints is not None and hints.tenant):
            return hints
        return msgspec.structs.replace(hints or ChunkHints(), tenant=self._tenant)

    def _hashes(self, tokens: bytes) -> bytes:
        return block_hashes(tokens, self.layout.granularity)

    def _equal(self, chunk: memoryview, hashes: bytes) -> int:
        """Return how many leading tokens of a chunk have these block hashes."""
        try:
            stored = ChunkHeader.parse(chunk).block_hashes
        except CorruptChunk:
            return 0
        return equal_blocks(stored, hashes) * self.layout.granularity

    def held_tokens(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens in the catalog. Moves no data and queries no pool."""
        return self._tokens(len(self._cache.catalog.prefix(self.keys(tokens))), len(tokens))

    async def prefetch(self, tokens: Sequence[int]) -> int:
        """Prefetch a prompt's chunks. Return the number of leading tokens in memory afterwards."""
        query = Query(self.keys(tokens), len(tokens))
        ready = await self._cache.prefetch(query, self._expected(len(tokens)))
        return self._tokens(ready, len(tokens))

    async def move(self, tokens: Sequence[int], source: str, target: str, *, copy: bool = False) -> int:
        """Move a prompt's chunks between tiers. Return the number of tokens in ``target`` afterwards."""
        return self._tokens(await self._cache.move(self.keys(tokens), source, target, copy=copy), len(tokens))

    def pin(self, tokens: Sequence[int], seconds: float | None = None) -> int:
        """Protect a prompt's chunks from eviction. Return the number of leading tokens pinned."""
        return self._tokens(self._cache.pin(self.keys(tokens), seconds), len(tokens))

    def unpin(self, tokens: Sequence[int]) -> None:
        """Undo :meth:`pin`."""
        self._cache.unpin(self.keys(tokens))

    async def clear(self, tokens: Sequence[int] | None = None) -> int:
        """Remove a prompt's chunks, or all chunks of this model. Return the number of chunks removed."""
        if tokens is None:
            return (await self._cache.clear(namespace=self.namespace)).chunks
        return (await self._cache.clear(self.keys(tokens))).chunks

    def _expected(self, tokens: int) -> Expected:
        whole, total = self._chunk_bytes, tokens * self._token_bytes
        lengths = [object_bytes(min(whole, total - start)) for start in range(0, total, whole)]
        return Expected(self.namespace, lengths)

    def _tokens(self, chunks: int, tokens: int) -> int:
        return min(chunks * self.layout.chunk_tokens, tokens)
