"""Worker side of the connector: copies between the engine's KV memory and the arena, or a staging buffer.

Copies move batches of whole pages, as opaque bytes, without the GIL. A load is valid only if the cache
process confirms, after the copy, that its leases were held throughout. On the host, saves run between two
forward passes and are complete when the hook returns. On a GPU they run beside the next steps: the engine's
stream waits for one only if a step may change blocks that it reads. No hook waits for a GPU copy, nor longer
than :data:`CONFIRM_WAIT_SECONDS` for a confirmation: later hooks poll for both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch

from kvtier.bridge.client import WorkerBridge
from kvtier.integrations.vllm.adapters import is_loaded
from kvtier.integrations.vllm.copies import ChunkCopy, Memory, page_copies
from kvtier.integrations.vllm.in_flight import CopiesInFlight
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.logs import StoreLog
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.staging import StagingBuffer
from kvtier.integrations.vllm.traces import COPY, SAVE, Traces
from kvtier.logs import RateLimitedLog
from kvtier.observability.traces.spans import Span
from kvtier.rpc.calls import Call
from kvtier.units import format_size

logger = logging.getLogger("vllm.kvtier")

CONFIRM_WAIT_SECONDS = 0.001
"""Limit of all waits for confirmations in one step. A confirmation in time saves the request a step."""
IDLE_WAIT_SECONDS = 0.001
"""The same as vLLM's own loop sleeps after such a step (``EngineCoreProc._process_engine_step``)."""
CONFIRM_SECONDS = 2.0
"""Default timeout for a confirmation, after which a load has failed."""
UPDATE_SECONDS = 0.02
"""How often a worker without loads or saves looks at its connection: each look takes 0.06 ms of a step."""
RECONNECT_SECONDS = 0.5
"""How long a load waits for its worker to connect to a cache process that the scheduler has found."""


@dataclass(slots=True)
class _Batch:
    """The jobs of one step, which are copied, confirmed and committed together, and what is in flight."""

    jobs: Sequence[Job]
    epoch: int
    started: float
    chunks: list[ChunkCopy] = field(default_factory=list)
    """Chunks that are copied: their memory was available when the copies began."""
    lost: list[ChunkCopy] = field(default_factory=list)
    """Chunks that could not be copied; for saves, their reservations are abandoned."""
    tickets: list[int] = field(default_factory=list)
    confirmation: Call[bool] | None = None
    """Whether the leases of the copied chunks were held throughout."""
    asked_at: float = 0.0
    parts: list[_Batch] = field(default_factory=list)
    """Earlier batches with parts of the same loads."""
    seconds: float | None = None
    """For parts: how long the copies took, once they have ended."""

    @property
    def valid(self) -> list[Job]:
        """The jobs that have not failed."""
        return [job for job in self.jobs if not job.failure]

    def fail(self, reason: str) -> None:
        """Mark all of its jobs as failed."""
        for job in self.valid:
            job.failure = reason
        self.lost += self.chunks
        self.chunks = []


