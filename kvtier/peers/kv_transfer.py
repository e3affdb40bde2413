"""KV transfers: push the chunks of one prompt into a peer's first tier while they are computed here.

::

    transfer = instance.transfer_kv("10.0.0.2:8200", keys)  # Keys of the whole prompt. Does not block.
    ...                                                     # Chunks are pushed as they become READY.
    result = await transfer.finish(5)                       # No further chunk will become READY.
    result.leading                                          # Length of the prefix that the peer has.

Lookups at the peer wait for the announced chunks (``Query.expect_seconds``). READY chunks are leased
until the peer has them, so that they cannot be evicted before. A chunk that is also in a staging buffer is
transferred from there if the peer has a staging buffer as well, otherwise through the first tier.

All transfers to one peer share a queue. What becomes READY there together, for several requests, is pushed as
one batch. Room for it is reserved before, while it is computed, as far as the peer has some to spare.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.cache import TieredCache
from kvtier.catalog.catalog import State
from kvtier.concurrency.tasks import Changes, call_later
from kvtier.errors import ChannelError, PeerError
from kvtier.events import Observer
from kvtier.logs import ChangedWarnings
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.observability.traces.spans import current, following
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import MAX_IN_ONE, MAX_RESERVED, Announced
from kvtier.peers.push import Pusher, PushOutcome, PushSource
from kvtier.peers.remote_leases import RemoteLease, RemoteLeases
from kvtier.peers.source import Source
from kvtier.peers.staging.push import StagedChunks, StagingSource
from kvtier.peers.targets import Targets, UnnamedTarget
from kvtier.settings.peer import split_address
from kvtier.tiers.host_memory import Reservation
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.planner import FIRST
from kvtier.tiers.sealer import Sealer
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
"""Limits of one batch. Its last chunk may exceed the first one."""
DECLINED_SECONDS = 1.0
"""How long nothing is reserved ahead at a peer that had no room to spare."""
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
        self.first_tier = _FirstTier(transfers)
        """All others."""
        self.queue: deque[ChunkKey] = deque()
        """READY here, waiting to be pushed."""
        self.trace = current.get()
        self._transfers = transfers
        self._pushes: _PushQueue | None = None
        """While it is connected."""
        self._number = number
        self._scope = CancelScope()
        self._awaited = set(self.keys)
        self._coming: dict[ChunkKey, ChunkHeader] = {}
        self._outcomes: dict[ChunkKey, PushOutcome] = {}
        self._began = time.monotonic()
        self._seconds = 0.0
        self._finishing = False
        self._refused = False
        self._in_flight = 0
        self._pushing_since = 0.0
        self._pushing_seconds = 0.0
        self._connection_error: ChannelError | None = None
        self._changes = Changes()

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
        self._changes.notify()
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

        Takes effect at once, except that chunks in flight stay leased until the transport releases them, and
        those in one batch with chunks of other transfers are pushed.
        """
        self._scope.cancel()

    def ready(self, key: ChunkKey) -> None:
        """Queue a chunk that became READY in the first tier. Called by :class:`KVTransfers`."""
        if key not in self._awaited:
            return
        self._awaited.discard(key)
        self._coming.pop(key, None)
        self.queue.append(key)
        # At once: the next chunk that is stored might evict it.
        self._source_of(key).lease(key)
        if self._pushes is not None:
            self._pushes.notify()

    def expect(self, header: ChunkHeader) -> None:
        """Have room reserved for an awaited chunk. Called by :class:`KVTransfers`."""
        self._coming[header.key] = header
        if self._pushes is not None:
            self._pushes.notify()

    def _source_of(self, key: ChunkKey) -> PushSource:
        return self.staging.source_of(key) or self.first_tier

    def _wants(self, key: ChunkKey) -> bool:
        """Return whether a chunk is still to be pushed, and not READY in the first tier."""
        return key in self._awaited

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
            target.announce(self._number, left, self._settle_announced)
            self._pushes = self._transfers.join(source, self)
            while not self._is_over():
                await self._changes.after(self._changes.count)
        finally:
            if self._pushes is not None:
                self._pushes.leave(self)
                self._pushes = None
            target.withdraw(self._number)
            if self.staging.last_error:
                self._transfers.staging_warnings.note(self.to, self.staging.last_error)
        if self._connection_error is not None:
            raise self._connection_error

    def _settle_announced(self, reply: Announced) -> None:
        if not reply.accepted:
            logger.debug("peer %s: announcement rejected, too many chunks announced already", self.to)
        self.announced.set()

    def _is_over(self) -> bool:
        idle = not self.queue and not self._in_flight and (self._finishing or not self._awaited)
        return idle or self._connection_error is not None

    # For its queue.

    def lose(self, error: ChannelError) -> None:
        """Process that the connection has ended."""
        self._connection_error = self._connection_error or error
        self._changes.notify()

    def dequeue(self) -> tuple[ChunkKey, int]:
        """Remove and lease the first chunk that is queued; return its length, 0 if it is gone."""
        key = self.queue.popleft()
        length = self._source_of(key).lease(key, always=True)
        if not length:
            self._outcomes[key] = PushOutcome.ABSENT
            self._changes.notify()
        return key, length

    def take_coming(self) -> Iterable[ChunkHeader]:
        """Remove and return the chunks that are being filled here, to be pushed from the first tier."""
        coming, self._coming = self._coming, {}
        return () if self.staging.filling else coming.values()

    def begin(self) -> None:
        """Process that a batch with some of its chunks is being pushed."""
        if not self._in_flight:
            self._pushing_since = time.monotonic()
        self._in_flight += 1

    def settle(
        self, source: PushSource, keys: Sequence[ChunkKey], outcomes: Sequence[PushOutcome], refusal: str
    ) -> None:
        """Process that this batch has ended; without ``outcomes``, with the connection.

        ``refusal``: why the peer rejects this namespace.
        """
        self._in_flight -= 1
        if self.ended.is_set():
            self._release_unused()
            return
        if not self._in_flight:
            self._pushing_seconds += time.monotonic() - self._pushing_since
        if refusal:
            self._refused, self.last_error = True, self.last_error or refusal
        # The next connection begins where this one has stopped.
        retry, failed = [] if outcomes else list(keys), False
        for key, outcome in zip(keys, outcomes, strict=False):
            length = source.release(key)
            if source.retried and not outcome.at_peer:
                retry.append(key)
                continue
            self._outcomes[key] = outcome
            failed |= not outcome.at_peer
            self.pushed_bytes += length if outcome is PushOutcome.OK else 0
        self.queue.extendleft(reversed(retry))
        if failed:  # Later chunks are useless without this one.
            self.queue.clear()
            self._awaited.clear()
        self._changes.notify()
        if retry and self._pushes is not None:
            self._pushes.notify()

    def _end(self) -> None:
        self._seconds = time.monotonic() - self._began
        self.queue.clear()
        self._awaited.clear()
        for key in self.keys:
            self._outcomes.setdefault(key, PushOutcome.ABSENT)
        self._transfers.end(self)
        self.announced.set()
        self.ended.set()
        self._release_unused()

    def _release_unused(self) -> None:
        """Release all chunks once none is in flight: a batch with those of other requests goes on."""
        if not self._in_flight:
            self.first_tier.close()
            self.staging.close()


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

    def chunk(self, key: ChunkKey) -> ChunkBytes:
        """Return a leased chunk."""
        return ChunkBytes(key, self._leases[key])

    def close(self) -> None:
        """Release all chunks."""
        for key in list(self._leases):
            self.release(key)


