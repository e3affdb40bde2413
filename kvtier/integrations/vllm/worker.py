"""A worker's side of the connector: copies between the engine's KV memory and the arena, or a staging buffer.

Copies are whole pages of opaque bytes, many at a time, without the GIL. A load counts only when the cache
process confirms, after the copy, that its leases stood all along. On the host, saves run between two forward
passes and are done when the hook returns; on a GPU they are under way then, and the engine's stream waits for
them: no block can change under a copy. What is under way is looked after in each hook that vLLM calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch

from kvtier.backends.logs import RareWarning
from kvtier.bridge.client import WorkerBridge
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy, Memory, PageCopies, page_copies
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.staging import StagingBuffer
from kvtier.units import format_size

logger = logging.getLogger("vllm.kvtier")


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
    """Those of a staging buffer that was not there any longer."""
    tickets: list[int] = field(default_factory=list)

    def fail(self) -> None:
        """Nothing of it may be relied on."""
        self.lost += [chunk for chunk in self.chunks if chunk.staging]
        self.copied, self.chunks = [], []


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(self, model: ModelLayout, bridge: WorkerBridge, rank: int, *, stages: bool = False) -> None:
        """``stages``: whether hand-overs are to go through a buffer beside the engine's KV."""
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._stats = TransferStats()
        self._warn = RareWarning(logger)
        self._copies = self._copies_of([])
        self._staging = StagingBuffer(bridge) if stages else None
        self._loading: list[_Batch] = []
        self._saving: list[_Batch] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saved: set[str] = set()

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
        if jobs:
            self._loading.append(self._begin(jobs, self._copies.load))
        self._look_after()

    def save(self, jobs: Sequence[Job]) -> None:
        """Copy complete chunks out of the engine's blocks and commit them."""
        if jobs:
            self._saving.append(self._begin(jobs, self._copies.save))
        self._look_after()

    def _begin(self, jobs: Sequence[Job], copy: Callable[[Memory, Sequence[ChunkCopy]], int]) -> _Batch:
        batch = _Batch(jobs, self._bridge.epoch, time.perf_counter())
        for job in jobs:
            self._refresh()
            if not self._bridge.ready() or self._bridge.epoch != job.epoch:
                continue  # Of a cache process that is gone.
            batch.epoch = job.epoch
            lost = len(batch.lost)
            for number, run in groupby(job.chunks, attrgetter("staging")):
                chunks, memory = list(run), self._memory(number)
                if memory is None:
                    batch.lost += chunks
                    continue
                batch.tickets.append(copy(memory, chunks))
                batch.chunks += chunks
            if len(batch.lost) == lost:
                batch.copied.append(job)
        return batch

    def _look_after(self) -> None:
        """Tell the cache process of the copies that are done. Does not wait for the others."""
        self._loading = [batch for batch in self._loading if not self._ended(batch, self._loaded_all)]
        self._saving = [batch for batch in self._saving if not self._ended(batch, self._saved_all)]

    def _ended(self, batch: _Batch, end: Callable[[_Batch], None]) -> bool:
        try:
            if not all(self._copies.done(ticket) for ticket in batch.tickets):
                return False
        except RuntimeError as error:
            logger.warning("a copy failed on the device: %s", error)
            batch.fail()
        if batch.epoch != self._bridge.epoch:  # Leases of a cache process that is gone.
            batch.fail()
            batch.lost = []
        end(batch)
        return True

    def _loaded_all(self, batch: _Batch) -> None:
        # Not before the copies: only now can it be said that the bytes copied were those promised.
        held = self._bridge.confirm([lease for job in batch.copied for lease in job.leases])
        self._loaded.update(job.request_id for job in batch.jobs)
        failed = [job for job in batch.jobs if not held or job not in batch.copied]
        self._failed.update(job.request_id for job in failed)
        if failed:
            chunks = [chunk for job in failed for chunk in job.chunks]
            self._warn(
                "loading %s for %d requests (%s first) failed after %.1f s: %s; their tokens are recomputed",
                format_size(sum(self._layout.rank_bytes(chunk.tokens) for chunk in chunks)),
                len(failed),
                failed[0].request_id,
                time.perf_counter() - batch.started,
                "memory or cache process is gone" if held else "the cache process did not confirm its leases",
            )
        if held and batch.copied:
            self._report("loaded", "load", batch, [chunk for job in batch.copied for chunk in job.chunks])

    def _saved_all(self, batch: _Batch) -> None:
        committed = self._bridge.commit([chunk.lease for chunk in batch.chunks])
        self._saved.update(job.request_id for job in batch.jobs if job.last)
        if batch.lost:  # What was to be pushed from there goes through the first tier.
            self._bridge.abandon([chunk.lease for chunk in batch.lost])
        stored = [chunk for chunk in batch.chunks if not chunk.staging]
        if committed and stored:
            self._report("stored", "store", batch, stored)

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
        total = sum(self._layout.rank_bytes(chunk.tokens) for chunk in chunks)
        tokens = sum(chunk.tokens for chunk in chunks)
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
        # A buffer that was lost is offered anew, and of use to nobody before all workers have opened it.
        if self._staging is not None:
            self._refresh()
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