class WorkerSide:
    """Connector state in one vLLM worker. Not thread-safe."""

    def __init__(
        self,
        model: ModelLayout,
        bridge: WorkerBridge,
        rank: int,
        *,
        stages: bool = False,
        confirm_timeout: float = CONFIRM_SECONDS,
        writes_before_hooks: bool = False,
    ) -> None:
        """``stages``: whether KV transfers use a staging buffer on the device of the engine's KV cache.

        ``confirm_timeout``: seconds without a confirmation after which a load has failed.
        ``writes_before_hooks``: whether a step may write blocks before :meth:`protect`.
        """
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._confirm_timeout = confirm_timeout
        self._writes_before_hooks = writes_before_hooks
        self._stats = TransferStats()
        self._warn = RateLimitedLog(logger)
        self._store_log = StoreLog(logger)
        self._traces = Traces(bridge)
        self._kv_caches: dict[str, torch.Tensor] | None = None
        self._copies = self._copies_of([])
        self._stages = stages
        self._staging = StagingBuffer(bridge)
        self._loading: list[_Batch] = []
        self._deferred: list[tuple[float, Job]] = []
        """Loads that wait for this worker to connect, and until when."""
        self._parts: dict[str, list[tuple[_Batch, Job]]] = {}
        """By request id: the jobs of loads whose last job has not been received, and their batches."""
        self._saving: list[_Batch] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._finished: set[str] = set()
        """Requests without further saves, of which some may be in flight."""
        self._saved: set[str] = set()
        self._waited_before = 0.0
        """Value of ``bridge.waited`` when this step began."""
        self._updated_at = float("-inf")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's KV memory. Raises :class:`LayoutError` if it does not match the layout.

        Waits for the staging buffer, if staging is enabled.
        """
        self._kv_caches = kv_caches
        pages = page_views(self._model, kv_caches)
        self._copies = self._copies_of(pages)
        if self._stages:
            self._staging.request(pages[0][0].device)

    def unregister(self) -> None:
        """Forget the addresses of the KV memory, which vLLM unmaps while it sleeps. Waits for copies."""
        self._copies.close()
        self._poll_copies()
        self._copies = self._copies_of([])

    def restore(self) -> None:
        """Undo :meth:`unregister` once the KV memory is mapped again. Chunks stay in the cache meanwhile."""
        if self._kv_caches is not None:
            self._copies = self._copies_of(page_views(self._model, self._kv_caches))

    def _copies_of(self, pages: list[list[torch.Tensor]]) -> CopiesInFlight:
        copies = page_copies(self._layout, self._rank, pages)
        blocks, before_hooks = self._model.num_blocks, self._writes_before_hooks
        return CopiesInFlight(copies, self._layout, blocks, writes_before_hooks=before_hooks)

    def protect(self, written: Collection[int]) -> None:
        """Have the engine's stream wait for the saves that read blocks which the next step may change.

        Those are ``written``, and the blocks of states. Does not block.
        """
        self._copies.protect(written)

    def load(self, jobs: Sequence[Job]) -> None:
        """Copy chunks into the engine's blocks. :meth:`take_results` reports the outcome."""
        busy = jobs or self._deferred or self._loading or self._saving or self._finished or self._stages
        connected = bool(self._bridge.epoch)
        if connected and not busy and time.monotonic() < self._updated_at + UPDATE_SECONDS:
            return
        self._updated_at = time.monotonic()
        self._bridge.update()
        self._waited_before = self._bridge.waited
        jobs = self._connected(jobs)
        for more in (True, False):  # Parts first: the batch of a last part includes the earlier ones.
            if group := [job for job in jobs if job.more is more]:
                self._begin_load(group, more=more)
        self._poll_copies()

    def _connected(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the loads that begin now. The others wait while this worker connects.

        After a restart of the cache process, an idle engine connects with the next request only: first its
        scheduler, and with the load its workers.
        """
        now = time.monotonic()
        waiting = self._deferred + [(now + RECONNECT_SECONDS, job) for job in jobs]
        if waiting and not self._bridge.epoch:
            self._bridge.retry_now()  # The scheduler was connected, so a cache process may be running.
            self._bridge.update()
        connecting = self._bridge.connecting
        self._deferred = [(until, job) for until, job in waiting if connecting and now < until]
        return [job for until, job in waiting if not connecting or now >= until]

    def _begin_load(self, jobs: Sequence[Job], *, more: bool) -> None:
        """Copy parts of loads, or the last parts: their batch also reports the earlier ones."""
        batch = self._begin(jobs, self._load)
        self._loading.append(batch)
        for job in jobs:
            if more:
                self._parts.setdefault(job.request_id, []).append((batch, job))
            else:
                parts = self._parts.pop(job.request_id, [])
                batch.parts += [part for part, _ in parts]
                job.chunks = [chunk for _, earlier in parts for chunk in earlier.chunks] + job.chunks

    def idle(self) -> None:
        """Do what can wait until a step that computes nothing. The next one may be far."""
        self._store_log.write()

    def idle_wait(self) -> None:
        """Block up to :data:`IDLE_WAIT_SECONDS` in a step that computes nothing, unless results are ready.

        Such steps repeat while requests wait for the cache process. Ranks in separate processes yield
        between them but never sleep, which has starved the cache process of CPU for 13 s on a busy machine
        (Linux 6.18).
        """
        if not self._loaded and not self._saved:
            self._bridge.poll(IDLE_WAIT_SECONDS)
            self._poll_copies()

    def save(self, jobs: Sequence[Job]) -> None:
        """Copy complete chunks out of the engine's blocks and commit them: those of the loaded adapters."""
        self._copies.next_step()
        for job in jobs:
            if job.adapter is not None and not is_loaded(*job.adapter):
                self._bridge.abandon(job.leases, job.epoch)
                self._stats.add("not_stored_chunks", len(job.chunks))
                job.chunks = []
        if jobs:
            self._saving.append(self._begin(jobs, self._save))
            for job in jobs:
                if job.epoch != self._bridge.epoch:
                    self._bridge.abandon(job.leases, job.epoch)
        self._poll_copies()

    def _begin(self, jobs: Sequence[Job], copy: Callable[[_Batch, Memory, list[ChunkCopy]], None]) -> _Batch:
        batch = _Batch(jobs, self._bridge.epoch, time.perf_counter())
        self._bridge.poll()
        self._staging.refresh()
        for job in jobs:
            if job.failure:
                continue
            if self._bridge.epoch != job.epoch:
                self._bridge.retry_now()  # The scheduler is connected, so a cache process is running.
                job.failure = "its cache process is not connected"
                continue
            batch.epoch = job.epoch
            lost = [chunk for chunk in job.chunks if chunk.staging and self._memory(chunk.staging) is None]
            if lost:
                job.failure = "the staging buffer is closed"
            batch.lost += lost
            batch.chunks += [chunk for chunk in job.chunks if chunk not in lost] if lost else job.chunks
        # One copy per memory, for the chunks of all requests.
        in_memory = attrgetter("staging")
        for number, run in groupby(sorted(batch.chunks, key=in_memory), in_memory):
            memory = self._memory(number)
            assert memory is not None
            try:
                copy(batch, memory, list(run))
            except RuntimeError as error:
                self._fail_on_device(batch, error)
                break
        return batch

    def _fail_on_device(self, batch: _Batch, error: RuntimeError) -> None:
        reason = f"a copy failed on the device: {error}"
        # Not the error itself: a log record would keep alive what its traceback refers to.
        logger.warning("%s", reason)
        batch.fail(reason)

    def _load(self, batch: _Batch, memory: Memory, chunks: list[ChunkCopy]) -> None:
        batch.tickets.append(self._copies.load(memory, chunks))

    def _save(self, batch: _Batch, memory: Memory, chunks: list[ChunkCopy]) -> None:
        """Copy the chunks that this rank writes. The others commit them as well, and need not wait."""
        allowed = self._bridge.fill([chunk.lease for chunk in chunks])
        if not all(allowed):
            refused = [chunk for chunk, may in zip(chunks, allowed, strict=True) if not may]
            batch.chunks = [chunk for chunk in batch.chunks if chunk not in refused]
            chunks = [chunk for chunk in chunks if chunk not in refused]
            self._stats.add("not_stored_chunks", sum(not chunk.staging for chunk in refused))
        chunks = [chunk for chunk in chunks if self._writes(chunk)]
        if not self._copies.save(memory, chunks, batch.tickets):
            batch.lost += chunks
            batch.chunks = [chunk for chunk in batch.chunks if chunk not in chunks]
            self._stats.add("not_stored_chunks", sum(not chunk.staging for chunk in chunks))

    def _writes(self, chunk: ChunkCopy) -> bool:
        return bool(chunk.staging) or self._layout.writes(chunk.tokens, self._rank, chunk.lease)

    def _poll_copies(self) -> None:
        """Report completed copies to the cache process. Does not wait for the others."""
        self._loading = [batch for batch in self._loading if not self._ended(batch, self._loaded_all)]
        self._saving = [batch for batch in self._saving if not self._ended(batch, self._saved_all)]
        if self._finished:  # vLLM frees their blocks, which no copy may be reading.
            busy = {job.request_id for batch in self._saving for job in batch.jobs}
            self._saved |= self._finished - busy
            self._finished &= busy

    def _ended(self, batch: _Batch, end: Callable[[_Batch], bool]) -> bool:
        try:
            if not self._copies.done(batch.tickets):
                return False
        except RuntimeError as error:
            self._fail_on_device(batch, error)
        # Checked at the end: during the copy, another process may have taken the place of the first.
        if batch.epoch != self._bridge.epoch:  # The leases ended with their cache process.
            batch.fail("lost the connection to its cache process")
        return end(batch)

    def _loaded_all(self, batch: _Batch) -> bool:
        if batch.jobs[0].more:
            batch.seconds = time.perf_counter() - batch.started
            return True
        if any(part.seconds is None for part in batch.parts):
            return False
        failed = [job for part in batch.parts for job in part.jobs if job.failure]
        reasons = {job.request_id: job.failure for job in reversed(failed)}
        for job in batch.valid:
            job.failure = reasons.get(job.request_id, "")
        # Confirm only after the copies: this proves that the copied bytes were valid.
        if batch.valid and not self._confirmed(batch):
            return False
        self._trace(COPY, batch)
        self._loaded.update(job.request_id for job in batch.jobs)
        for job in batch.jobs:
            if job.failure:
                self._failed.add(job.request_id)
                tokens, size = self._copied(job.chunks)
                self._warn(
                    "request %s: loading %d tokens (%s) failed after %.1f s, computing them instead: %s",
                    job.request_id,
                    tokens,
                    format_size(size),
                    time.perf_counter() - batch.started,
                    job.failure,
                )
        if loaded := batch.valid:
            chunks = [chunk for job in loaded for chunk in job.chunks]
            tokens, size, seconds = self._count("loaded", "load", batch, chunks)
            logger.info(
                "loaded %d tokens for %s in %.1f ms (%.1f GB/s)",
                tokens,
                f"request {batch.jobs[0].request_id}"
                if len(batch.jobs) == 1
                else f"{len(batch.jobs)} requests",
                seconds * 1e3,
                size / seconds / 1e9,
            )
        return True

    def _confirmed(self, batch: _Batch) -> bool:
        """Return whether the confirmation has completed. Fails the batch if its leases were not held."""
        if batch.confirmation is None:
            batch.confirmation = self._bridge.confirm([lease for job in batch.valid for lease in job.leases])
            batch.asked_at = time.monotonic()
        wait = CONFIRM_WAIT_SECONDS - (self._bridge.waited - self._waited_before)
        held = self._bridge.await_reply(batch.confirmation, wait)
        if batch.confirmation is not None and not batch.confirmation.settled:
            if time.monotonic() < batch.asked_at + self._confirm_timeout:
                return False
            batch.fail(f"no confirmation from the cache process within {self._confirm_timeout:g} s")
        elif not held:
            batch.fail(
                "lost the connection to the cache process" if held is None else "its leases have ended"
            )
        return True

    def _saved_all(self, batch: _Batch) -> bool:
        committed = self._bridge.commit([chunk.lease for chunk in batch.chunks])
        self._finished.update(job.request_id for job in batch.jobs if job.last)
        if not committed:
            batch.lost += batch.chunks
        self._trace(SAVE, batch, "" if committed else "the cache process is not connected")
        if batch.lost:  # Chunks that are not staged are pushed from the first tier instead.
            self._bridge.abandon([chunk.lease for chunk in batch.lost], batch.epoch)
        stored = [chunk for chunk in batch.chunks if not chunk.staging and self._writes(chunk)]
        if committed and stored:
            counted = self._count("stored", "store", batch, stored)
            self._store_log.add((job.request_id for job in batch.jobs), *counted)
        return True

    def _trace(self, name: str, batch: _Batch, error: str = "") -> None:
        """Record a span for each traced request of a batch whose copies have ended."""
        seconds = time.perf_counter() - min(each.started for each in (batch, *batch.parts))
        since = time.monotonic() - seconds
        for job in batch.jobs:
            if job.trace and job.chunks:
                tokens, size = self._copied(job.chunks)
                copied = {"tokens": tokens, "bytes": size, "rank": self._rank}
                self._traces.add(Span.ended(name, job.trace, since, b"", job.failure or error, **copied))
        self._traces.send()

    def _memory(self, staging: int) -> Memory | None:
        """Return the arena for 0, else the staging buffer with this number if it is still open."""
        return self._staging.memory(staging) if staging else self._bridge.arena

    def _copied(self, chunks: Sequence[ChunkCopy]) -> tuple[int, int]:
        """Return how many tokens chunks copy, and how many bytes of each rank."""
        copied = [chunk.copied(self._layout) for chunk in chunks]
        return sum(tokens for tokens, _ in copied), sum(size for _, size in copied)

    def _count(
        self, what: str, verb: str, batch: _Batch, chunks: Sequence[ChunkCopy]
    ) -> tuple[int, int, float]:
        """Count copied chunks; return their tokens and bytes, and the seconds that they took."""
        seconds = time.perf_counter() - batch.started + sum(part.seconds or 0.0 for part in batch.parts)
        tokens, total = self._copied(chunks)
        self._stats.add(f"{what}_tokens", tokens)
        self._stats.add(f"{what}_bytes", total)
        self._stats.add(f"{verb}_seconds", seconds)
        return tokens, total, seconds

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests whose last save is done, whose load is done, and whose load failed."""
        if self._loading or self._saving or self._stages:  # Otherwise the next step's load is soon enough.
            self._bridge.update()
            # A lost buffer is replaced, and usable once all workers have opened the new one.
            self._staging.refresh()
        self._poll_copies()
        results = self._saved, self._loaded, self._failed
        self._saved, self._loaded, self._failed = set(), set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        """Return the counts since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Wait for running copies, disconnect from the cache process and release the arena."""
        try:
            self._copies.close()
            self._poll_copies()  # Commits what these copies have saved.
            self._store_log.write()
            self._staging.close()
        finally:
            self._bridge.close()
