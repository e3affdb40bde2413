"""A worker's side of the connector: copies between the engine's KV memory and the arena, or a staging buffer.

A load counts only when the cache process confirms, after the copy, that its leases stood all along. Saves run
between two forward passes and are done when the hook returns, so no block can change under a copy.

Works for KV memory on any device that torch can copy from, but is tuned for none but the host: on a GPU
each copy waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from kvtier.bridge.client import WorkerBridge
from kvtier.header import HEADER_BYTES
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import ChunkCopy, Job
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.pages import CopyPages, copy_slice, into_engine, out_of_engine
from kvtier.integrations.vllm.staging import StagingBuffer

logger = logging.getLogger("vllm.kvtier")


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(self, model: ModelLayout, bridge: WorkerBridge, rank: int, *, stages: bool = False) -> None:
        """``stages``: whether hand-overs are to go through a buffer beside the engine's KV."""
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._stats = TransferStats()
        self._pages: list[list[torch.Tensor]] = []
        self._arena: tuple[int, torch.Tensor] | None = None
        self._staging = StagingBuffer(bridge) if stages else None
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saved: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take note of the engine's KV memory. Raises :class:`LayoutError` where it is not as described.

        Waits for the staging buffer, where there is to be one.
        """
        self._pages = page_views(self._model, kv_caches)
        if self._staging is not None:
            self._staging.ask(self._pages[0][0].device)

    def load(self, jobs: Sequence[Job]) -> None:
        """Copy chunks into the engine's blocks; which requests succeeded is told by :meth:`take_results`."""
        if not jobs:
            return
        started = time.perf_counter()
        copied = [job for job in jobs if len(self._copy(job, into_engine)) == len(job.chunks)]
        self._wait_for_device()
        # Not before the copies: only now can it be said that the bytes copied were those promised.
        held = self._bridge.confirm([lease for job in copied for lease in job.leases])
        self._loaded.update(job.request_id for job in jobs)
        self._failed.update(job.request_id for job in jobs if not held or job not in copied)
        if held and copied:
            chunks = [chunk for job in copied for chunk in job.chunks]
            self._report("loaded", "load", chunks, copied, time.perf_counter() - started)

    def save(self, jobs: Sequence[Job]) -> None:
        """Copy complete chunks out of the engine's blocks and commit them."""
        if not jobs:
            return
        started = time.perf_counter()
        copied = [chunk for job in jobs for chunk in self._copy(job, out_of_engine)]
        self._wait_for_device()
        committed = self._bridge.commit([chunk.lease for chunk in copied])
        self._saved.update(job.request_id for job in jobs if job.last)
        # Buffers that were lost since: what was to be pushed from there goes through the first tier.
        here = [job for job in jobs if job.epoch == self._bridge.epoch]
        lost = {chunk.lease for job in here for chunk in job.chunks if chunk.staging}
        self._bridge.abandon(sorted(lost.difference(chunk.lease for chunk in copied)))
        stored = [chunk for chunk in copied if not chunk.staging]
        if committed and stored:
            self._report("stored", "store", stored, jobs, time.perf_counter() - started)

    def _copy(self, job: Job, copy_pages: CopyPages) -> list[ChunkCopy]:
        """Copy the chunks of a job; those that lie in memory that is still there."""
        arena = self._arena_of(job.epoch)
        if arena is None:
            return []
        copied = []
        for chunk in job.chunks:
            memory = self._slice(arena, chunk)
            if memory is not None:
                copy_slice(self._layout, chunk.tokens, chunk.blocks, memory, self._pages, copy_pages)
                copied.append(chunk)
        return copied

    def _arena_of(self, epoch: int) -> torch.Tensor | None:
        self._bridge.poll()
        if self._staging is not None:
            self._staging.refresh()
        if not self._bridge.ready() or self._bridge.epoch != epoch or self._bridge.arena is None:
            return None
        if self._arena is None or self._arena[0] != epoch:
            self._arena = epoch, self._bridge.arena.tensor()
        return self._arena[1]

    def _slice(self, arena: torch.Tensor, chunk: ChunkCopy) -> torch.Tensor | None:
        """The memory from where this rank's slice of a chunk begins."""
        if not chunk.staging:
            return arena[chunk.offset + HEADER_BYTES + self._rank * self._layout.rank_bytes(chunk.tokens) :]
        memory = None if self._staging is None else self._staging.memory(chunk.staging)
        return None if memory is None else memory[chunk.offset :]

    def _wait_for_device(self) -> None:
        if self._pages and self._pages[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _report(
        self, what: str, verb: str, chunks: Sequence[ChunkCopy], jobs: Sequence[Job], seconds: float
    ) -> None:
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
        if self._staging is not None:
            # A buffer that was lost is offered anew, and of use to nobody before all workers have opened it.
            self._bridge.poll()
            self._staging.refresh()
        results = self._saved, self._loaded, self._failed
        self._saved, self._loaded, self._failed = set(), set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        """What happened since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Leave the cache process and let go of the arena."""
        self._arena = None
        if self._staging is not None:
            self._staging.close()
        self._bridge.close()
