"""Hand-overs: the chunks of one prompt, pushed into a peer's first tier while they are computed here.

::

    handing = instance.hand_over("10.0.0.2:8200", keys)  # Of the whole prompt. Nothing is waited for.
    ...                                                  # Each is pushed when it is READY in the first tier.
    handed = await handing.finish(5)                     # No further one will become READY.
    handed.leading                                       # So many chunks of the prompt the peer has now.

The peer's look-ups wait for the chunks that were announced in this way (``TieredCache.look_up(expect=…)``).
What is READY is leased until the peer has it, so that it cannot be evicted before. A chunk that was also put
into a staging buffer goes from there where the peer has one, too, and else by way of the first tier.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.backends.logs import Troubles
from kvtier.cache import TieredCache
from kvtier.catalog import State
from kvtier.errors import ChannelError, PeerError
from kvtier.events import Report
from kvtier.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.peers.handed import HandedOver, Progress
from kvtier.peers.protocol import MOST_IN_ONE
from kvtier.peers.push import Pushed, Target
from kvtier.peers.push_staged import StagedTarget
from kvtier.peers.source import Source
from kvtier.peers.staging import Staging
from kvtier.pipeline.store import Reservation
from kvtier.router import FIRST
from kvtier.settings_peer import split_address
from kvtier.slices import Lease
from kvtier.tier import ChunkBytes

logger = logging.getLogger("kvtier")

MOST_HAND_OVERS = 1024
"""At once."""
BATCH_BYTES, BATCH_CHUNKS = 32 << 20, 64
"""Pushed with one reservation, at most; at least one chunk."""
PUSH_SECONDS = 30.0
"""For one batch, whatever the peer and the way there do."""
FINISH_SECONDS = 10.0


class HandOver:
    """The chunks of one prompt on their way to one peer. Made by :meth:`HandOvers.begin`.

    Each is pushed when it is READY in the first tier here, be it now or later, in the order in which they
    become so. With the first that the peer has no room for, or that fails twice, it ends: those behind are of
    no use without it. A connection that is cut is opened again, once. Nothing is ever raised for what a peer
    does. Belongs to one event loop.
    """

    def __init__(self, stage: HandOvers, number: int, to: str, keys: Sequence[ChunkKey]) -> None:
        self.to = to
        """``HOST:PORT`` of the peer."""
        self.keys = list(dict.fromkeys(keys))
        self.announced = anyio.Event()
        """Set when the peer's look-ups wait for the chunks, or it has ended without that."""
        self.ended = anyio.Event()
        """Set when nothing is pushed, leased or awaited by it any longer."""
        self.trouble = ""
        """What went wrong last, for people."""
        self.pushed_bytes = 0
        self.staged_chunks = 0
        """Those that went from a staging buffer to another."""
        self._stage = stage
        self._number = number
        self._scope = CancelScope()
        self._awaited = set(self.keys)
        self._queue: deque[ChunkKey] = deque()
        """READY here, and to be pushed."""
        self._leases: dict[ChunkKey, Lease] = {}
        """Of what is in the queue, or on its way."""
        self._staged: dict[ChunkKey, tuple[Staging, Reservation]] = {}
        """Those of the queue, or on their way, that go from a staging buffer."""
        self.filling = 0
        """Chunks that its engine is about to put into a staging buffer. Counted by whoever reserves."""
        self._outcomes: dict[ChunkKey, Pushed] = {}
        self._began = time.monotonic()
        self._seconds = 0.0
        self._finishing = False
        self._failed = False
        self._unstaged = False
        self._refused = False
        self._under_way = 0
        self._pushing_since = 0.0
        self._pushing_seconds = 0.0
        self._cut: ChannelError | None = None
        self._news = anyio.Event()

    @property
    def progress(self) -> Progress:
        """How far it is."""
        counts = Counter(self._outcomes.values())
        pushed, held = counts[Pushed.OK], counts[Pushed.HELD]
        return Progress(
            chunks=len(self.keys),
            awaited=len(self._awaited),
            under_way=len(self.keys) - len(self._awaited) - len(self._outcomes),
            pushed=pushed,
            held=held,
            failed=len(self._outcomes) - pushed - held,
            pushed_bytes=self.pushed_bytes,
        )

    @property
    def result(self) -> HandedOver:
        """What became of it; of what is not settled, ``ABSENT``."""
        outcomes = {key: self._outcomes.get(key, Pushed.ABSENT) for key in self.keys}
        return HandedOver(
            outcomes,
            sum(1 for _ in itertools.takewhile(lambda outcome: outcome.there, outcomes.values())),
            self.pushed_bytes,
            self._seconds or time.monotonic() - self._began,
            self._pushing_seconds,
            self._refused,
            self.trouble,
        )

    async def finish(self, seconds: float = FINISH_SECONDS) -> HandedOver:
        """No further chunk will become READY: push those that are, so long at most, and say what came of it.

        Cancelled, or when the time is over, it ends at once as with :meth:`abort`. May be called again.
        """
        self._finishing = True
        self._tell()
        try:
            with anyio.move_on_after(seconds):
                await self.ended.wait()
        finally:
            if not self.ended.is_set():
                self.trouble = self.trouble or f"the peer has not got all of it within {seconds:g} s"
                self.abort()
        return self.result

    def abort(self) -> None:
        """End it: what is not at the peer by now will not come. Harmless when repeated.

        At once, but for what is being written: that stays leased until the transport has let go of it.
        """
        self._scope.cancel()

    def ready(self, key: ChunkKey) -> None:
        """A chunk is READY in the first tier. Told by the stage."""
        if key not in self._awaited:
            return
        self._awaited.discard(key)
        self._queue.append(key)
        lease = self._stage.lease(key) if key not in self._staged else None
        if lease is not None:
            self._leases[key] = lease
        self._tell()

    def stages(self, key: ChunkKey) -> bool:
        """Whether a chunk is wanted from a staging buffer: it is not READY yet, and the peer has one, too."""
        return key in self._awaited and not self._failed and not self._unstaged

    def staged(self, staging: Staging, chunk: Reservation) -> None:
        """A chunk is whole in a staging buffer here. The lease is this one's from now on."""
        key = chunk.header.key
        if not self.stages(key):
            chunk.lease.release()
            return
        self._staged[key] = staging, chunk
        self._stage.stop_awaiting(key, self)
        self.ready(key)

    async def run(self) -> None:
        """Push until it is over. Once, by the stage."""
        try:
            with self._scope:
                again = True
                while again:
                    again = await self._run_connected()
        finally:
            self._end()

    async def _run_connected(self) -> bool:
        """Push over one connection; whether that was cut for the first time."""
        first = self._cut is None
        connected = False
        try:
            async with self._stage.peers.lend(self.to) as source:
                connected = True
                self._cut, self.trouble = None, ""
                await self._push_to(source)
                return False
        except ChannelError as error:
            self.trouble = str(error)
            self._cut = error
            return connected and first

    async def _push_to(self, source: Source) -> None:
        target = Target(source, self._stage.sealer)
        staged = StagedTarget(target)
        left = [key for key in self.keys if key not in self._outcomes]
        try:
            if not await target.announce(self._number, left):
                logger.debug("peer %s waits for too many chunks to wait for further ones", self.to)
            self.announced.set()
            await self._pump(target, staged)
        finally:
            target.withdraw(self._number)
            self._refused = bool(target.trouble)
            if staged.trouble:
                self._stage.note_staging(self.to, staged.trouble)
            self.trouble = self.trouble or target.trouble
        if self._cut is not None:
            raise self._cut

    async def _pump(self, target: Target, staged: StagedTarget) -> None:
        """Push batch after batch, some at once, until all is settled, one fails, or the connection ends."""
        async with anyio.create_task_group() as tasks:
            watching = CancelScope()
            tasks.start_soon(self._watch, target.source, watching)
            while not self._is_over():
                news = self._news
                if not self._queue:
                    await news.wait()
                    continue
                await target.source.pushing.acquire()
                if batch := self._next_staged() or self._next_batch():
                    if not self._under_way:
                        self._pushing_since = time.monotonic()
                    self._under_way += 1
                    tasks.start_soon(self._push, target, staged, batch)
                else:
                    target.source.pushing.release()
            watching.cancel()
            if self._cut is not None:
                tasks.cancel_scope.cancel()

    def _is_over(self) -> bool:
        if self._cut is not None or self._failed:
            return True
        idle = not self._queue and not self._under_way
        return idle and (self._finishing or not self._awaited)

    async def _watch(self, source: Source, scope: CancelScope) -> None:
        with scope:
            await source.ended.wait()
            self._cut = self._cut or PeerError("the connection was lost")
            self._tell()

    def _next_staged(self) -> list[ChunkBytes]:
        """Those at the head of the queue that go from one staging buffer."""
        batch: list[ChunkBytes] = []
        room = BATCH_BYTES
        first = self._staged.get(self._queue[0]) if self._queue else None
        while first is not None and self._queue and len(batch) < BATCH_CHUNKS:
            staging, chunk = self._staged.get(self._queue[0], (None, first[1]))
            room -= chunk.header.payload_bytes
            if staging is not first[0] or (batch and room < 0):
                break
            batch.append(ChunkBytes(self._queue.popleft(), chunk.lease))
        return batch

    def _next_batch(self) -> list[ChunkBytes]:
        batch: list[ChunkBytes] = []
        room = BATCH_BYTES
        while self._queue and len(batch) < BATCH_CHUNKS and self._queue[0] not in self._staged:
            key = self._queue[0]
            lease = self._leases.get(key) or self._stage.lease(key, always=True)
            if lease is None:
                self._outcomes[self._queue.popleft()] = Pushed.ABSENT
                continue
            self._leases[key] = lease
            room -= lease.length
            if batch and room < 0:
                break
            batch.append(ChunkBytes(self._queue.popleft(), lease))
        return batch

    async def _push(self, target: Target, staged: StagedTarget, batch: Sequence[ChunkBytes]) -> None:
        """Push one batch. Where the connection ends it is to be pushed again over the next."""
        outcomes: Sequence[Pushed] = ()
        try:
            if batch[0].key in self._staged:
                staging = self._staged[batch[0].key][0]
                chunks = [self._staged[key][1] for key, _ in batch]
                outcomes = await staged.push(staging, chunks, PUSH_SECONDS)
                self._unstaged = staged.refused
            else:
                outcomes = await target.push(batch, PUSH_SECONDS)
        except ChannelError as error:
            self._cut = self._cut or error
        finally:
            target.source.pushing.release()
            self._under_way -= 1
            if not self._under_way:
                self._pushing_seconds += time.monotonic() - self._pushing_since
            self._settle(batch, outcomes)
            self._tell()

    def _settle(self, batch: Sequence[ChunkBytes], outcomes: Sequence[Pushed]) -> None:
        if not outcomes:
            self._queue.extendleft(chunk.key for chunk in reversed(batch))
            return
        again = []
        for (key, lease), outcome in zip(batch, outcomes, strict=True):
            staging, staged = self._staged.pop(key, (None, None))
            length = lease.length
            if staging is not None and staged is not None:
                staged.lease.release()
                length = staged.header.payload_bytes
                if not outcome.there:
                    again.append(key)
                    continue
            else:
                self._stage.give_back(self._leases.pop(key))
            self._outcomes[key] = outcome
            self._failed |= not outcome.there
            self.pushed_bytes += length if outcome is Pushed.OK else 0
            self.staged_chunks += staging is not None and outcome is Pushed.OK
        # By way of the first tier, in which they are as well.
        self._queue.extendleft(reversed(again))

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()

    def _end(self) -> None:
        self._seconds = time.monotonic() - self._began
        self._queue.clear()
        self._awaited.clear()
        for key in self.keys:
            self._outcomes.setdefault(key, Pushed.ABSENT)
        leases = list(self._leases.values())
        self._leases.clear()
        for lease in leases:
            self._stage.give_back(lease)
        for _, chunk in self._staged.values():
            chunk.lease.release()
        self._staged.clear()
        self._stage.forget(self)
        self.announced.set()
        self.ended.set()


