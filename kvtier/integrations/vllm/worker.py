"""A worker's side of the connector: copies between the engine's KV memory and the arena, or a staging buffer.

Copies are whole pages of opaque bytes, many at a time, without the GIL. A load counts only when the cache
process confirms, after the copy, that its leases stood all along. On the host, saves run between two forward
passes and are done when the hook returns; on a GPU they are under way then, and the engine's stream waits for
them: no block can change under a copy. No hook waits for a copy, nor longer than :data:`CONFIRM_WAIT_SECONDS`
for a confirmation: each later hook looks whether they are there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch

from kvtier.backends.logs import RareWarning
from kvtier.bridge.bridge import Question
from kvtier.bridge.client import WorkerBridge
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy, Memory, PageCopies, page_copies
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.staging import StagingBuffer
from kvtier.units import format_size

logger = logging.getLogger("vllm.kvtier")

CONFIRM_WAIT_SECONDS = 0.001
"""Limit of all waits of one step for confirmations: it saves the request a step."""
REST_SECONDS = 0.001
"""As long as vLLM's own loop sleeps after such a step (``EngineCoreProc._process_engine_step``)."""
CONFIRM_SECONDS = 2.0
"""After so long without a confirmation a load has failed, unless the settings are to wait for more."""


@dataclass(slots=True)
class _Batch:
    """The jobs of one step, and the copies that are under way for them."""

    jobs: Sequence[Job]
    epoch: int
    started: float
    copied: list[Job] = field(default_factory=list)
    """Those of which every chunk is among ``chunks``."""
    chunks: list[ChunkCopy] = field(default_factory=list)
    """Those that are copied, or about to be: they lie in memory that was there when the copies began."""
    lost: list[ChunkCopy] = field(default_factory=list)
    """Those that could not be copied; their memory is given back, where it was reserved for a save."""
    tickets: list[int] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why the load of a request has failed, by its id."""
    question: Question[bool] | None = None
    """Whether the leases of what is copied stood until then."""
    asked_at: float = 0.0

    def fail(self, reason: str) -> None:
        """Nothing of it may be relied on."""
        self.failures = {job.request_id: reason for job in self.jobs} | self.failures
        self.lost += self.chunks
        self.copied, self.chunks = [], []


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(
        self,
        model: ModelLayout,
        bridge: WorkerBridge,
        rank: int,
        *,
        stages: bool = False,
        confirm_timeout: float = CONFIRM_SECONDS,
    ) -> None:
        """``stages``: whether hand-overs are to go through a buffer beside the engine's KV.

        ``confirm_timeout``: seconds without a confirmation after which a load has failed.
        """
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._confirm_timeout = confirm_timeout
        self._stats = TransferStats()
        self._warn = RareWarning(logger)
        self._copies = self._copies_of([])
        self._staging = StagingBuffer(bridge) if stages else None
        self._loading: list[_Batch] = []
        self._saving: list[_Batch] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saved: set[str] = set()
        self._waited_before = 0.0
        """What the bridge had waited when this step began."""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take note of the engine's KV memory. Raises :class:`LayoutError` where it is not as described.

        Waits for the staging buffer, where there is to be one.
        """
        pages = page_views(self._model, kv_caches)
        self._copies = self._copies_of(pages)
        if self._staging is not None:
            self._staging.ask(pages[0][0].device)

    def _copies_of(self, pages: list[list[torch.Tensor]]) -> PageCopies:
        return page_copies(self._layout, self._rank, pages, NULL_BLOCK)

    def load(self, jobs: Sequence[Job]) -> None:
        """Copy chunks into the engine's blocks; which requests succeeded is told by :meth:`take_results`."""
        self._bridge.update()
        self._waited_before = self._bridge.waited
        if jobs:
            self._loading.append(self._begin(jobs, self._copies.load))
        self._look_after()

    def rest(self) -> None:
        """Block up to :data:`REST_SECONDS` in a step that computes nothing, unless it has results to report.

        Such steps follow one another while the cache process is waited for. Ranks in processes of their own
        yield between them but never sleep: on a busy machine they kept it from running for 13 s (Linux 6.18).
        """
        if not self._loaded and not self._saved:
            self._bridge.poll(REST_SECONDS)
            self._look_after()

    def save(self, jobs: Sequence[Job]) -> None:
        """Copy complete chunks out of the engine's blocks and commit them."""
        if jobs:
            self._saving.append(self._begin(jobs, self._copies.save))
            for job in jobs:
                if job.epoch != self._bridge.epoch:
                    self._bridge.abandon(job.leases, job.epoch)
        self._look_after()

    def _begin(self, jobs: Sequence[Job], copy: Callable[[Memory, Sequence[ChunkCopy]], int]) -> _Batch:
        batch = _Batch(jobs, self._bridge.epoch, time.perf_counter())
        self._refresh()
        for job in jobs:
            if self._bridge.epoch != job.epoch:
                self._bridge.retry_now()  # The scheduler's end is connected.
                batch.failures[job.request_id] = "its cache process is not connected"
                continue
            batch.epoch = job.epoch
            lost = [chunk for chunk in job.chunks if chunk.staging and self._memory(chunk.staging) is None]
            if lost:
                batch.lost += lost
                batch.failures[job.request_id] = "the staging buffer is closed"
                batch.chunks += [chunk for chunk in job.chunks if chunk not in lost]
            else:
                batch.copied.append(job)
                batch.chunks += job.chunks
        # One copy for the chunks of all requests that are in the same memory.
        in_memory = attrgetter("staging")
        for number, run in groupby(sorted(batch.chunks, key=in_memory), in_memory):
            memory = self._memory(number)
            assert memory is not None
            batch.tickets.append(copy(memory, list(run)))
        return batch

    def _look_after(self) -> None:
        """See which copies are done, and report them to the cache process. Does not wait for the others."""
        self._loading = [batch for batch in self._loading if not self._ended(batch, self._loaded_all)]
        self._saving = [batch for batch in self._saving if not self._ended(batch, self._saved_all)]

    def _ended(self, batch: _Batch, end: Callable[[_Batch], bool]) -> bool:
        try:
            if not all(self._copies.done(ticket) for ticket in batch.tickets):
                return False
        except RuntimeError as error:
            logger.warning("a copy failed on the device: %s", error)
            batch.fail(f"a copy failed on the device: {error}")
        if batch.epoch != self._bridge.epoch:  # Leases of a cache process that is gone.
            batch.fail("its cache process is gone")
        return end(batch)

    def _loaded_all(self, batch: _Batch) -> bool:
        # Not before the copies: only now can it be known that the bytes copied were those promised.
        if batch.copied and not self._confirmed(batch):
            return False
        self._loaded.update(job.request_id for job in batch.jobs)
        for job in batch.jobs:
            if (reason := batch.failures.get(job.request_id)) is not None:
                self._failed.add(job.request_id)
                self._warn(
                    "request %s: loading %d tokens (%s) failed after %.1f s, so they are computed: %s",
                    job.request_id,
                    sum(chunk.tokens for chunk in job.chunks),
                    format_size(sum(self._layout.rank_bytes(chunk.tokens) for chunk in job.chunks)),
                    time.perf_counter() - batch.started,
                    reason,
                )
        if batch.copied:
            self._report("loaded", "load", batch, [chunk for job in batch.copied for chunk in job.chunks])
        return True

    def _confirmed(self, batch: _Batch) -> bool:
        """Whether it is known if the leases stood; where they did not, the batch has failed."""
        if batch.question is None:
            batch.question = self._bridge.confirm([lease for job in batch.copied for lease in job.leases])
            batch.asked_at = time.monotonic()
        wait = CONFIRM_WAIT_SECONDS - (self._bridge.waited - self._waited_before)
        held = self._bridge.await_answer(batch.question, wait)
        if held is None and batch.question is not None and batch.question.open:
            if time.monotonic() < batch.asked_at + self._confirm_timeout:
                return False
            batch.fail(f"the cache process has not confirmed it within {self._confirm_timeout:g} s")
        elif not held:
            batch.fail("the cache process is gone" if held is None else "its leases have ended")
        return True

    def _saved_all(self, batch: _Batch) -> bool:
        committed = self._bridge.commit([chunk.lease for chunk in batch.chunks])
        self._saved.update(job.request_id for job in batch.jobs if job.last)
        if not committed:
            batch.lost += batch.chunks
        if batch.lost:  # What was to be pushed from a staging buffer goes through the first tier.
            self._bridge.abandon([chunk.lease for chunk in batch.lost], batch.epoch)
        stored = [chunk for chunk in batch.chunks if not chunk.staging]
        if committed and stored:
            self._report("stored", "store", batch, stored)
        return True

    def _refresh(self) -> None:
        """Hear what the cache process says, and open a staging buffer that it has made anew."""
        self._bridge.poll()
        if self._staging is not None:
            self._staging.refresh()

    def _memory(self, staging: int) -> Memory | None:
        """The arena, or the staging buffer of this number where that is there still."""
        if not staging:
            return self._bridge.arena
        return None if self._staging is None else self._staging.memory(staging)

    def _report(self, what: str, verb: str, batch: _Batch, chunks: Sequence[ChunkCopy]) -> None:
        jobs, seconds = batch.jobs, time.perf_counter() - batch.started
        sizes = Counter(chunk.tokens for chunk in chunks)
        total = sum(self._layout.rank_bytes(size) * count for size, count in sizes.items())
        tokens = sum(size * count for size, count in sizes.items())
        self._stats.add(f"{what}_tokens", tokens)
        self._stats.add(f"{what}_bytes", total)
        self._stats.add(f"{verb}_seconds", seconds)
        logger.info(
            "%s %d tokens for %s in %.1f ms (%.1f GB/s)",
            what,
            tokens,
            f"request {jobs[0].request_id}" if len(jobs) == 1 else f"{len(jobs)} requests",
            seconds * 1e3,
            total / seconds / 1e9,
        )

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose last save is done, whose load is done, and of these those whose load failed."""
        self._bridge.update()
        if self._staging is not None:
            # A lost buffer is replaced, and usable once all workers have opened it.
            self._staging.refresh()
        self._look_after()
        results = self._saved, self._loaded, self._failed
        self._saved, self._loaded, self._failed = set(), set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        """What happened since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Wait for what is under way, leave the cache process and let go of the arena."""
        try:
            self._copies.close()
            self._look_after()
            if self._staging is not None:
                self._staging.close()
        finally:
            self._bridge.close()
