"""Staging buffers: registered memory next to an engine's KV cache, for KV transfers without a host copy.

Each worker of an engine has a buffer of ``kv_transfer.buffer`` bytes on the device of its KV. All ranks use
the same allocation: a chunk's slices are at the same offset on every rank. The memory belongs to a NIXL
process (:mod:`kvtier.transports.nixl.worker`), and only that process loads NIXL. The worker opens the memory,
like the arena, and copies between it and the engine's blocks. So neither a peer nor NIXL can crash an engine.

Chunks pushed here are visible to this engine's lookups only, and are dropped at the first load, because the
engine's own cache holds them from then on. There are no checksums over device memory. Correctness relies on
this: NIXL reports that every rank's bytes have arrived; the namespace, which includes the layout, is the same
on both sides; a chunk's length divides evenly among the ranks; and the slice is granted, under a number used
once, from before the first byte until the commit.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.cache import TieredCache
from kvtier.catalog.catalog import State
from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import ArenaError, PeerError
from kvtier.memory.arena import Arena
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout
from kvtier.memory.slices import Lease, Slices
from kvtier.peers.grants import GrantBook
from kvtier.peers.protocol import Stage, Staged
from kvtier.peers.push_targets import PushTarget, Written
from kvtier.peers.remote_leases import RemoteLease
from kvtier.settings import Settings
from kvtier.tiers.host_memory import Reservation
from kvtier.transports.base import Access
from kvtier.transports.nixl.link import ARENA_BYTES, Endpoint
from kvtier.transports.nixl.process import Batch, NixlProcess, Part, Region
from kvtier.transports.nixl.protocol import DONE
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

DEFAULT_BYTES = 1 << 30
"""Default of ``kv_transfer.buffer``, per rank."""
NUMBER_BITS = 63
TICK_SECONDS = 0.25
"""Interval of the liveness check of NIXL processes and of expiry."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 10.0
"""Back-off before lost buffers are recreated. It starts again after buffers that have lasted longer."""
THREADS = 4

Notify = Callable[["Offer"], Awaitable[None]]


class Offer(NamedTuple):
    """Notification to a worker: how to open its staging buffer, or why it has none."""

    number: int
    """Identifies the buffers of all ranks; 0 without buffers."""
    handle: bytes
    """CUDA IPC handle of GPU memory, or file path of host memory."""
    length: int
    reason: str


class PeerStaging(NamedTuple):
    """The staging buffers of an engine at a peer."""

    number: int
    endpoints: list[Endpoint]
    """One per rank."""


