"""KV transfers: push the chunks of one prompt into a peer's first tier while they are computed here.

::

    transfer = instance.transfer_kv("10.0.0.2:8200", keys)  # Keys of the whole prompt. Does not block.
    ...                                                     # Chunks are pushed as they become READY.
    result = await transfer.finish(5)                       # No further chunk will become READY.
    result.leading                                          # Length of the prefix that the peer has.

Lookups at the peer wait for the announced chunks (``Query.expect_seconds``). READY chunks are leased
until the peer has them, so that they cannot be evicted before. A chunk that is also in a staging buffer is
transferred from there if the peer has a staging buffer as well, otherwise through the first tier.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.cache import TieredCache
from kvtier.catalog.catalog import State
from kvtier.errors import ChannelError, PeerError
from kvtier.events import Observer
from kvtier.logs import ChangedWarnings
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import MAX_IN_ONE
from kvtier.peers.push import Pusher, PushOutcome, PushSource
from kvtier.peers.source import Source
from kvtier.peers.staging.push import StagedChunks
from kvtier.peers.targets import Targets, UnnamedTarget
from kvtier.settings.peer import split_address
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.planner import FIRST
from kvtier.units import format_size


class KVTransferSummary(NamedTuple):
    """Result of a KV transfer."""

    outcomes: dict[ChunkKey, PushOutcome]
    """Outcome of every chunk, in prefix order."""
    leading: int
    """Length of the prefix that the peer has, in chunks."""
    pushed_bytes: int
    seconds: float
    """Total duration."""
    pushing_seconds: float
    """Time with pushes in flight; for most of :attr:`seconds` there is nothing to push yet."""
    refused: bool
    """Whether the peer rejects this namespace."""
    last_error: str
    """Why the transfer is incomplete, as text; empty if it is complete or the reason is unknown."""

    def log(self, to: str) -> None:
        """Log a summary."""
        counts = Counter(self.outcomes.values())
        logger.info(
            "%d of %d chunks pushed to %s, %d already there: %s in %.1f ms (%.2f GB/s)",
            counts[PushOutcome.OK],
            len(self.outcomes),
            to,
            counts[PushOutcome.HELD],
            format_size(self.pushed_bytes),
            self.pushing_seconds * 1e3,
            self.pushed_bytes / max(self.pushing_seconds, 1e-9) / 1e9,
        )


logger = logging.getLogger("kvtier")

MAX_KV_TRANSFERS = 1024
"""Concurrent transfers."""
BATCH_BYTES, BATCH_CHUNKS = 32 << 20, 64
"""Limits of one reservation; it always contains at least one chunk."""
PUSH_SECONDS = 30.0
"""Timeout of one batch."""
FINISH_SECONDS = 10.0


class KVTransfer:
    """Transfer of the chunks of one prompt to one peer. Created by :meth:`KVTransfers.begin`.

    Chunks are pushed in the order in which they become READY in the first tier here. The transfer ends at the
    first chunk that the peer has no room for or that fails twice, because later chunks are useless without
    it. A lost connection is reopened once. Peer failures never raise. Bound to one event loop.
    """

    def __init__(self, transfers: KVTransfers, number: int, to: str, keys: Sequence[ChunkKey]) -> None:
        self.to = to
        """``HOST:PORT`` of the peer."""
        self.unnamed = False
        """Whether only a request names that address, so that nothing has connected to it."""
        self.keys = list(dict.fromkeys(keys))
        self.announced = anyio.Event()
        """Set when lookups at the peer wait for the chunks, or when the transfer has ended before."""
        self.ended = anyio.Event()
        """Set when the transfer has ended: nothing is pushed, leased or awaited."""
        self.last_error = ""
        """The last error, as text."""
        self.pushed_bytes = 0
        self.staging = StagedChunks(self._wants, self._staged)
        """Queued and in-flight chunks that are transferred from a staging buffer."""
        self._first_tier = _FirstTier(transfers)
        """All others."""
        self._transfers = transfers
        self._number = number
        self._scope = CancelScope()
        self._awaited = set(self.keys)
        self._queue: deque[ChunkKey] = deque()
        """READY here, waiting to be pushed."""
        self._outcomes: dict[ChunkKey, PushOutcome] = {}
        self._began = time.monotonic()
        self._seconds = 0.0
        self._finishing = False
        self._failed = False
        self._refused = False
        self._in_flight = 0
        self._pushing_since = 0.0
        self._pushing_seconds = 0.0
        self._connection_error: ChannelError | None = None
        self._changed = anyio.Event()

    @property
    def result(self) -> KVTransferSummary:
        """The result so far; chunks without an outcome count as ``ABSENT``."""
        outcomes = {key: self._outcomes.get(key, PushOutcome.ABSENT) for key in self.keys}
        return KVTransferSummary(
            outcomes,
            sum(1 for _ in itertools.takewhile(lambda outcome: outcome.at_peer, outcomes.values())),
            self.pushed_bytes,
            self._seconds or time.monotonic() - self._began,
            self._pushing_seconds,
            self._refused,
            self.last_error,
        )

    async def finish(self, seconds: float = FINISH_SECONDS) -> KVTransferSummary:
        """Push the remaining READY chunks within ``seconds``, and return the result.

        Call it when no further chunk will become READY. On timeout or cancellation, aborts the transfer as
        :meth:`abort` does. May be called again.
        """
        self._finishing = True
        self._notify()
        try:
            with anyio.move_on_after(seconds):
                await self.ended.wait()
        finally:
            if not self.ended.is_set():
                self.last_error = self.last_error or f"not complete within {seconds:g} s"
                self.abort()
        return self.result

    def abort(self) -> None:
        """End the transfer without pushing further chunks. Idempotent.

        Takes effect at once, except that chunks in flight stay leased until the transport releases them.
        """
        self._scope.cancel()

    def ready(self, key: ChunkKey) -> None:
        """Queue a chunk that became READY in the first tier. Called by :class:`KVTransfers`."""
        if key not in self._awaited:
            return
        self._awaited.discard(key)
        self._queue.append(key)
        # At once: the next chunk that is stored might evict it.
        self._source_of(key).lease(key)
        self._notify()

    def _source_of(self, key: ChunkKey) -> PushSource:
        return self.staging.source_of(key) or self._first_tier

    def _wants(self, key: ChunkKey) -> bool:
        """Return whether a chunk is still to be pushed, and not READY in the first tier."""
        return key in self._awaited and not self._failed

    def _staged(self, key: ChunkKey) -> None:
        """Queue a chunk that is complete in a staging buffer."""
        self._transfers.stop_awaiting(key, self)
        self.ready(key)

    async def run(self, *, hinted: bool) -> None:
        """Push until the transfer ends. Called once, by :class:`KVTransfers`."""
        try:
            with self._scope:
                retry = not hinted or await self._find_target()
                while retry:
                    retry = await self._run_connected()
        finally:
            self._end()

    async def _find_target(self) -> bool:
        """Return whether requests may name the peer. Set the address to connect to."""
        try:
            self.to = await self._transfers.targets.find(self.to)
        except PeerError as error:
            self.last_error, self.unnamed = str(error), isinstance(error, UnnamedTarget)
            return False
        return True

    async def _run_connected(self) -> bool:
        """Push over one connection. Return whether to reconnect: only after the first loss."""
        first = self._connection_error is None
        connected = False
        try:
            async with self._transfers.peers.checkout(self.to) as source:
                connected = True
                self._connection_error, self.last_error = None, ""
                await self._push_to(source)
                return False
        except ChannelError as error:
            self.last_error = str(error)
            self._connection_error = error
            return connected and first

    async def _push_to(self, source: Source) -> None:
        target = Pusher(source, self._transfers.sealer)
        left = [key for key in self.keys if key not in self._outcomes]
        try:
            if not await target.announce(self._number, left):
                logger.debug("peer %s: announcement rejected, too many chunks announced already", self.to)
            self.announced.set()
            await self._pump(target)
        finally:
            target.withdraw(self._number)
            self._refused = bool(target.last_error)
            if self.staging.last_error:
                self._transfers.staging_warnings.note(self.to, self.staging.last_error)
            self.last_error = self.last_error or target.last_error
        if self._connection_error is not None:
            raise self._connection_error

    async def _pump(self, target: Pusher) -> None:
        """Push batches concurrently until all chunks have an outcome, one fails, or the connection ends."""
        async with anyio.create_task_group() as tasks:
            watching = CancelScope()
            tasks.start_soon(self._watch, target.source, watching)
            while not self._is_over():
                changed = self._changed
                if not self._queue:
                    await changed.wait()
                    continue
                # Before the batch is chosen: chunks that become READY meanwhile join it.
                await target.source.pushing.acquire()
                source, batch = self._next_batch()
                if batch:
                    if not self._in_flight:
                        self._pushing_since = time.monotonic()
                    self._in_flight += 1
                    tasks.start_soon(self._push, target, source, batch)
                else:
                    target.source.pushing.release()
            watching.cancel()
            if self._connection_error is not None:
                tasks.cancel_scope.cancel()

    def _is_over(self) -> bool:
        if self._connection_error is not None or self._failed:
            return True
        idle = not self._queue and not self._in_flight
        return idle and (self._finishing or not self._awaited)

    async def _watch(self, source: Source, scope: CancelScope) -> None:
        with scope:
            await source.ended.wait()
            self._connection_error = self._connection_error or PeerError("the connection was lost")
            self._notify()

    def _next_batch(self) -> tuple[PushSource, list[ChunkKey]]:
        """Dequeue the leading chunks that are pushed from the same memory."""
        source = self._source_of(self._queue[0])
        batch: list[ChunkKey] = []
        room = BATCH_BYTES
        while self._queue and len(batch) < BATCH_CHUNKS and self._source_of(self._queue[0]) is source:
            length = source.lease(self._queue[0], always=True)
            room -= length
            if batch and room < 0:
                break
            key = self._queue.popleft()
            if length:
                batch.append(key)
            else:
                self._outcomes[key] = PushOutcome.ABSENT
        return source, batch

    async def _push(self, target: Pusher, source: PushSource, batch: Sequence[ChunkKey]) -> None:
        """Push one batch. If the connection ends, requeue it for the next one."""
        outcomes: Sequence[PushOutcome] = ()
        try:
            outcomes = await source.push(target, batch, PUSH_SECONDS)
        except ChannelError as error:
            self._connection_error = self._connection_error or error
        finally:
            target.source.pushing.release()
            self._in_flight -= 1
            if not self._in_flight:
                self._pushing_seconds += time.monotonic() - self._pushing_since
            self._settle(source, batch, outcomes)
            self._notify()

    def _settle(self, source: PushSource, batch: Sequence[ChunkKey], outcomes: Sequence[PushOutcome]) -> None:
        if not outcomes:  # The connection has ended; the next one begins where this one stopped.
            self._queue.extendleft(reversed(batch))
            return
        retry = []
        for key, outcome in zip(batch, outcomes, strict=True):
            length = source.release(key)
            if source.retried and not outcome.at_peer:
                retry.append(key)
                continue
            self._outcomes[key] = outcome
            self._failed |= not outcome.at_peer
            self.pushed_bytes += length if outcome is PushOutcome.OK else 0
        self._queue.extendleft(reversed(retry))

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _end(self) -> None:
        self._seconds = time.monotonic() - self._began
        self._queue.clear()
        self._awaited.clear()
        for key in self.keys:
            self._outcomes.setdefault(key, PushOutcome.ABSENT)
        self._first_tier.close()
        self.staging.close()
        self._transfers.end(self)
        self.announced.set()
        self.ended.set()


class _FirstTier(PushSource):
    """The first tier. A chunk may be evicted while it waits at the limit of leases."""

    retried = False

    def __init__(self, transfers: KVTransfers) -> None:
        self._transfers = transfers
        self._leases: dict[ChunkKey, Lease] = {}

    def lease(self, key: ChunkKey, *, always: bool = False) -> int:
        lease = self._leases.get(key) or self._transfers.lease(key, always=always)
        if lease is None:
            return 0
        self._leases[key] = lease
        return lease.length

    def release(self, key: ChunkKey) -> int:
        lease = self._leases.pop(key)
        length = lease.length
        self._transfers.release(lease)
        return length

    async def push(self, target: Pusher, keys: Sequence[ChunkKey], seconds: float) -> Sequence[PushOutcome]:
        return await target.push([ChunkBytes(key, self._leases[key]) for key in keys], seconds)

    def close(self) -> None:
        """Release all chunks."""
        for key in list(self._leases):
            self.release(key)


class KVTransfers(Observer):
    """All KV transfers of this host. Observes the cache, and routes READY chunks to their transfers."""

    def __init__(
        self, cache: TieredCache, peers: PeersBackend, targets: Targets, tasks: TaskGroup, max_bytes: int
    ) -> None:
        """``targets``: what requests may name. ``max_bytes``: limit of bytes leased for waiting chunks."""
        self.peers = peers
        self.targets = targets
        self.sealer = cache.memory.sealer
        self.leased_bytes = 0
        self._cache = cache
        self._tasks = tasks
        self._max_bytes = max_bytes
        self._numbers = itertools.count(1)
        self._open: set[KVTransfer] = set()
        self._awaiting: dict[ChunkKey, set[KVTransfer]] = {}
        self._counts: Counter[str] = Counter()
        self._pushed_bytes = 0
        self._pushing_seconds = 0.0
        self.staging_warnings = ChangedWarnings(
            "KV transfers to %s use the first tier instead of staging buffers: %s"
        )
        cache.add_observer(self)

    def begin(self, to: str, keys: Sequence[ChunkKey], *, hinted: bool = False) -> KVTransfer:
        """Start pushing the chunks of a prompt, in prefix order, to the peer at ``HOST:PORT``.

        The peer need not be configured, unless ``to`` is from a request (``hinted``): see
        :class:`~kvtier.peers.targets.Targets`. Raises :class:`PeerError` for an invalid address, too many
        chunks, or too many transfers.
        """
        try:
            split_address(to)
        except ValueError as error:
            raise PeerError(f"cannot start a KV transfer: {error}") from error
        if len(keys) > MAX_IN_ONE:
            raise PeerError(f"cannot start a KV transfer of {len(keys)} chunks: the limit is {MAX_IN_ONE}")
        if len(self._open) >= MAX_KV_TRANSFERS:
            raise PeerError(f"cannot start a KV transfer: {MAX_KV_TRANSFERS} in flight is the limit")
        transfer = KVTransfer(self, next(self._numbers), to, keys)
        self._open.add(transfer)
        for key in transfer.keys:
            self._awaiting.setdefault(key, set()).add(transfer)
        memory = self._cache.memory
        self.changed(FIRST, [key for key in transfer.keys if memory.state(key) is State.READY], ())
        self._tasks.start_soon(partial(transfer.run, hinted=hinted))
        return transfer

    def lease(self, key: ChunkKey, *, always: bool = False) -> Lease | None:
        """Lease a chunk that is READY in the first tier; ``None`` at the limit, unless ``always``."""
        if self.leased_bytes >= self._max_bytes and not always:
            return None
        lease = self._cache.memory.lease(key)
        if lease is not None:
            self.leased_bytes += lease.length
        return lease

    def release(self, lease: Lease) -> None:
        """Undo :meth:`lease`."""
        self.leased_bytes -= lease.length
        lease.release()

    def end(self, transfer: KVTransfer) -> None:
        """Remove a transfer that has ended, and count its outcomes."""
        self._open.discard(transfer)
        for key in transfer.keys:
            self.stop_awaiting(key, transfer)
        result = transfer.result
        self._counts.update(outcome.value for outcome in result.outcomes.values())
        self._counts["kv_transfers"] += 1
        self._counts["staged"] += transfer.staging.pushed
        self._pushed_bytes += result.pushed_bytes
        self._pushing_seconds += result.pushing_seconds
        result.log(transfer.to)

    def changed(self, tier: int, stored: Iterable[ChunkKey], removed: Iterable[ChunkKey]) -> None:
        """Queue stored chunks synchronously, so that they are leased before they can be evicted."""
        if tier != FIRST or not self._awaiting:
            return
        for key in stored:
            for transfer in list(self._awaiting.get(key, ())):
                self.stop_awaiting(key, transfer)
                transfer.ready(key)

    def close(self) -> None:
        """Stop observing the cache. The caller ends the tasks."""
        self._cache.remove_observer(self)

    def status(self) -> dict[str, object]:
        """Return counters and gauges."""
        return {
            "open": len(self._open),
            "leased_bytes": self.leased_bytes,
            "awaited": len(self._awaiting),
            "pushed_bytes": self._pushed_bytes + sum(transfer.pushed_bytes for transfer in self._open),
            "pushing_seconds": self._pushing_seconds,
            "counts": dict(self._counts),
        }

    def stop_awaiting(self, key: ChunkKey, transfer: KVTransfer) -> None:
        """Stop notifying a transfer of this chunk. Idempotent."""
        awaiting = self._awaiting.get(key)
        if awaiting is not None:
            awaiting.discard(transfer)
            if not awaiting:
                del self._awaiting[key]
