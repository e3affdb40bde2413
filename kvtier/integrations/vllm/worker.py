"""A worker's side of the connector: copies between the arena and the engine's KV memory.

Copies are whole pages of opaque bytes, many at a time, without the GIL. A load counts only when the cache
process confirms, after the copy, that its leases stood all along. Saves run between two forward passes and
are done when the hook returns, so no block can change under a copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from kvtier.arena import ArenaMap
from kvtier.bridge.client import WorkerBridge
from kvtier.integrations.vllm.copies import PageCopies, page_copies
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import NULL_BLOCK, Job
from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(self, model: ModelLayout, bridge: WorkerBridge, rank: int) -> None:
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._stats = TransferStats()
        self._copies = self._copies_of([])
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
        if not jobs:
            return
        started = time.perf_counter()
        copied = []
        for job in jobs:
            if (arena := self._arena_of(job.epoch)) is not None:
                self._copies.load(arena, job.chunks)
                copied.append(job)
        self._copies.wait()
        # Not before the copies: only now can it be said that the bytes copied were those promised.
        held = self._bridge.confirm([lease for job in copied for lease in job.leases])
        self._loaded.update(job.request_id for job in jobs)
        self._failed.update(job.request_id for job in jobs if not held or job not in copied)
        if held and copied:
            self._report("loaded", "load", copied, time.perf_counter() - started)

    def save(self, jobs: Sequence[Job]) -> None:
        """Copy complete chunks out of the engine's blocks and commit them."""
        if not jobs:
            return
        started = time.perf_counter()
        copied = []
        for job in jobs:
            if (arena := self._arena_of(job.epoch)) is not None:
                self._copies.save(arena, job.chunks)
                copied.append(job)
        self._copies.wait()
        committed = self._bridge.commit([lease for job in copied for lease in job.leases])
        self._saved.update(job.request_id for job in jobs if job.last)
        if committed and copied:
            self._report("stored", "store", copied, time.perf_counter() - started)

    def _arena_of(self, epoch: int) -> ArenaMap | None:
        """The arena, where it is still that of the cache process which gave the leases."""
        self._bridge.poll()
        if not self._bridge.ready() or self._bridge.epoch != epoch:
            return None
        return self._bridge.arena

    def _report(self, what: str, verb: str, jobs: Sequence[Job], seconds: float) -> None:
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
        results = self._saved, self._loaded, self._failed
        self._saved, self._loaded, self._failed = set(), set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        """What happened since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Leave the cache process and let go of the arena."""
        self._bridge.close()
