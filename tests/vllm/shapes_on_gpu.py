"""A worker of :mod:`tests.vllm.shapes` with its KV cache on a GPU, which is the stand-in for CUDA.

Kernels of the engine write the numbers, on its stream. The device is stuck: copies that nothing waits for run
in every :data:`CATCH_UP`-th step only, while the engine runs on, and uses blocks again as soon as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
import torch

from kvtier.integrations.vllm import worker
from kvtier.integrations.vllm.copies import CudaCopies
from tests.rigs.cuda_stand_in.control import KERNEL, TRANSFER
from tests.rigs.cuda_stand_in.fixtures import loaded, use
from tests.rigs.pinning import pin
from tests.vllm.shapes import BLOCK, Scheduled, Worker

CATCH_UP = 9
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaFreeHost")


class Report(NamedTuple):
    """What has happened on the streams."""

    kernels: int
    saves: int
    waits: int
    """How many saves the engine's stream has waited for."""
    needless: list[str]
    """Those of them that read no block which a step was about to write."""
    violations: list[str]
    """What used memory too early."""
    calls: list[str]
    """Calls in steps that stop the host."""


class WorkerOnGPU(Worker):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        self._machine = loaded()
        self._machine.reset("stuck")
        use(self._machine, pytest.MonkeyPatch())
        self._memory: list[Any] = []
        self._rows: dict[tuple[int, int], tuple[Any, int, int, list[int]]] = {}
        self._steps = 0
        self._read: dict[int, set[int]] = {}
        """The blocks that each save reads, by the number of its last operation."""
        self._waited: set[int] = set()
        self._needless: list[str] = []
        self._seen = self._kernels = self._last_ticket = 0
        self._calls: list[str] = []
        super().__init__(*arguments)

    def _allocate(self, length: int) -> Any:
        memory = super()._allocate(length)
        self._memory = [memory, self._machine.add_device(memory)]

        def made(layout: Any, rank: int, pages: Any) -> CudaCopies:
            copies = CudaCopies(layout, rank, pages)
            bridge = self._connector._worker_bridge
            while bridge.arena is None:  # On a busy machine, the cache process may answer late.
                bridge.update()
            assert pin(copies, bridge.arena)
            return copies

        on_host = worker.page_copies
        worker.page_copies = lambda *given: (made if given[2] else on_host)(*given)
        return memory

    def _put(self, memory: Any, block: int, slot: int, number: int) -> None:
        rows = self._rows.setdefault((memory.data_ptr(), block), (memory, block, slot, []))
        rows[3].append(number)

    def _computed(self) -> None:
        """Queue a kernel for each block of each layer."""
        for memory, block, slot, numbers in self._rows.values():
            place = memory[block, slot : slot + len(numbers)]
            source = torch.tensor(numbers).view(-1, 1).expand(-1, place.shape[1]).contiguous()
            # What an unfinished block holds already does not change: the rest of it may be copied meanwhile.
            self._machine.put(place, source, alone=slot == 0)
        self._rows = {}

    def _zero(self, memory: Any, blocks: Sequence[int]) -> None:
        """Queue a kernel for each block."""
        for block in blocks:
            self._machine.put(memory[block], torch.zeros_like(memory[block]), alone=True)

    def _step(
        self, metadata: Any, finished: set[str], requests: list[Scheduled], zeroed: Sequence[int]
    ) -> tuple[Any, int]:
        self._machine.wait_for_engine()  # It has sampled the tokens of the step before.
        self._steps += 1
        if self._steps % CATCH_UP == 0:
            self._machine.synchronize()
        result = super()._step(metadata, finished, requests, zeroed)
        self._check(requests)
        return result

    def _check(self, requests: list[Scheduled]) -> None:
        """Note which saves this step has waited for, and which it has begun."""
        new = self._machine.trace(self._seen)
        self._seen += len(new)
        self._kernels += sum(operation.what == KERNEL for operation in new)
        waited = {copy for kernel in new if kernel.what == KERNEL for copy in kernel.after} & set(self._read)
        if fresh := waited - self._waited:
            written = {
                block
                for request in requests
                for table in request.blocks
                for block in table[request.start // BLOCK :]
            }
            last = max(fresh)  # Saves are copied in order.
            if written.isdisjoint(self._read[last]):
                self._needless.append(f"step {self._steps}: save {last} of {self._read[last]}")
        self._waited |= waited
        reads = self._connector._worker_side._copies.reads
        begun = [ticket for ticket in sorted(reads) if ticket > self._last_ticket]
        copies = [operation for operation in new if operation.what != KERNEL]
        # Each save ends with the last of its transfers. Those of loads, before their kernels, come first.
        ends = [
            copy.number
            for copy, following in zip_longest(copies, copies[1:])
            if copy.what == TRANSFER and (following is None or following.what != TRANSFER)
        ]
        for number, ticket in zip(ends[len(ends) - len(begun) :], begun, strict=True):
            self._read[number], self._last_ticket = set(reads[ticket]), ticket
        self._calls = [call for call in self._machine.calls() if call in WAITS]

    def _report(self) -> dict[str, Any]:
        self._machine.synchronize()
        self._memory[1].free()
        return Report(
            self._kernels,
            len(self._read),
            len(self._waited),
            self._needless,
            self._machine.finish(),
            self._calls,
        )._asdict()