class _PushQueue:
    """Pushes the chunks of all transfers to one connected peer, in common batches."""

    def __init__(self, source: Source, sealer: Sealer) -> None:
        self._source = source
        self._sealer = sealer
        self._transfers: dict[KVTransfer, None] = {}
        self._in_flight: dict[CancelScope, Iterable[KVTransfer]] = {}
        self._rooms = RemoteLeases(source.release)
        """Room at the peer for chunks that are not complete here yet."""
        self._reserving: dict[ChunkKey, anyio.Event] = {}
        """Chunks for which such room is being requested; the event is set when there is a response."""
        self._declined_until = 0.0
        self._changes = Changes()

    def join(self, transfer: KVTransfer) -> None:
        """Push what this transfer has queued, until :meth:`leave`."""
        self._transfers[transfer] = None
        self.notify()

    def leave(self, transfer: KVTransfer) -> None:
        """Undo :meth:`join`. What is in flight goes on if it is for others, too."""
        self._transfers.pop(transfer, None)
        for scope, transfers in self._in_flight.items():
            if not any(other in self._transfers for other in transfers):
                scope.cancel()
        for key in transfer.keys if self._reserving else ():
            self._reserving.pop(key, None)
        self._rooms.drop(transfer.keys)

    def notify(self) -> None:
        """Process that chunks are queued or coming."""
        self._changes.notify()

    async def run(self) -> None:
        """Push until the connection ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            while not self._source.ended.is_set():
                count = self._changes.count
                self._reserve_ahead(tasks)
                if not any(transfer.queue for transfer in self._transfers):
                    await self._changes.after(count)
                    continue
                # Before the batch is chosen: chunks that become READY meanwhile join it.
                await self._source.pushing.acquire()
                staged, batch = self._next_batch()
                for transfer in batch:
                    transfer.begin()
                if batch:
                    tasks.start_soon(self._push, staged, batch)
                else:
                    self._source.pushing.release()

    async def _watch(self) -> None:
        await self._source.ended.wait()
        self._lose(PeerError("the connection was lost"))
        self.notify()

    def _lose(self, error: ChannelError) -> None:
        """Have the transfers reconnect."""
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers:
            transfer.lose(error)

    def _reserve_ahead(self, tasks: TaskGroup) -> None:
        """Request room for what is being computed, of all transfers, with one message per namespace."""
        headers = {header.key: header for transfer in self._transfers for header in transfer.take_coming()}
        if time.monotonic() < self._declined_until:
            return
        for _, run in itertools.groupby(headers.values(), lambda header: header.namespace):
            while group := list(itertools.islice(run, MAX_RESERVED)):
                settled = anyio.Event()
                self._reserving.update((header.key, settled) for header in group)
                tasks.start_soon(self._reserve, group, settled)

    async def _reserve(self, headers: Sequence[ChunkHeader], settled: anyio.Event) -> None:
        keys = [header.key for header in headers]
        try:
            room = await Pusher(self._source, self._sealer).reserve(headers, ahead=True)
        except ChannelError as error:
            self._lose(error)
            return
        finally:
            settled.set()
            wanted = {key for key in keys if self._reserving.get(key) is settled}
            for key in wanted:
                del self._reserving[key]
        leases = list(room.leases.values())
        self._rooms.add(lease for lease in leases if lease.key in wanted)
        self._source.release(lease for lease in leases if lease.key not in wanted)
        if len(leases) + len(room.held) + len(room.pending) < len(keys):
            self._declined_until = time.monotonic() + DECLINED_SECONDS
        if leases:
            # Before it expires: if the peer cannot reject a late write, its memory waits for the release.
            call_later((leases[0].ends - time.monotonic()) * 0.9, partial(self._rooms.drop, keys))

    async def _take_rooms(self, keys: Sequence[ChunkKey]) -> dict[int, RemoteLease]:
        """Return what is reserved for chunks, by index. Waits for responses as long as a batch may take."""
        with anyio.move_on_after(PUSH_SECONDS):
            for key in keys:
                if (settled := self._reserving.get(key)) is not None:
                    await settled.wait()
        rooms = map(self._rooms.take, keys)
        return {at: lease for at, lease in enumerate(rooms) if lease is not None}

    def _next_batch(self) -> tuple[StagingSource | None, dict[KVTransfer, list[ChunkKey]]]:
        """Dequeue chunks of all transfers from the first tier, or those of one in a staging buffer."""
        batch: dict[KVTransfer, list[ChunkKey]] = {}
        room, count, leading = BATCH_BYTES, 0, None
        for transfer in self._transfers:
            while transfer.queue and count < BATCH_CHUNKS and room > 0:
                staged = transfer.staging.source_of(transfer.queue[0])
                leading = leading if count else staged
                if staged is not leading:
                    break
                key, length = transfer.dequeue()
                if length:
                    batch.setdefault(transfer, []).append(key)
                    room -= length
                    count += 1
        return leading, batch

    async def _push(self, staged: StagingSource | None, batch: Mapping[KVTransfer, list[ChunkKey]]) -> None:
        """Push one batch. If the connection ends, requeue it for the next one."""
        target = Pusher(self._source, self._sealer)
        items = [(transfer, key) for transfer, own in batch.items() for key in own]
        keys = [key for _, key in items]
        outcomes: Sequence[PushOutcome] = ()
        with CancelScope() as scope, following(next(iter(batch)).trace):
            self._in_flight[scope] = batch
            try:
                if staged is not None:
                    outcomes = await staged.push(target, keys, PUSH_SECONDS)
                else:
                    rooms = await self._take_rooms(keys)
                    chunks = [transfer.first_tier.chunk(key) for transfer, key in items]
                    outcomes = await target.push(chunks, PUSH_SECONDS, rooms)
            except ChannelError as error:
                self._lose(error)
            finally:
                del self._in_flight[scope]
                self._source.pushing.release()
                left = iter(outcomes)
                for transfer, own in batch.items():
                    settled = list(itertools.islice(left, len(own)))
                    transfer.settle(staged or transfer.first_tier, own, settled, target.last_error)


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
        self._queues: dict[Source, _PushQueue] = {}
        self._counts: Counter[str] = Counter()
        self._pushed_bytes = 0
        self._pushing_seconds = 0.0
        self.staging_warnings = ChangedWarnings(
            "KV transfers to %s use the first tier instead of staging buffers: %s"
        )
        cache.add_observer(self)
        cache.observe_reserved = self.reserved

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

    def reserved(self, reservations: Sequence[Reservation | None]) -> None:
        """Have room reserved at the peers for chunks that are about to be filled here."""
        for reservation in filter(None, reservations if self._awaiting else ()):
            for transfer in self._awaiting.get(reservation.key, ()):
                transfer.expect(reservation.header)

    def join(self, source: Source, transfer: KVTransfer) -> _PushQueue:
        """Push the chunks of a transfer over a connection, together with those of the others."""
        if source not in self._queues:
            self._queues = {each: queue for each, queue in self._queues.items() if not each.over}
            self._queues[source] = _PushQueue(source, self.sealer)
            self._tasks.start_soon(self._queues[source].run)
        self._queues[source].join(transfer)
        return self._queues[source]

    def close(self) -> None:
        """Stop observing the cache. The caller ends the tasks."""
        self._cache.remove_observer(self)
        self._cache.observe_reserved = None

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
