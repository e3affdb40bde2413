"""vLLM's own offloading on a processor: its connector, its manager and its policy, with a worker that copies.

vLLM's own worker refuses to run without a GPU (``CPUOffloadingSpec.get_worker``), so this one stands in for
it: each transfer is done when it is submitted, by two torch operators a layer.
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
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class ProcessorOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Named by ``spec_name`` and ``spec_module_path`` in ``kv_connector_extra_config``."""

    _copying: CopyingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copying is None:
            self._copying = CopyingWorker(kv_caches, self.num_chunks)
        return self._copying


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """One KV-cache group, chunks of one block."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        assert len(kv_caches.group_data_refs) == 1, "models with several KV-cache groups are not covered"
        self._engine = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        self._held = [torch.zeros(chunks, pages.shape[1], dtype=torch.int8) for pages in self._engine]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._held, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._held, src_spec, self._engine, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

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
        for pages, others in zip(sources, targets, strict=True):
            others.index_copy_(0, to_pages, pages.index_select(0, from_pages))
        length = len(to_pages) * sum(pages.shape[1] for pages in sources)
        self._finished.append(TransferResult(job_id, True, length, time.perf_counter() - started))
        return True
