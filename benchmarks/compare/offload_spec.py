"""vLLM's own offloading on a CPU: its connector, manager and policy, with a replacement worker.

vLLM's own worker requires a GPU (``CPUOffloadingSpec.get_worker``). This one completes each transfer
synchronously on submission, with two torch operators per layer.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Loaded through ``spec_name`` and ``spec_module_path`` in ``kv_connector_extra_config``."""

    _copying_worker: CopyingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copying_worker is None:
            self._copying_worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._copying_worker


class CopyingTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The same with secondary tiers, such as files."""

    _copying_worker: CopyingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copying_worker is None:
            shared = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copying_worker = CopyingWorker(kv_caches, self.num_chunks, shared)
        return self._copying_worker


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Worker for one KV-cache group, with chunks of one block."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, chunks: int, shared: SharedOffloadRegion | None = None
    ) -> None:
        """``shared``: the memory for the chunks, if secondary tiers read and write it."""
        assert len(kv_caches.group_data_refs) == 1, "models with several KV-cache groups are not supported"
        self._engine = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        sizes = [pages.shape[1] for pages in self._engine]
        if shared is None:
            self._held = [torch.zeros(chunks, size, dtype=torch.int8) for size in sizes]
        else:
            self._held = [shared.create_next_worker_view(size) for size in sizes]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._held, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._held, src_spec, self._engine, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: no transfer is ever in flight."""

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        source: BlockIDsLoadStoreSpec,
        targets: list[torch.Tensor],
        target: BlockIDsLoadStoreSpec,
    ) -> bool:
        started = time.perf_counter()
        from_pages = torch.from_numpy(source.block_ids.astype(np.int64))
        to_pages = torch.from_numpy(target.block_ids.astype(np.int64))
        for pages, target_pages in zip(sources, targets, strict=True):
            target_pages.index_copy_(0, to_pages, pages.index_select(0, from_pages))
        length = len(to_pages) * sum(pages.shape[1] for pages in sources)
        self._finished.append(TransferResult(job_id, True, length, time.perf_counter() - started))
        return True
