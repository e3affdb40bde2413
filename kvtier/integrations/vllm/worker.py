"""A worker's side of the connector: copies between the arena and the engine's KV memory.

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

import torch

from kvtier.arena import ArenaMap
from kvtier.bridge.client import WorkerBridge
from kvtier.integrations.vllm.copies import PageCopies, page_copies
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import NULL_BLOCK, ChunkCopy, Job
from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")


@dataclass(slots=True)
class _Batch:
    """The jobs of one step, and the copies that are under way for them."""

    jobs: Sequence[Job]
    epoch: int
    started: float
    copied: list[Job] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)

    @property
    def leases(self) -> list[int]:
        return [lease for job in self.copied for lease in job.leases]


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(self, model: ModelLayout, bridge: WorkerBridge, rank: int) -> None:
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._stats = TransferStats()
        self._copies = self._copies_of([])
        self._loading: list[_Batch] = []
        self._saving: list[_Batch] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saved: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take note of the engine's KV memory. Raises :class:`LayoutError` where it is not as described."""
        self._copies = self._copies_of(page_views(self._model, kv_caches))

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

    def _begin(self, jobs: Sequence[Job], copy: Callable[[ArenaMap, Sequence[ChunkCopy]], int]) -> _Batch:
        batch = _Batch(jobs, self._bridge.epoch, time.perf_counter())
        for job in jobs:
            if (arena := self._arena_of(job.epoch)) is not None:
                batch.epoch = job.epoch
                batch.tickets.append(copy(arena, job.chunks))
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
            batch.copied = []
        if batch.epoch != self._bridge.epoch:
            batch.copied = []  # Leases of a cache process that is gone.
        end(batch)
        return True

    def _loaded_all(self, batch: _Batch) -> None:
        # Not before the copies: only now can it be said that the bytes copied were those promised.
        held = self._bridge.confirm(batch.leases)
        self._loaded.update(job.request_id for job in batch.jobs)
        self._failed.update(job.request_id for job in batch.jobs if not held or job not in batch.copied)
        if held and batch.copied:
            self._report("loaded", "load", batch)

    def _saved_all(self, batch: _Batch) -> None:
        committed = self._bridge.commit(batch.leases)
        self._saved.update(job.request_id for job in batch.jobs if job.last)
        if committed and batch.copied:
            self._report("stored", "store", batch)

    def _arena_of(self, epoch: int) -> ArenaMap | None:
        """The arena, where it is still that of the cache process which gave the leases."""
        self._bridge.poll()
        if not self._bridge.ready() or self._bridge.epoch != epoch:
            return None
        return self._bridge.arena

    def _report(self, what: str, verb: str, batch: _Batch) -> None:
        jobs, seconds = batch.copied, time.perf_counter() - batch.started
        total = 0
        for job in jobs:
            job_bytes = sum(self._layout.rank_bytes(chunk.tokens) for chunk in job.chunks)
            total += job_bytes
            self._stats.add(f"{what}_tokens", job.tokens)
            self._stats.add(f"{what}_bytes", job_bytes)
        self._stats.add(f"{verb}_seconds", seconds)
        logger.info(
            "%s %d tokens for %s in %.1f ms (%.1f GB/s)",
            what,
            sum(job.tokens for job in jobs),
            f"request {jobs[0].request_id}" if len(jobs) == 1 else f"{len(jobs)} requests",
            seconds * 1e3,
            total / seconds / 1e9,
        )

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose last save is done, whose load is done, and of these those whose load failed."""
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
        finally:
            self._bridge.close()
