"""Staging buffers: memory beside an engine's KV, between which hand-overs go without a copy to the host.

Each worker of an engine has one of ``hand_over.buffer`` bytes, on the device that its KV is on, and all of
them are divided alike: a chunk's slices lie at the same offset on every rank. The memory belongs to a carrier
(:mod:`kvtier.transports.nixl.carrier`), which alone has NIXL in it; the worker opens it, like the arena,
and copies between it and the engine's pages. So neither a peer nor NIXL can end an engine.

What is pushed here is found by the look-ups of this engine alone, and goes with the first load: the engine's
own cache has it from then on. Nobody computes a checksum over a device's memory. What counts is that NIXL
says that every rank's bytes have arrived, that the namespace, which holds the layout, is the same on both
sides, that a chunk's length divides evenly among the ranks, and that a slice was granted, by a number that is
given once, from before the first byte until the commit.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.arena import Arena
from kvtier.cache import TieredCache
from kvtier.catalog import State
from kvtier.errors import ArenaError, PeerError
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.layout import ChunkLayout
from kvtier.peers.grants import GrantBook
from kvtier.peers.places import Place, Told
from kvtier.peers.promises import Promise
from kvtier.pipeline.store import Reservation
from kvtier.router import FIRST
from kvtier.settings import Settings
from kvtier.slices import Lease, Slices
from kvtier.tasks import open_tasks
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Access
from kvtier.transports.nixl.carrier import DONE
from kvtier.transports.nixl.endpoint import ARENA_BYTES, Endpoint
from kvtier.transports.nixl.process import Batch, CarrierProcess, Part, Region
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

DEFAULT_BYTES = 1 << 30
"""Of each rank, where ``hand_over.buffer`` is left out."""
NUMBER_BITS = 63
TICK_SECONDS = 0.25
"""How often it is looked whether carriers are there still, and what is over."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 10.0
"""Before buffers that were lost are made again."""
THREADS = 4

Tell = Callable[["Offer"], Awaitable[None]]


class Offer(NamedTuple):
    """What a worker is told of its buffer: how to open it, or why there is none."""

    number: int
    """Of the buffers of all ranks together; 0 where there is none."""
    handle: bytes
    """CUDA's handle for memory of a GPU, the path of a file for memory of the host."""
    length: int
    reason: str


class PeerStaging(NamedTuple):
    """The buffers of an engine at a peer."""

    number: int
    endpoints: list[Endpoint]
    """One for each rank."""


