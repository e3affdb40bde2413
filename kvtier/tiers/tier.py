"""A tier: one backend with a circuit breaker, a seal, a capacity, a deadline and bounded concurrency.

Deadlines of backend calls are enforced here, and so is rule 3: a caller may give up waiting, but the memory
of a transfer stays leased, and the catalog entry pending, until the backend call ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.eviction import RemovalReason
from kvtier.catalog.misses import MissReason
from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.tasks import wait_for_event
from kvtier.errors import IncompleteScan, KVTierError, MediumReplaced
from kvtier.events import Priority
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.settings import TierSettings
from kvtier.tiers.batches import BATCH_BYTES
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.costs import ReadCost
from kvtier.tiers.encoded_seal import EncodedSeal, Encoder
from kvtier.tiers.level import ChunkBytes, Level
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from kvtier.tiers.slots import Slots
from kvtier.units import format_duration, format_size

logger = logging.getLogger("kvtier")

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

FULL_SECONDS = 3600.0
"""For this long after it was full, a tier counts as full: what was encoded since may be the reason."""
Settle = Callable[[Sequence[ChunkBytes], Sequence[Outcome]], None]
"""Receives a batch and its outcomes when the backend call ends, even if that is after the deadline."""


class Deletions:
    """The keys still to be deleted from a backend, so that it does not hold more than its tier accounts for.

    A key that was to be deleted while the medium was unreachable is deleted before any other call.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        retry_seconds: float = 30.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: Callable[[IncompleteScan], None] = lambda _: None,
    ) -> None:
        """``retry_seconds``: time between two attempts at deletions that fail while other calls succeed.

        ``kept`` is called if the medium cannot delete some of the keys, which a later scan lists.
        """
        self._name = name
        self._backend = backend
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._kept = kept
        self._pending: set[ChunkKey] = set()
        self._running: dict[anyio.Event, set[ChunkKey]] = {}
        """What is being deleted, by the event that is set when that ends."""
        self._retry_at = 0.0
        self._warn = RateLimitedLog(logger)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Delete these keys with the next :meth:`run` or :meth:`retry`."""
        self._pending.update(keys)

    async def before_put(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Wait until none of these keys is being deleted, or a late deletion would be that of a new object.

        Return those that are to be deleted unless they are replaced, to be passed to :meth:`add`.
        """
        while busy := [end for end, deleted in self._running.items() if not deleted.isdisjoint(keys)]:
            await busy[0].wait()
        left = self._pending.intersection(keys)
        self._pending -= left
        return left

    async def run(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Delete all pending keys, which include ``keys``. Raises if the medium cannot be reached."""
        pending, self._pending = self._pending, set()
        ended = anyio.Event()
        self._running[ended] = pending
        try:
            await self._backend.delete(list(pending))
        except IncompleteScan as error:
            self._kept(error)
        except BaseException:
            self._pending.update(pending)
            raise
        finally:
            del self._running[ended]
            ended.set()
        return [True] * len(keys)

    async def retry(self) -> None:
        """Repeat deletions that failed earlier. Does not raise."""
        if not self._pending or self._clock() < self._retry_at:
            return
        try:
            await self.run(())
        except Exception as error:
            # The medium may still serve other calls.
            self._retry_at = self._clock() + self._retry_seconds
            self._warn("tier %s: cannot delete %d chunks: %r", self._name, len(self._pending), error)


class Tier(Level):
    """A level below host memory. All methods must be called from the event loop.

    ``backend`` must be open; the caller closes it. ``sealer`` is the sealer of the memory that chunks are
    stored from. ``encoder`` applies the tier's codec; ``None`` stores chunks as they are. Reads from a medium
    that is memory are not verified.
    """

    def __init__(
        self,
        index: int,
        settings: TierSettings,
        backend: Backend,
        catalog: Catalog,
        tasks: TaskGroup,
        sealer: Sealer,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(index, settings, catalog)
        self.backend = backend
        self.capabilities = backend.capabilities()
        self.breaker = CircuitBreaker(settings.name)
        if encoder is None:
            self.seal = Seal(backend, sealer, verify=self.capabilities.arena is None)
        else:
            self.seal = EncodedSeal(backend, sealer, encoder, catalog, index, self.is_full)
            self.choice = self.seal.choice
            if encoder.denser is not None and not self.shared:
                self.densest = self.seal.densest
            # Without them, it only decodes what the tier holds from earlier settings.
            if encoder.has_codec or encoder.keys is not None:
                self.written = self.seal.written
        self.seal.on_unreadable = lambda key: catalog.gone.note([key], MissReason.UNREADABLE, index)
        self._deletions = Deletions(settings.name, backend, kept=self._miss)
        self._tasks = tasks
        self._slots = Slots(settings.concurrency)
        self._batches_returned = 0
        """Number of batches that the medium completed."""
        self._warn = RateLimitedLog(logger)
        self._warn_full = RateLimitedLog(logger)
        self._full: str | None = None
        """What of the last written batch the medium rejected as full."""
        self.reading = ReadCost()
        """The recent cost of reads."""
        self.replaced = anyio.Event()
        """Set when the medium has lost all its objects."""
        self.unseen: str | None = None
        """What the medium holds that is not in the catalog, and why; ``None`` if that is nothing."""
        self.incomplete = anyio.Event()
        """Set when there is such."""
        self._full_until = 0.0
        self._keeps_everything = False
        """Whether the medium has deleted nothing of the last eviction, and was not scanned since."""

    @property
    def available(self) -> bool:
        """Whether calls reach the medium; ``False`` while the circuit breaker is open."""
        return self.breaker.available

    @property
    def outages(self) -> int:
        """How often the circuit breaker opened."""
        return self.breaker.outages

    @property
    def corrupt(self) -> int:
        """Number of objects found corrupt in the medium, and deleted."""
        return self.seal.corrupt

    @property
    def unreadable(self) -> int:
        """Number of objects found in the medium that were stored with other settings."""
        return self.seal.unreadable

    def is_full(self) -> bool:
        """Whether it evicts, or would have lately if it had not encoded what it holds."""
        settings, now = self._local, time.monotonic()
        if settings is not None and self.used_bytes >= settings.capacity * settings.low_watermark:
            self._full_until = now + FULL_SECONDS
        return now < self._full_until

    def excess_bytes(self, incoming: int) -> int:
        """Return the bytes to evict before ``incoming`` more are added; 0 if the medium deletes nothing."""
        return 0 if self._keeps_everything else super().excess_bytes(incoming)

    def cost(self, length: int) -> float | None:
        """Return the expected seconds to read ``length`` bytes from recent reads; ``None`` if unknown."""
        return self.reading.expected(length)

    def status(self) -> dict[str, object]:
        """Return the state for display and tests."""
        choice, ratio = self.choice, self._catalog.ratio(self.index)
        return {
            **super().status(),
            "reading": self.reading.status(),
            "error": self.breaker.error or self._full or self.unseen,
            "unseen_bytes": self.unseen_bytes,
            **({"codec": self.settings.codec["type"], "ratio": ratio} if self.written else {}),
            **({"encodes": choice.encodes, "codec_gain": choice.gain} if choice else {}),
            **({"encrypted": True} if self.settings.encrypt else {}),
        }

    async def contact(self) -> None:
        """Check a shared pool until it answers, and log the result: it may be unused for hours after a start.

        Ends as soon as a call succeeds. A failed check does not count as a failed call. Peers, which answer
        for prefixes, are checked by their own connections.
        """
        if not self.shared or (self.capabilities.check is None and self.capabilities.prefix is not None):
            return
        backoff, logged = Backoff(), ""
        while (error := await self._error()) is not None:
            self.breaker.error = error
            if error != logged:
                logger.warning("tier %s: %s", self.name, error)
                logged = error
            await anyio.sleep(backoff.next())
            if self.breaker.error is None:
                return

    async def _error(self) -> str | None:
        """Check the medium, and return the error; ``None`` if it answers."""
        seconds = self.settings.deadline
        try:
            with anyio.fail_after(seconds):
                if self.capabilities.check is not None:
                    logger.info("tier %s: %s", self.name, await self.capabilities.check.check())
                else:
                    await self.backend.contains([ChunkKey(os.urandom(KEY_BYTES))])
        except TimeoutError:
            return f"no answer within {format_duration(seconds)}"
        except KVTierError as error:
            return str(error)
        except Exception as error:
            return repr(error)
        self.breaker.error = None
        return None

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Query how many leading keys the medium holds; 0 if the deadline passes."""
        return await self._query(self.count_prefix, keys, 0)

    async def held(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Query which keys the medium holds; none if the deadline passes."""
        return await self._query(self.contains, keys, [False] * len(keys)) if keys else []

    async def _query(
        self,
        query: Callable[[Sequence[ChunkKey]], Awaitable[ResultT]],
        keys: Sequence[ChunkKey],
        default: ResultT,
    ) -> ResultT:
        answer = default

        async def run() -> None:
            nonlocal answer
            answer = await query(keys)

        action = f"looking up {len(keys)} objects"
        ended = self._wait_for(self._start(run), self.settings.deadline, action, "counted as misses")
        return answer if await ended else default

    async def put(
        self, chunks: Sequence[ChunkBytes], settle: Settle, priority: Priority
    ) -> Sequence[Outcome]:
        """Write a batch of chunk objects. Takes over their leases. All are ``FAILED`` after the deadline."""
        return await self._run_batch(
            self.write_items, chunks, settle, priority, "writing", "counted as failed"
        )

    async def get(
        self, chunks: Sequence[ChunkBytes], settle: Settle, priority: Priority
    ) -> Sequence[Outcome]:
        """Read a batch of chunk objects into the leased memory. Takes over the leases."""
        return await self._run_batch(
            self.read_items, chunks, settle, priority, "reading", "counted as misses"
        )

    async def encode_stored(
        self, chunks: Sequence[ChunkBytes], settle: Settle, *, denser: bool = False
    ) -> Sequence[Outcome]:
        """Encode a batch of chunk objects that are stored as they are. Takes over their leases.

        ``denser``: with the denser codec, also encoded ones. A ``MISS`` leaves what is stored: it would be
        hardly smaller.
        """
        encode = partial(self._encode_items, denser=denser)
        return await self._run_batch(
            encode, chunks, settle, Priority.BACKGROUND, "encoding", "counted as failed"
        )

    async def delete(self, keys: Sequence[ChunkKey], reason: RemovalReason) -> None:
        """Remove chunks from catalog and backend. Their bytes count as used until the backend call ends."""
        catalog = self._catalog
        deleting = sum(catalog.stored_length(key, self.index, catalog.length(key)) for key in keys)
        self._deleting_bytes += deleting
        self._catalog.remove_all(keys, self.index, reason)

        async def run() -> None:
            unseen = self.unseen_bytes
            try:
                await self.remove(keys)
            finally:
                self._deleting_bytes -= deleting
            if keys and self.unseen_bytes >= unseen + deleting:
                self._keeps_everything = True

        action = f"deleting {len(keys)} chunks"
        await self._wait_for(self._start(run), self.settings.deadline, action, "continuing in the background")

    # Calls of the medium, without deadline: failures are results.

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether the medium holds each key; ``False`` if it fails."""
        return await self._call(self.backend.contains, keys, default=False)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many leading keys the medium holds; 0 if it fails."""
        held = await self._call(self._contains_prefix, keys, default=False)
        return next((index for index, found in enumerate(held) if not found), len(held))

    async def write_items(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Seal and store chunk objects; all are ``FAILED`` while the breaker is open. See :class:`Seal`."""
        put = partial(self._seal_and_put, put=self.seal.put)
        outcomes = await self._call(put, items, default=Outcome.FAILED)
        results = zip(items, outcomes, strict=True)
        refused = [len(view) for (_, view), outcome in results if outcome is Outcome.FULL]
        self._refused_bytes, self._full = sum(refused), None
        if refused:
            self._full = f"no room for {format_size(sum(refused))} ({len(refused)} of {len(items)} chunks)"
            self._warn_full("tier %s: its medium has %s; they are dropped", self.name, self._full)
        return outcomes

    async def _encode_items(self, items: Sequence[PutItem], *, denser: bool) -> Sequence[Outcome]:
        assert isinstance(self.seal, EncodedSeal)
        put = partial(self._seal_and_put, put=partial(self.seal.encode_stored, denser=denser))
        return await self._call(put, items, default=Outcome.FAILED)

    async def read_items(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read and verify chunk objects; all are ``FAILED`` while the breaker is open. See :class:`Seal`."""
        started = time.monotonic()  # Time in the queue is no cost of the medium.
        outcomes = await self._call(self.seal.get, items, default=Outcome.FAILED)
        seconds = time.monotonic() - started
        results = zip(items, outcomes, strict=True)
        read_bytes = sum(len(view) for (_, view), outcome in results if outcome is Outcome.OK)
        self.reading.succeeded(read_bytes, seconds)
        if Outcome.FAILED in outcomes:
            self.reading.failed()
        return outcomes

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete keys from the medium, now or before the next call that reaches it."""
        self._deletions.add(keys)
        await self.breaker.call(self._deletions.run, keys, default=False)

    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield the valid objects in the medium, if it supports it, as far as they can be listed.

        What cannot be counts as used from then on, until a later scan has listed it.
        """
        seen = 0
        self._keeps_everything = False
        try:
            async for batch in self.seal.scan():
                seen += sum(stored.length for stored in batch)
                yield batch
        except IncompleteScan as error:
            self._miss(error, seen)
        except Exception as error:
            self.breaker.record_failure(repr(error))
            self._miss(IncompleteScan(f"scan aborted: {error!r}"), seen)
        else:
            self.unseen, self.unseen_bytes = None, 0

    def _miss(self, error: IncompleteScan, seen: int = 0) -> None:
        """Count what the medium holds beside the catalog and the ``seen`` bytes that will be added to it."""
        self._warn("tier %s: %s", self.name, error)
        capacity = self.capacity or 0
        unknown = max(0, capacity - self._catalog.used(self.index) - seen)
        self.unseen_bytes = unknown if error.unseen_bytes is None else min(error.unseen_bytes, capacity)
        self.unseen = str(error)
        self.incomplete.set()

    async def _call(
        self,
        operation: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]],
        batch: Sequence[ItemT],
        *,
        default: ResultT,
    ) -> Sequence[ResultT]:
        """Call the medium through the breaker, after deletions that failed earlier."""

        async def call(items: Sequence[ItemT]) -> Sequence[ResultT]:
            await self._deletions.retry()
            return await operation(items)

        return await self.breaker.call(call, batch, default=default)

    async def _seal_and_put(
        self,
        items: Sequence[PutItem],
        put: Callable[[Sequence[PutItem]], Awaitable[Sequence[Outcome]]],
    ) -> Sequence[Outcome]:
        left = await self._deletions.before_put([key for key, _ in items])
        try:
            outcomes = await put(items)
            stored = zip(items, outcomes, strict=False)  # A broken medium may return too few.
            left.difference_update([key for (key, _), outcome in stored if outcome is Outcome.OK])
            return outcomes
        except MediumReplaced:
            self.unseen_bytes = self.capacity or 0  # Until it has been scanned.
            self.replaced.set()
            raise
        finally:
            self._deletions.add(left)

    async def _contains_prefix(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether the medium holds each key, up to the first that it does not."""
        if self.capabilities.prefix is None:
            return await self.backend.contains(keys)
        held = await self.capabilities.prefix.held_prefix(keys)
        return [index < held for index in range(len(keys))]

    async def _run_batch(
        self,
        operation: Callable[[Sequence[GetItem]], Awaitable[Sequence[Outcome]]],
        chunks: Sequence[ChunkBytes],
        settle: Settle,
        priority: Priority,
        verb: str,
        consequence: str,
    ) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(chunks)
        total = sum(chunk.lease.length for chunk in chunks)
        action = f"{verb} {format_size(total)} ({len(chunks)} chunks)"
        started, queue, returned_before = anyio.Event(), anyio.CancelScope(), self._batches_returned
        timeout = self.settings.deadline
        if priority is Priority.BACKGROUND:  # Others go first, and no request waits for it.
            timeout *= 1 + self._slots.waiting(priority)

        async def run() -> None:
            nonlocal outcomes
            try:
                with queue:
                    async with self._slots.taken(priority):
                        started.set()
                        outcomes = await operation([(chunk.key, chunk.lease.view) for chunk in chunks])
                        self._batches_returned += 1
            finally:
                started.set()  # Also if it has failed or was cancelled before it had a slot.
                settle(chunks, outcomes)
                for chunk in chunks:
                    chunk.lease.release()

        ended = self._start(run)
        if not await wait_for_event(started, timeout):
            # It did not reach the medium: its memory is freed at once, so that another tier can read into it.
            queue.cancel()
            missed = f"no free slot within {format_duration(timeout)} for {action}"
            self._warn("tier %s: %s", self.name, missed)
            if self._batches_returned == returned_before:  # No batch completed meanwhile: the medium hangs.
                self.breaker.record_failure(missed)
            await ended.wait()
            return outcomes
        # The deadline is that of a usual batch: one of a fast medium may be larger.
        seconds = self.settings.deadline * max(1.0, total / BATCH_BYTES)
        if await self._wait_for(ended, seconds, action, consequence):
            return outcomes
        return [Outcome.FAILED] * len(chunks)

    def _start(self, run: Callable[[], Awaitable[None]]) -> anyio.Event:
        """Start a backend call in its own task. Return an event that is set when it ends."""
        ended = anyio.Event()

        async def call() -> None:
            try:
                await run()
            finally:
                ended.set()

        self._tasks.start_soon(call)
        return ended

    async def _wait_for(self, ended: anyio.Event, seconds: float, action: str, consequence: str) -> bool:
        """Wait for a backend call. Return whether it ended within ``seconds``; if not, it continues.

        Logs a warning with ``action`` and ``consequence`` on a timeout, at most once a minute.
        """
        started = time.monotonic()
        if await wait_for_event(ended, seconds):
            return True
        missed = f"deadline of {format_duration(seconds)} exceeded {action}"
        elapsed = format_duration(time.monotonic() - started)
        self._warn("tier %s: %s after %s; %s", self.name, missed, elapsed, consequence)
        self.breaker.record_failure(missed)
        self.reading.failed()
        return False