class Staging(PushTarget):
    """The staging buffers of one engine, until one of them is lost."""

    def __init__(
        self,
        layout: ChunkLayout,
        nixl_processes: Sequence[NixlProcess],
        grants: GrantBook,
        slices: Slices,
        cache: TieredCache,
        deadline: float,
    ) -> None:
        """``deadline``: timeout in seconds of writing one batch."""
        super().__init__(grants, slices.capacity)
        self.number = 1 + secrets.randbits(NUMBER_BITS - 1)
        self.ranks = layout.ranks
        self.shares = len(set(layout.shares(layout.chunk_tokens)))
        """Parts of a chunk's payload, each of which one or more ranks hold."""
        self._closed = False
        self._nixl_processes = nixl_processes
        self._slices = slices
        self._cache = cache
        self._deadline = deadline
        self._filling: set[ChunkKey] = set()
        self._ready: dict[ChunkKey, tuple[Lease, float]] = {}
        """Served chunks, with the time of their commit; oldest first."""
        self._connected: dict[str, None] = {}
        """Names of remote agents that every NIXL process has added."""
        self._connecting = anyio.Lock()

    @property
    def endpoints(self) -> list[bytes]:
        """Encoded NIXL endpoints for peers to write to, one per rank."""
        return [Endpoint.of(bytes(ARENA_BYTES), process).encode() for process in self._nixl_processes]

    @property
    def closed(self) -> bool:
        """Whether some rank's memory is lost, and with it all contents."""
        return self._closed or any(nixl_process.exited.is_set() for nixl_process in self._nixl_processes)

    # Chunks that peers push here.

    def length_of(self, header: ChunkHeader) -> int:
        """Return the length of one rank's slice, rounded up to pages."""
        return -(-header.payload_bytes // self.shares // 4096) * 4096

    def state(self, key: ChunkKey) -> State:
        """Return the state as this engine's lookups see it."""
        state = self._cache.memory.state(key)
        if state is not State.ABSENT:
            return state
        if key in self._ready:
            return State.READY
        return State.PENDING if key in self._filling else State.ABSENT

    def reserve(self, headers: Sequence[ChunkHeader]) -> Sequence[Reservation | None]:
        """Reserve room for chunks that a peer will write."""
        reservations = []
        for header in headers:
            lease = self.take(header)
            if lease is not None:
                self._filling.add(header.key)
            reservations.append(None if lease is None else Reservation(header, lease))
        return reservations

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give up chunks that will not be written."""
        for reservation in reservations:
            self._filling.discard(reservation.header.key)
            reservation.lease.release()

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Publish complete chunks to lookups. They are dropped unless looked up in time."""
        for reservation in reservations:
            key = reservation.header.key
            self._filling.discard(key)
            if self.closed or key in self._ready:
                reservation.lease.release()
                continue
            self._ready[key] = reservation.lease, time.monotonic()
            self._cache.expecting.wake(key)

    def offset_of(self, reservation: Reservation) -> int:
        """Return the offset of the slice; it has no header."""
        return reservation.lease.offset

    async def verify(self, written: Sequence[Written]) -> Sequence[bool]:
        """Accept all while the memory is intact. See the module on why there are no checksums."""
        return [not self.closed] * len(written)

    async def cut_off(self) -> None:
        """Stop all writes by ending the NIXL processes. The contents are lost."""
        async with anyio.create_task_group() as tasks:
            for nixl_process in self._nixl_processes:
                tasks.start_soon(nixl_process.end)

    # Lookups of this engine.

    def find(self, key: ChunkKey) -> Lease | None:
        """Return a lease on a committed chunk."""
        lease, _ = self._ready.get(key, (None, 0.0))
        return None if lease is None else lease.share()

    def drop(self, key: ChunkKey) -> None:
        """Remove a chunk that was loaded or has expired. Its last lease frees the memory."""
        lease, _ = self._ready.pop(key, (None, 0.0))
        if lease is not None:
            lease.release()

    def expire(self) -> None:
        """Drop reservations not written in time, and chunks not looked up in time."""
        self.grants.expire()
        until = time.monotonic() - self.grants.seconds[Access.WRITE]
        for key in [key for key, (_, since) in self._ready.items() if since < until]:
            self.drop(key)

    # Chunks that this engine pushes.

    def take(self, header: ChunkHeader) -> Lease | None:
        """Reserve room for a chunk that this engine's workers will fill; ``None`` without room."""
        # A peer writes a slice of one length on every rank.
        if self.closed or not header.payload_bytes or header.payload_bytes % self.shares:
            return None
        return self._slices.allocate(header.payload_bytes // self.shares)

    async def write(self, peer: PeerStaging, writes: Sequence[tuple[Lease, RemoteLease]]) -> bool:
        """Write every rank's slices to the peer. Return whether all of them arrived.

        When it returns or is cancelled, no transfer uses the slices any more.
        """
        try:
            await self._connect(peer)
        except PeerError as error:
            logger.debug("cannot connect to a peer's staging buffer: %s", error)
            return False
        parts = [Part(lease.offset, remote.offset, remote.length) for lease, remote in writes]
        batches: list[Batch] = []
        with anyio.move_on_after(self._deadline):
            async with anyio.create_task_group() as tasks:
                for nixl_process, endpoint in zip(self._nixl_processes, peer.endpoints, strict=True):
                    batches.append(nixl_process.transfer(endpoint.name, [parts], write=True))
                    tasks.start_soon(nixl_process.until_ended, batches[-1])
        return all(result == DONE for batch in batches for result in batch.results)

    async def _connect(self, peer: PeerStaging) -> None:
        async with self._connecting:
            names = [endpoint.name for endpoint in peer.endpoints]
            if all(name in self._connected for name in names):
                return
            for nixl_process, endpoint in zip(self._nixl_processes, peer.endpoints, strict=True):
                await nixl_process.add_peer(endpoint.name, endpoint.address, endpoint.metadata)
            self._connected.update(dict.fromkeys(names))

    # Common.

    def close(self) -> None:
        """Drop all chunks and grants, because the memory is lost. Idempotent."""
        self._closed = True
        for key in list(self._ready):
            self.drop(key)
        self.grants.close()

    def status(self) -> dict[str, object]:
        """Return counters and gauges."""
        return {
            "capacity_bytes": self._slices.capacity,
            "used_bytes": self._slices.used,
            "leases": self._slices.leases,
            "chunks": len(self._ready),
            "grants": self.grants.open,
        }


class _Worker(NamedTuple):
    gpu: str
    notify: Notify


class EngineStaging:
    """One engine's buffers: created once every worker has requested one, and recreated when lost."""

    def __init__(self, stagings: Stagings, namespace: bytes, layout: ChunkLayout) -> None:
        self.namespace = namespace
        self.layout = layout
        self._current: Staging | None = None
        self._stagings = stagings
        self._workers: dict[int, _Worker] = {}
        self._opened: dict[int, int] = {}
        """Number of the buffers that each rank's worker has open."""
        self._scope: CancelScope | None = None

    @property
    def current(self) -> Staging | None:
        """The buffers, while every worker has them open and none is lost."""
        current = self._current
        return None if current is None or current.closed else current

    def join(self, rank: int, gpu: str, notify: Notify) -> None:
        """Register a worker that requests a buffer: on a GPU, or in host memory if ``gpu`` is empty."""
        if rank in self._workers:
            self.leave(rank, self._workers[rank].notify)
        self._workers[rank] = _Worker(gpu, notify)
        if len(self._workers) == self.layout.ranks:
            self._scope = CancelScope()
            workers = [self._workers[index] for index in range(self.layout.ranks)]
            self._stagings.tasks.start_soon(self._run, self._scope, workers)

    def opened(self, rank: int, number: int) -> None:
        """Record that a worker has opened the offered buffer."""
        self._opened[rank] = number

    def leave(self, rank: int, notify: Notify) -> None:
        """Remove the disconnected worker with this ``notify``, and close the buffers of all ranks.

        Idempotent. Does nothing if another worker has taken its rank.
        """
        if rank not in self._workers or self._workers[rank].notify != notify:
            return
        del self._workers[rank]
        self._opened.pop(rank, None)
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.cancel()
        if self._current is not None:
            self._current.close()
            self._current = None

    async def _run(self, scope: CancelScope, workers: Sequence[_Worker]) -> None:
        backoff = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        with scope:
            while True:
                began = time.monotonic()
                try:
                    await self._serve(workers)
                except (PeerError, ArenaError) as error:
                    logger.warning("KV transfers use the first tier only, without staging buffers: %s", error)
                    for worker in workers:
                        await worker.notify(Offer(0, b"", 0, str(error)))
                    return
                if time.monotonic() - began > MAX_PAUSE_SECONDS:
                    backoff.reset()  # They were in use, and lost with one peer.
                await anyio.sleep(backoff.next())

    async def _serve(self, workers: Sequence[_Worker]) -> None:
        """Create buffers, and serve them until they are lost.

        Raises :class:`PeerError` and :class:`ArenaError` if they cannot be created.
        """
        nixl_processes: list[NixlProcess] = []
        shared: list[Arena] = []
        staging: Staging | None = None
        try:
            for worker in workers:
                # Sequentially: if one fails to start, the earlier ones are ended.
                nixl_process = await self._stagings.start_nixl_process(worker.gpu, shared)
                nixl_processes.append(nixl_process)
            staging = self._stagings.create(self.layout, nixl_processes)
            capacity = self._stagings.capacity
            for rank, (worker, nixl_process) in enumerate(zip(workers, nixl_processes, strict=True)):
                handle = nixl_process.opened.handle or _path(shared[rank])
                await worker.notify(Offer(staging.number, handle, capacity, ""))
            while not staging.closed:
                if self._current is None and self._all_opened(staging.number):
                    self._current = staging
                    logger.info("staging buffers of %d bytes open on %d ranks", capacity, len(nixl_processes))
                staging.expire()
                await anyio.sleep(TICK_SECONDS)
            logger.info("staging buffers lost with a disconnected peer; recreating them")
        finally:
            # Before the memory is closed: peers may be writing to it until the processes have exited.
            with CancelScope(shield=True):
                for nixl_process in nixl_processes:
                    await nixl_process.end()
            if staging is not None:
                staging.close()
                if self._current is staging:
                    self._current = None
            for arena in shared:
                arena.close()

    def _all_opened(self, number: int) -> bool:
        return all(self._opened.get(rank) == number for rank in range(self.layout.ranks))


def _path(arena: Arena) -> bytes:
    """Return the path by which other processes of this user open the shared memory while it exists here."""
    return f"/proc/{os.getpid()}/fd/{arena.fd}".encode()


class Stagings:
    """The staging buffers of all engines of this host. Bound to one event loop."""

    def __init__(self, settings: Settings, nixl: NixlSettings | None, cache: TieredCache) -> None:
        """``nixl``: the settings of the transport; ``None`` without staging buffers."""
        self.capacity = settings.kv_transfer.buffer or DEFAULT_BYTES
        """Bytes per rank."""
        self.tasks: TaskGroup
        self._grants = settings.peer.model_copy(update={"share": 1.0})
        self._reserve = settings.kv_transfer.reserve
        self._nixl = nixl
        self._cache = cache
        self._executor = WorkerThreads(THREADS)
        self._engines: dict[str, EngineStaging] = {}

    @property
    def enabled(self) -> bool:
        """Whether engines may have staging buffers."""
        return self._nixl is not None

    @property
    def open(self) -> list[Staging]:
        """The usable ones."""
        return [engine.current for engine in self._engines.values() if engine.current is not None]

    def of_engine(self, engine: str, namespace: bytes, layout: ChunkLayout) -> EngineStaging:
        """Return an engine's staging, created on first use and kept until :meth:`remove`."""
        return self._engines.setdefault(engine, EngineStaging(self, namespace, layout))

    def remove(self, engine: str) -> None:
        """Remove a disconnected engine."""
        self._engines.pop(engine, None)

    def find(self, namespace: bytes) -> Staging | None:
        """Return the open buffers of the only engine that serves a namespace; ``None`` if there are none."""
        engines = self._of_model(namespace)
        return engines[0].current if len(engines) == 1 else None

    def answer(self, request: Stage, rejection: str) -> Staged:
        """Return the buffers that a peer may write chunks of a namespace to, or why there are none.

        ``rejection``: why this host takes no chunks of it; empty if it does.
        """
        staging = self.find(request.namespace)
        if rejection:
            reason = rejection
        elif not self.enabled:
            reason = "kv_transfer.device is cpu there"
        elif len(self._of_model(request.namespace)) > 1:
            reason = "several engines there serve this model, each with its own staging buffer"
        elif staging is None:
            reason = "the engine there has no staging buffer at present"
        else:
            return Staged(request.ticket, staging.number, staging.endpoints, "")
        return Staged(request.ticket, 0, [], reason)

    def _of_model(self, namespace: bytes) -> list[EngineStaging]:
        return [engine for engine in self._engines.values() if engine.namespace == namespace]

    async def start_nixl_process(self, gpu: str, shared: list[Arena]) -> NixlProcess:
        """Start one rank's NIXL process. Appends host memory to ``shared``. Raises :class:`PeerError`."""
        if gpu:
            region = Region(self.capacity, gpu=gpu)
        else:
            shared.append(Arena.create(self.capacity))
            region = Region(self.capacity, shared[-1].fd)
        assert self._nixl is not None
        return await NixlProcess.start(region, self._nixl, self._executor, serves=True)

    def create(self, layout: ChunkLayout, nixl_processes: Sequence[NixlProcess]) -> Staging:
        """Create the buffers of one engine from its running NIXL processes."""
        assert self._nixl is not None
        slices = Slices(self.capacity)
        grants = GrantBook(slices, self._grants, one_sided=True, reserve=self._reserve)
        return Staging(layout, nixl_processes, grants, slices, self._cache, self._nixl.deadline)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Create buffers on request within the block."""
        try:
            async with open_background_tasks() as self.tasks:
                yield
        finally:
            self._executor.close()

    def status(self) -> list[dict[str, object]]:
        """Return the status of each open buffer."""
        return [staging.status() for staging in self.open]
