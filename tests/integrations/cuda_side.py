"""Worker side of the connector with GPU copies, on the stand-in for CUDA. See ``test_with_vllm.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier.bridge.protocol import Confirmed
from kvtier.integrations.vllm import worker
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.cuda_copies import CudaCopies
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.memory.arena import Arena, ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.rpc.calls import Call
from tests.cuda_stand_in.control import StandIn
from tests.cuda_stand_in.fixtures import stand_in
from tests.integrations.worker_side import LAYOUT, Bridge

__all__ = ["stand_in"]

PAGE = 4096
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
        chunk = SAVED if lease == SAVED.lease else LOADED
        view: memoryview = self.arena.view(chunk.offset + HEADER_BYTES, 4 * PAGE)
        self._machine.on_host(view, writes=True)
        return view


class Worker:
    """A worker whose engine uses blocks again as soon as it may."""

    def __init__(self, machine: StandIn, bridge: CacheProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = machine
        self.kv = torch.zeros((9, PAGE), dtype=torch.uint8)
        self.memory = machine.add_device(self.kv)
        copies = CudaCopies(LAYOUT, 0, [[self.kv]], NULL_BLOCK)
        assert copies.pin(bridge.arena)
        monkeypatch.setattr(worker, "page_copies", lambda *_: copies)
        any_bridge: Any = bridge
        self.side = WorkerSide(ModelLayout(LAYOUT, b"n" * 32, (), ()), any_bridge, 0, confirm_timeout=3.5)

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


@pytest.fixture
def engine(stand_in: StandIn, bridge: CacheProcess) -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Worker(stand_in, bridge, monkeypatch)
        yield made
        made.side.close()
        made.memory.free()
    del made.side  # pytest keeps the worker.


def job(chunk: ChunkCopy) -> Job:
    return Job("request", 1, [chunk], last=True)


def test_commit_comes_after_the_copy(engine: Worker, bridge: CacheProcess) -> None:
    engine.machine.fill(engine.kv, 1)
    engine.side.save([job(SAVED)])
    engine.machine.fill(engine.kv, 2)  # The engine goes on, without waiting.
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
