"""Worker side of the connector with GPU copies, on the stand-in for CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import native
from kvtier.bridge.protocol import Confirmed
from kvtier.integrations.vllm import copies as page_copies
from kvtier.integrations.vllm import in_flight, worker
from kvtier.integrations.vllm.copies import ChunkCopy, CudaCopies
from kvtier.integrations.vllm.layout import ModelLayout, Region
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.memory.arena import Arena, ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout
from kvtier.rpc.calls import Call
from tests.integrations.test_worker import LAYOUT, Bridge, counts
from tests.rigs.cuda_stand_in.control import TRANSFER, StandIn
from tests.rigs.cuda_stand_in.fixtures import stand_in
from tests.rigs.pinning import pin

__all__ = ["stand_in"]

PAGE = 4096
BLOCKS = 64
NOTHING: list[Job] = []
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaFreeHost")
"""Calls that stop the thread of the engine."""
SAVED = ChunkCopy(1, 0, 64, ([1, 2, 3, 4],))
LOADED = ChunkCopy(2, 1 << 20, 64, ([5, 6, 7, 8],))


class CacheProcess(Bridge):
    """A cache process that uses the arena as soon as it may: it reads a committed chunk, and reuses it."""

    def __init__(self, machine: StandIn, arena: ArenaMap) -> None:
        super().__init__()
        self._machine = machine
        self.arena: Any = arena
        self.read: dict[int, bytes] = {}

    def commit(self, leases: list[int]) -> bool:
        for lease in leases:
            self.read[lease] = bytes(self._use(lease))
        return super().commit(leases)

    def confirm(self, leases: list[int]) -> Call[bool] | None:
        for lease in leases:
            self._use(lease)[:] = bytes(4 * PAGE)
        call = super().confirm(leases)
        assert call is not None
        self.calls.settle(Confirmed(call.ticket, True))
        return call

    def abandon(self, leases: list[int], epoch: int = 0) -> None:
        for lease in leases:
            self._use(lease)[:] = bytes(4 * PAGE)
        super().abandon(leases, epoch)

    def _use(self, lease: int) -> memoryview:
        offset = {SAVED.lease: SAVED.offset, LOADED.lease: LOADED.offset}.get(lease, lease * (1 << 16))
        view: memoryview = self.arena.view(offset + HEADER_BYTES, 4 * PAGE)
        self._machine.on_host(view, writes=True)
        return view


class Worker:
    """A worker whose engine uses blocks again as soon as it may."""

    def __init__(
        self,
        machine: StandIn,
        bridge: CacheProcess,
        monkeypatch: pytest.MonkeyPatch,
        layout: ChunkLayout = LAYOUT,
        *,
        writes_before_hooks: bool = False,
    ) -> None:
        self.machine = machine
        self.kv = torch.zeros((BLOCKS, PAGE), dtype=torch.uint8)
        self.memory = machine.add_device(self.kv)
        copies = CudaCopies(layout, 0, [[self.kv] for _ in layout.groups])
        assert pin(copies, bridge.arena)
        monkeypatch.setattr(worker, "page_copies", lambda *_: copies)
        any_bridge: Any = bridge
        model = ModelLayout(layout, b"n" * 32, ((Region("layer", 0, PAGE, PAGE, BLOCKS),),), (0,))
        self.side = WorkerSide(
            model, any_bridge, 0, confirm_timeout=3.5, writes_before_hooks=writes_before_hooks
        )

    def step(self, writes: list[int], saves: list[Job] = NOTHING, given: list[int] | None = None) -> set[int]:
        """Take a step that writes to blocks, of which some are new to requests, by default all.

        Return the copies that its kernels wait for.
        """
        self.side.protect(writes if given is None else given)
        kernels = [self.machine.write(self.kv[block], 2) for block in writes]
        self.side.save(saves)
        held = self.machine.held()
        return set().union(*(held.get(kernel, set()) for kernel in kernels))

    def copies(self) -> list[int]:
        """Return the number of the transfer of each copy."""
        return [operation.number for operation in self.machine.trace() if operation.what == TRANSFER]

    def reuse(self, chunk: ChunkCopy) -> None:
        """Check that no copy uses the blocks of a chunk any more."""
        for block in chunk.blocks[0]:
            self.machine.on_host(self.kv[block], writes=True)

    def end(self) -> tuple[set[str], set[str], set[str]]:
        """Run steps until any request is reported: saved, loaded, failed."""
        while True:
            results = self.side.take_results()
            if any(results):
                return results


@pytest.fixture
def bridge(stand_in: StandIn) -> Iterator[CacheProcess]:
    created = Arena.create(4 << 20)
    yield CacheProcess(stand_in, ArenaMap(os.dup(created.fd), created.capacity))
    created.close()


@contextmanager
def running(
    stand_in: StandIn, bridge: CacheProcess, *layout: ChunkLayout, **options: bool
) -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Worker(stand_in, bridge, monkeypatch, *layout, **options)
        yield made
        made.side.close()
        made.memory.free()
    del made.side  # pytest keeps the worker.


@pytest.fixture
def engine(stand_in: StandIn, bridge: CacheProcess) -> Iterator[Worker]:
    with running(stand_in, bridge) as worker:
        yield worker


def job(chunk: ChunkCopy, *, last: bool = True, request: str = "request") -> Job:
    return Job(request, 1, [chunk], last=last)


def chunk(lease: int, *blocks: int) -> ChunkCopy:
    """Return the copy of a chunk of four blocks to a place of its own."""
    return ChunkCopy(lease, lease * (1 << 16), 64, (list(blocks),))


stuck = pytest.mark.parametrize("stand_in", ["stuck"], indirect=True)
"""Copies run only if something waits for them, however many steps there are."""


def test_commit_comes_after_the_copy(engine: Worker, bridge: CacheProcess) -> None:
    engine.machine.fill(engine.kv, 1)
    engine.side.save([job(SAVED)])
    engine.machine.write(engine.kv[5:], 2)  # The engine goes on, without waiting.
    assert engine.end() == ({"request"}, set(), set())
    assert bridge.read == {SAVED.lease: b"\x01" * 4 * PAGE}
    engine.machine.synchronize()  # Kernels end before their engine does.


def test_load_ends_after_the_copy(engine: Worker, bridge: CacheProcess) -> None:
    bridge.arena.view(LOADED.offset + HEADER_BYTES, 4 * PAGE)[:] = b"\x03" * 4 * PAGE
    engine.machine.fill(engine.kv, 1)
    engine.side.load([job(LOADED)])
    assert engine.end() == (set(), {"request"}, set())
    engine.reuse(LOADED)
    assert bool((engine.kv[LOADED.blocks[0]] == 3).all())


def test_copy_that_cannot_start_is_a_miss(engine: Worker, bridge: CacheProcess) -> None:
    for ahead in range(1, 6):
        engine.machine.fail(len(engine.machine.calls()) + ahead)
        engine.side.load([job(LOADED)])
        assert engine.end() == (set(), {"request"}, {"request"})
        engine.reuse(LOADED)
        engine.machine.fail(len(engine.machine.calls()) + ahead)
        engine.side.save([job(SAVED)])
        assert engine.end() == ({"request"}, set(), set())
        assert bridge.abandoned[-1] == [SAVED.lease]
        engine.reuse(SAVED)
    assert not bridge.read
    assert not bridge.confirmed


@pytest.mark.parametrize("stand_in", ["late"], indirect=True)
def test_copy_that_fails_during_shutdown_is_not_committed(engine: Worker, bridge: CacheProcess) -> None:
    engine.side.save([job(SAVED)])
    engine.side.load([job(LOADED)])
    engine.machine.fail(len(engine.machine.calls()) + 2)
    engine.side.unregister()
    assert engine.side.take_results()[2] in ({"request"}, set())
    assert len(bridge.read) + len(bridge.confirmed) == 1
    engine.reuse(SAVED)
    engine.reuse(LOADED)


def test_close_ends_what_is_in_flight(engine: Worker, bridge: CacheProcess) -> None:
    engine.machine.fill(engine.kv, 1)
    engine.side.save([job(SAVED)])
    engine.side.load([job(LOADED)])
    engine.side.close()
    assert bridge.read == {SAVED.lease: b"\x01" * 4 * PAGE}
    engine.reuse(SAVED)
    engine.reuse(LOADED)


@stuck
def test_engine_waits_for_exactly_the_saves_of_blocks_that_it_writes(
    engine: Worker, bridge: CacheProcess
) -> None:
    machine = engine.machine
    machine.fill(engine.kv, 1)
    running, ended = chunk(3, 1, 2, 3, 4), chunk(4, 5, 6, 7, 8)
    assert engine.step([9], [job(ended, last=False)]) == set()
    assert engine.step([10], [job(running, last=False)]) == set()
    first, second = engine.copies()
    assert engine.step([11]) == set(), "the engine computes on"
    assert engine.step([6]) == {first}, "a request has lost these blocks, as after a preemption"
    assert second not in set().union(*machine.held().values())
    assert not bridge.committed
    assert engine.step([4]) == {first, second}, "they are copied in order"
    assert not {*machine.calls()}.intersection(WAITS)
    machine.synchronize()
    engine.side.take_results()
    assert bridge.read == {3: b"\x01" * 4 * PAGE, 4: b"\x01" * 4 * PAGE}
    assert engine.step([1, 6]) == set(), "the host knows that the copies are done"
    machine.synchronize()


@stuck
def test_blocks_of_states_are_waited_for_in_the_next_step(stand_in: StandIn, bridge: CacheProcess) -> None:
    layout = ChunkLayout(64, (GroupLayout(64, (PAGE,), state=True), GroupLayout(16, (PAGE,))))
    state = ChunkCopy(3, 3 << 16, STATE_TOKENS, ([9], []))
    kv = ChunkCopy(4, 4 << 16, 64, ([], [1, 2, 3, 4]))
    with running(stand_in, bridge, layout) as engine:
        engine.step([], [Job("request", 1, [kv, state])])
        first, second = engine.copies()
        assert engine.step([9, 20], given=[20]) == {first}, "the state is copied first, and alone waited for"
        assert engine.step([21]) == {first}, "as it comes after that step"
        assert second not in set().union(*stand_in.held().values())
        stand_in.synchronize()


@stuck
def test_all_saves_are_waited_for_if_a_step_writes_before_the_hooks(
    stand_in: StandIn, bridge: CacheProcess
) -> None:
    with running(stand_in, bridge, writes_before_hooks=True) as engine:
        engine.step([], [job(SAVED)])
        zeroes = stand_in.write(engine.kv[1], 0)
        assert stand_in.held()[zeroes] == set(engine.copies())
        stand_in.synchronize()


@stuck
def test_load_waits_for_saves_of_its_blocks_and_the_engine_does_not(
    engine: Worker, bridge: CacheProcess
) -> None:
    bridge.arena.view(LOADED.offset + HEADER_BYTES, 4 * PAGE)[:] = b"\x03" * 4 * PAGE
    engine.machine.fill(engine.kv, 1)
    engine.step([], [job(chunk(3, 5, 6, 9, 10), request="saved"), job(SAVED, request="saved")])
    engine.side.protect([])
    engine.side.load([job(LOADED)])
    *_, save, _load = engine.copies()
    assert save in engine.machine.trace()[-1].after
    assert engine.step([11]) == set()
    engine.machine.synchronize()
    assert engine.side.take_results()[1] == {"request"}
    assert bridge.read[3] == b"\x01" * 4 * PAGE
    engine.reuse(LOADED)
    assert bool((engine.kv[LOADED.blocks[0]] == 3).all())
    engine.machine.synchronize()


@stuck
def test_blocks_of_a_finished_request_are_kept_until_its_copies_are_done(
    engine: Worker, bridge: CacheProcess
) -> None:
    engine.machine.fill(engine.kv, 1)
    engine.step([], [job(SAVED, last=False)])
    engine.step([], [Job("other", 1, [], last=True)])
    assert engine.side.take_results()[0] == {"other"}, "it has nothing in flight"
    engine.step([], [Job("request", 1, [], last=True)])
    assert engine.side.take_results()[0] == set()
    engine.machine.synchronize()
    assert engine.side.take_results()[0] == {"request"}
    engine.reuse(SAVED)


@stuck
def test_slow_copies_read_a_limited_number_of_blocks(engine: Worker, bridge: CacheProcess) -> None:
    limit = BLOCKS // in_flight.MAX_SHARE // 4 + in_flight.YOUNG_STEPS  # Each step has one copy.
    for lease in range(3, 3 + limit):
        engine.step([], [job(chunk(lease, *range(4 * lease, 4 * lease + 4)), last=False)])
    assert bridge.abandoned == []
    engine.step([], [job(chunk(40, 1, 2, 3, 4), last=False)])
    assert len(engine.copies()) == limit
    engine.machine.synchronize()
    engine.side.take_results()
    assert bridge.abandoned == [[40]]
    assert counts(engine.side)["not_stored_chunks"] == 1
    engine.step([], [job(chunk(41, 1, 2, 3, 4), last=False)])
    assert len(engine.copies()) == limit + 1, "the device has caught up"
    engine.machine.synchronize()


@stuck
def test_each_step_may_save_more_than_that(engine: Worker, bridge: CacheProcess) -> None:
    """As in the prefill of a long prompt: each step begins while the GPU still computes the last one."""
    share = BLOCKS // in_flight.MAX_SHARE // 4
    chunks = [chunk(4 + at, *range(4 * at, 4 * at + 4)) for at in range(share)]
    for _ in range(1 + in_flight.YOUNG_STEPS):
        engine.step([], [Job("request", 1, chunks, last=False)])
    engine.machine.synchronize()
    engine.side.take_results()
    assert not bridge.abandoned
    assert len(bridge.read) == share


def test_one_step_may_save_more_than_that(engine: Worker, bridge: CacheProcess) -> None:
    """Also in parts: the engine waits for one at most."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(in_flight, "MAX_PART_BYTES", 5 * PAGE)
        many = [chunk(lease, *range(4 * (lease - 3), 4 * (lease - 3) + 4)) for lease in range(4, 19)]
        engine.step([], [Job("request", 1, many)])
    assert len(engine.copies()) == len(many)
    while len(bridge.read) < len(many):
        engine.side.take_results()
    assert not bridge.abandoned
    engine.machine.synchronize()


@pytest.mark.usefixtures("stand_in")
def test_engine_starts_if_cuda_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise native.cuda.CudaError("no kernel image is available for execution on the device")

    on_gpu: Any = [[SimpleNamespace(device=torch.device("cuda", 0))]]
    monkeypatch.setattr(native, "cuda_problem", lambda: "")
    monkeypatch.setattr(page_copies, "CudaCopies", fails)
    monkeypatch.setattr(page_copies, "TorchCopies", lambda *_: "torch")
    assert page_copies.page_copies(LAYOUT, 0, on_gpu) == "torch"
    assert "no kernel image" in caplog.text
