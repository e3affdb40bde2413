"""A worker's side of the connector: copies between the arena and the engine's KV memory.

Copies are whole pages of opaque bytes, many at a time, by torch operators that release the GIL. A load
counts only when the cache process confirms, after the copy, that its leases stood all along. Saves run
between two forward passes and are done when the hook returns, so no block can change under a copy.

Works for KV memory on any device that torch can copy from, but is tuned for none but the host: on a GPU
each copy waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from kvtier.bridge.client import WorkerBridge
from kvtier.header import HEADER_BYTES
from kvtier.integrations.vllm.layout import ModelLayout, page_views
from kvtier.integrations.vllm.metadata import NULL_BLOCK, ChunkCopy, Job
from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")

CopyPages = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class WorkerSide:
    """Lives in one vLLM worker; one thread."""

    def __init__(self, model: ModelLayout, bridge: WorkerBridge, rank: int) -> None:
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._rank = rank
        self._stats = TransferStats()
        self._pages: list[list[torch.Tensor]] = []
        self._arena: tuple[int, torch.Tensor] | None = None
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saved: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take note of the engine's KV memory. Raises :class:`LayoutError` where it is not as described."""
        self._pages = page_views(self._model, kv_caches)

    def load(self, jobs: Sequence[Job]) -> None:
        """Copy chunks into the engine's blocks; which requests succeeded is told by :meth:`take_results`."""
        if not jobs:
            return
        started = time.perf_counter()
        copied = [job for job in jobs if self._copy(job, _into_engine)]
        self._wait_for_device()
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
        copied = [job for job in jobs if self._copy(job, _out_of_engine)]
        self._wait_for_device()
        committed = self._bridge.commit([lease for job in copied for lease in job.leases])
        self._saved.update(job.request_id for job in jobs if job.last)
        if committed and copied:
            self._report("stored", "store", copied, time.perf_counter() - started)

    def _copy(self, job: Job, copy_pages: CopyPages) -> bool:
        """Copy all chunks of a job; ``False`` where it belongs to a cache process that is gone."""
        arena = self._arena_of(job.epoch)
        if arena is None:
            return False
        for chunk in job.chunks:
            self._copy_chunk(arena, chunk, copy_pages)
        return True

    def _arena_of(self, epoch: int) -> torch.Tensor | None:
        self._bridge.poll()
        if not self._bridge.ready() or self._bridge.epoch != epoch or self._bridge.arena is None:
            return None
        if self._arena is None or self._arena[0] != epoch:
            self._arena = epoch, self._bridge.arena.tensor()
        return self._arena[1]

    def _copy_chunk(self, arena: torch.Tensor, chunk: ChunkCopy, copy_pages: CopyPages) -> None:
        wanted = [_wanted(blocks) for blocks in chunk.blocks]
        for span in self._layout.spans(chunk.tokens, self._rank):
            blocks, pages = wanted[span.group]
            if not len(blocks):
                continue
            start = chunk.offset + HEADER_BYTES + span.offset
            held = arena[start : start + span.pages * span.page_bytes].view(span.pages, span.page_bytes)
            copy_pages(self._pages[span.group][span.layer], blocks, held[pages])

    def _wait_for_device(self) -> None:
        if self._pages and self._pages[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()

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
        self._arena = None
        self._bridge.close()


def _wanted(blocks: Sequence[int]) -> tuple[torch.Tensor, slice | torch.Tensor]:
    """The blocks that are not null, and which pages of the chunk they are."""
    if NULL_BLOCK not in blocks:
        return torch.tensor(blocks, dtype=torch.int64), slice(None)
    kept = [page for page, block in enumerate(blocks) if block != NULL_BLOCK]
    first = kept[0] if kept else 0
    if kept == list(range(first, first + len(kept))):
        return torch.tensor([blocks[page] for page in kept], dtype=torch.int64), slice(
            first, first + len(kept)
        )
    return torch.tensor([blocks[page] for page in kept], dtype=torch.int64), torch.tensor(kept)


def _into_engine(pages: torch.Tensor, blocks: torch.Tensor, held: torch.Tensor) -> None:
    pages.index_copy_(0, blocks.to(pages.device), held.to(pages.device))


def _out_of_engine(pages: torch.Tensor, blocks: torch.Tensor, held: torch.Tensor) -> None:
    if pages.device.type == "cpu":
        torch.index_select(pages, 0, blocks, out=held)
    else:
        held.copy_(pages.index_select(0, blocks.to(pages.device)))