class HandOvers:
    """All hand-overs of this host. An observer: what becomes READY is pushed by those who await it."""

    def __init__(self, cache: TieredCache, peers: PeersBackend, tasks: TaskGroup, most_bytes: int) -> None:
        """``most_bytes``: of chunks that wait to be pushed, that are leased at once."""
        self.peers = peers
        self.sealer = cache.hierarchy.sealer
        self.leased_bytes = 0
        self._cache = cache
        self._tasks = tasks
        self._most_bytes = most_bytes
        self._numbers = itertools.count(1)
        self._open: set[HandOver] = set()
        self._awaiting: dict[ChunkKey, set[HandOver]] = {}
        self._counts: Counter[str] = Counter()
        self._pushed_bytes = 0
        self._pushing_seconds = 0.0
        self._staging_troubles = Troubles("what is handed over to %s goes by way of the first tier: %s")
        cache.add_observer(self)

    def begin(self, to: str, keys: Sequence[ChunkKey]) -> HandOver:
        """Push the chunks of a prompt, in prefix order, to the peer at ``HOST:PORT``, which need not be
        configured. Raises :class:`PeerError` for no address, or too much at once.
        """
        try:
            split_address(to)
        except ValueError as error:
            raise PeerError(f"cannot hand over: {error}") from error
        if len(keys) > MOST_IN_ONE:
            raise PeerError(f"cannot hand over {len(keys)} chunks at once: {MOST_IN_ONE} is the limit")
        if len(self._open) >= MOST_HAND_OVERS:
            raise PeerError(f"{MOST_HAND_OVERS} hand-overs are under way, which is the limit")
        handing = HandOver(self, next(self._numbers), to, keys)
        self._open.add(handing)
        for key in handing.keys:
            self._awaiting.setdefault(key, set()).add(handing)
        self.changed(FIRST, [key for key in handing.keys if self._is_here(key)], ())
        self._tasks.start_soon(handing.run)
        return handing

    def lease(self, key: ChunkKey, *, always: bool = False) -> Lease | None:
        """A lease on a chunk that is READY in the first tier, as long as not too much is leased."""
        if self.leased_bytes >= self._most_bytes and not always:
            return None
        lease = self._cache.hierarchy.share(key)
        if lease is not None:
            self.leased_bytes += lease.length
        return lease

    def give_back(self, lease: Lease) -> None:
        """The inverse of :meth:`lease`."""
        self.leased_bytes -= lease.length
        lease.release()

    def forget(self, handing: HandOver) -> None:
        """It has ended."""
        self._open.discard(handing)
        for key in handing.keys:
            self.stop_awaiting(key, handing)
        result = handing.result
        self._counts.update(outcome.value for outcome in result.outcomes.values())
        self._counts["hand_overs"] += 1
        self._counts["staged"] += handing.staged_chunks
        self._pushed_bytes += result.pushed_bytes
        self._pushing_seconds += result.pushing_seconds
        result.log(handing.to)

    def note_staging(self, to: str, trouble: str) -> None:
        """Say once why something did not go from staging buffer to staging buffer."""
        self._staging_troubles.note(to, trouble)

    def observe(self, report: Report) -> None:
        """Transfers are not of interest here."""

    def changed(self, tier: int, stored: Iterable[ChunkKey], removed: Iterable[ChunkKey]) -> None:
        """What became READY is leased before anything else can happen to it."""
        if tier != FIRST or not self._awaiting:
            return
        for key in stored:
            for handing in list(self._awaiting.get(key, ())):
                self.stop_awaiting(key, handing)
                handing.ready(key)

    def close(self) -> None:
        """Nothing is told any longer. The tasks are the caller's to end."""
        self._cache.remove_observer(self)

    def status(self) -> dict[str, object]:
        """For people and tests."""
        return {
            "open": len(self._open),
            "leased_bytes": self.leased_bytes,
            "awaited": len(self._awaiting),
            "pushed_bytes": self._pushed_bytes + sum(handing.pushed_bytes for handing in self._open),
            "pushing_seconds": self._pushing_seconds,
            "counts": dict(self._counts),
        }

    def _is_here(self, key: ChunkKey) -> bool:
        return self._cache.hierarchy.catalog.state(key, FIRST) is State.READY

    def stop_awaiting(self, key: ChunkKey, handing: HandOver) -> None:
        """Do not tell a hand-over of this chunk any longer. Harmless when repeated."""
        awaiting = self._awaiting.get(key)
        if awaiting is not None:
            awaiting.discard(handing)
            if not awaiting:
                del self._awaiting[key]