class Staging(Place):
    """The buffers of one engine, from when all of its workers have opened them until one of them is lost."""

    def __init__(
        self,
        layout: ChunkLayout,
        carriers: Sequence[CarrierProcess],
        grants: GrantBook,
        slices: Slices,
        cache: TieredCache,
        deadline: float,
    ) -> None:
        """``deadline``: seconds for which one batch may be written."""
        super().__init__(grants, slices.capacity)
        self.number = 1 + secrets.randbits(NUMBER_BITS - 1)
        self.ranks = layout.ranks
        self._closed = False
        self._carriers = carriers
        self._slices = slices
        self._cache = cache
        self._deadline = deadline
        self._filling: set[ChunkKey] = set()
        self._ready: dict[ChunkKey, tuple[Lease, float]] = {}
        """What is served, and since when; the oldest first."""
        self._reached: dict[str, None] = {}
        """Names of agents that every carrier is ready for."""
        self._reaching = anyio.Lock()

    @property
    def endpoints(self) -> list[bytes]:
        """What a peer needs to write here, a rank each."""
        found = []
        for carrier in self._carriers:
            assert carrier.opened is not None
            endpoint = Endpoint.of(bytes(ARENA_BYTES), carrier.name, self._slices.capacity, carrier.opened)
            found.append(endpoint.encode())
        return found

    @property
    def closed(self) -> bool:
        """Whether some rank's memory is gone, and with it what was in them."""
        return self._closed or any(carrier.gone.is_set() for carrier in self._carriers)

    # What peers push here.

    def length_of(self, header: ChunkHeader) -> int:
        """Of one rank's slice, in whole pages."""
        return -(-header.payload_bytes // self.ranks // 4096) * 4096

    def state(self, key: ChunkKey) -> State:
        """As this engine's look-ups see it."""
        state = self._cache.hierarchy.catalog.state(key, FIRST)
        if state is not State.ABSENT:
            return state
        if key in self._ready:
            return State.READY
        return State.PENDING if key in self._filling else State.ABSENT

    def reserve(self, header: ChunkHeader) -> Reservation | None:
        """Room for a chunk that a peer is to write."""
        reservation = self.take(header)
        if reservation is not None:
            self._filling.add(header.key)
        return reservation

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """They will not be written."""
        for reservation in reservations:
            self._filling.discard(reservation.header.key)
            reservation.lease.release()

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """They are whole: found from now on, and dropped when nobody looks them up in time."""
        for reservation in reservations:
            key = reservation.header.key
            self._filling.discard(key)
            if self.closed or key in self._ready:
                reservation.lease.release()
                continue
            self._ready[key] = reservation.lease, time.monotonic()
            self._cache.expecting.arrived(key)

    def offset_of(self, reservation: Reservation) -> int:
        """There is no header."""
        return reservation.lease.offset

    async def verify(self, told: Sequence[Told]) -> Sequence[bool]:
        """All, as long as the memory is there: see the module."""
        return [not self.closed] * len(told)

    async def cut_off(self) -> None:
        """Have nobody write here any longer. With that ends what the buffers hold."""
        async with anyio.create_task_group() as tasks:
            for carrier in self._carriers:
                tasks.start_soon(carrier.end)

    # What this engine finds.

    def find(self, key: ChunkKey) -> Lease | None:
        """A lease on a chunk that has been pushed here whole."""
        lease, _ = self._ready.get(key, (None, 0.0))
        return None if lease is None else lease.share()

    def drop(self, key: ChunkKey) -> None:
        """It has been loaded, or is not wanted any longer. The memory is free with its last lease."""
        lease, _ = self._ready.pop(key, (None, 0.0))
        if lease is not None:
            lease.release()

    def expire(self) -> None:
        """Take back what was reserved and not written in time, or written and not looked up."""
        self.grants.expire()
        until = time.monotonic() - self.grants.seconds[Access.WRITE]
        for key in [key for key, (_, since) in self._ready.items() if since < until]:
            self.drop(key)

    # What this engine pushes.

    def take(self, header: ChunkHeader) -> Reservation | None:
        """Room for a chunk that this engine's workers are to fill; ``None`` where there is none."""
        if self.closed or not header.payload_bytes or header.payload_bytes % self.ranks:
            return None
        lease = self._slices.allocate(header.payload_bytes // self.ranks)
        return None if lease is None else Reservation(header, lease)

    async def write(self, peer: PeerStaging, writes: Sequence[tuple[Lease, Promise]]) -> bool:
        """Write every rank's slices to the peer's; whether all of them have arrived.

        Nothing touches the slices any longer when it ends, also where it is cancelled.
        """
        try:
            await self._reach(peer)
        except PeerError as error:
            logger.debug("a peer's staging buffer is out of reach: %s", error)
            return False
        parts = [Part(lease.offset, promise.offset, promise.length) for lease, promise in writes]
        batches: list[Batch] = []
        with anyio.move_on_after(self._deadline):
            async with anyio.create_task_group() as tasks:
                for carrier, endpoint in zip(self._carriers, peer.endpoints, strict=True):
                    batches.append(carrier.carry(endpoint.name, [parts], write=True))
                    tasks.start_soon(carrier.until_ended, batches[-1])
        return all(result == DONE for batch in batches for result in batch.results)

    async def _reach(self, peer: PeerStaging) -> None:
        async with self._reaching:
            names = [endpoint.name for endpoint in peer.endpoints]
            if all(name in self._reached for name in names):
                return
            for carrier, endpoint in zip(self._carriers, peer.endpoints, strict=True):
                await carrier.reach(endpoint.name, endpoint.address, endpoint.metadata)
            self._reached.update(dict.fromkeys(names))

    # For all.

    def close(self) -> None:
        """The memory is gone, and what was in it. Harmless when repeated."""
        self._closed = True
        for key in list(self._ready):
            self.drop(key)
        self.grants.close()

    def status(self) -> dict[str, object]:
        """For people and tests."""
        return {
            "capacity_bytes": self._slices.capacity,
            "used_bytes": self._slices.used,
            "leases": self._slices.leases,
            "chunks": len(self._ready),
            "grants": self.grants.open,
        }


class _Worker(NamedTuple):
    gpu: str
    tell: Tell


class EngineStaging:
    """One engine's buffers: made when every worker has asked for one, and again when they are lost."""

    def __init__(self, stagings: Stagings, namespace: bytes, layout: ChunkLayout) -> None:
        self.namespace = namespace
        self.layout = layout
        self._current: Staging | None = None
        self._stagings = stagings
        self._workers: dict[int, _Worker] = {}
        self._opened: dict[int, int] = {}
        """By rank, the number of the buffers that its worker has open."""
        self._scope: CancelScope | None = None

    @property
    def current(self) -> Staging | None:
        """The buffers, while every worker has opened them and none of them is lost."""
        current = self._current
        return None if current is None or current.closed else current

    def join(self, rank: int, gpu: str, tell: Tell) -> None:
        """A worker wants a buffer: in memory of a GPU, or of the host where ``gpu`` is empty."""
        if rank in self._workers:
            self.leave(rank, self._workers[rank].tell)
        self._workers[rank] = _Worker(gpu, tell)
        if len(self._workers) == self.layout.ranks:
            self._scope = CancelScope()
            workers = [self._workers[each] for each in range(self.layout.ranks)]
            self._stagings.tasks.start_soon(self._run, self._scope, workers)

    def opened(self, rank: int, number: int) -> None:
        """A worker has opened what it was offered."""
        self._opened[rank] = number

    def leave(self, rank: int, tell: Tell) -> None:
        """The worker that is told by ``tell`` is gone, and with it the use of the others' buffers.

        Harmless when repeated, or where another one has taken its place.
        """
        if rank not in self._workers or self._workers[rank].tell != tell:
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
        pause = FIRST_PAUSE_SECONDS
        with scope:
            while True:
                try:
                    await self._serve(workers)
                except (PeerError, ArenaError) as error:
                    logger.warning("chunks are handed over through the first tier alone: %s", error)
                    for worker in workers:
                        await worker.tell(Offer(0, b"", 0, str(error)))
                    return
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _serve(self, workers: Sequence[_Worker]) -> None:
        """Make buffers and serve them until they are lost.

        Raises :class:`PeerError` and :class:`ArenaError` where that cannot be.
        """
        carriers: list[CarrierProcess] = []
        shared: list[Arena] = []
        staging: Staging | None = None
        try:
            for worker in workers:
                # One by one: where a later one fails, those that have come up are ended.
                carrier = await self._stagings.start_carrier(worker.gpu, shared)
                carriers.append(carrier)
            staging = self._stagings.make(self.layout, carriers)
            capacity = self._stagings.capacity
            for rank, (worker, carrier) in enumerate(zip(workers, carriers, strict=True)):
                handle = b"" if carrier.opened is None else carrier.opened.handle
                await worker.tell(Offer(staging.number, handle or _path(shared[rank]), capacity, ""))
            while not staging.closed:
                if self._current is None and self._all_opened(staging.number):
                    self._current = staging
                    logger.info("staging buffers of %d bytes are open on %d ranks", capacity, len(carriers))
                staging.expire()
                await anyio.sleep(TICK_SECONDS)
            logger.info("a staging buffer was lost with a peer that went away, and is made anew")
        finally:
            with CancelScope(shield=True):
                for carrier in carriers:
                    await carrier.end()
            if staging is not None:
                staging.close()
                if self._current is staging:
                    self._current = None
            for arena in shared:
                arena.close()

    def _all_opened(self, number: int) -> bool:
        return all(self._opened.get(rank) == number for rank in range(self.layout.ranks))


def _path(arena: Arena) -> bytes:
    """By which other processes of this user open shared memory, as long as this one has it."""
    return f"/proc/{os.getpid()}/fd/{arena.fd}".encode()


class Stagings:
    """The staging buffers of all engines of this host. Belongs to one event loop."""

    def __init__(self, settings: Settings, nixl: NixlSettings, cache: TieredCache) -> None:
        self.capacity = settings.hand_over.buffer or DEFAULT_BYTES
        """Of one rank's buffer, in bytes."""
        self.tasks: TaskGroup
        self._grants = settings.peer.model_copy(update={"share": 1.0})
        self._reserve = settings.hand_over.reserve
        self._nixl = nixl
        self._cache = cache
        self._hop = WorkerThreads(THREADS)
        self._engines: dict[str, EngineStaging] = {}

    @property
    def open(self) -> Iterator[Staging]:
        """Those that can be used."""
        found = [engine.current for engine in self._engines.values() if engine.current is not None]
        return iter(found)

    def of(self, engine: str, namespace: bytes, layout: ChunkLayout) -> EngineStaging:
        """An engine's, from its first worker that wants one until :meth:`left`."""
        return self._engines.setdefault(engine, EngineStaging(self, namespace, layout))

    def left(self, engine: str) -> None:
        """The engine is gone."""
        self._engines.pop(engine, None)

    def find(self, namespace: bytes) -> Staging | None:
        """The buffers of the one engine that serves a model, where they are open."""
        return None if self.refusal(namespace) else next(self._of_model(namespace)).current

    def refusal(self, namespace: bytes) -> str:
        """Why chunks of a model cannot be staged here; empty where they can."""
        engines = list(self._of_model(namespace))
        if len(engines) > 1:
            return "more than one engine there serves this model, and each has a staging buffer of its own"
        if not engines or engines[0].current is None:
            return "the engine there has no staging buffer at present"
        return ""

    def _of_model(self, namespace: bytes) -> Iterator[EngineStaging]:
        return (engine for engine in self._engines.values() if engine.namespace == namespace)

    async def start_carrier(self, gpu: str, shared: list[Arena]) -> CarrierProcess:
        """Memory for one rank. What is the host's is added to ``shared``. Raises :class:`PeerError`."""
        if gpu:
            region = Region(self.capacity, gpu=gpu)
        else:
            shared.append(Arena.create(self.capacity))
            region = Region(self.capacity, shared[-1].fd)
        name = f"kvtier-{secrets.token_hex(8)}"
        return await CarrierProcess.start(region, self._nixl, name, self._hop, serves=True)

    def make(self, layout: ChunkLayout, carriers: Sequence[CarrierProcess]) -> Staging:
        """The buffers of one engine, whose carriers have come up."""
        slices = Slices(self.capacity)
        grants = GrantBook(slices, self._grants, one_sided=True, reserve=self._reserve)
        return Staging(layout, carriers, grants, slices, self._cache, self._nixl.deadline)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Make buffers, for as long as the block lasts."""
        try:
            async with open_tasks() as self.tasks:
                try:
                    yield
                finally:
                    self.tasks.cancel_scope.cancel()
        finally:
            self._hop.close()

    def status(self) -> list[dict[str, object]]:
        """Of each that is open, for people and tests."""
        return [staging.status() for staging in self.open]
