"""Replacing an arena during its registration, or during copies from it, never blocks an engine step.

Runs without a GPU: CUDA is simulated, because a real one cannot be delayed on demand.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import native
from kvtier.integrations.vllm.copies import ChunkCopy, CudaCopies
from kvtier.memory.arena import ArenaMap
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.pinning import pin
from tests.rigs.waiting import wait_until

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))
CHUNKS = [ChunkCopy(1, 0, 64, ([1, 2, 3, 4],))]


class Arena(ArenaMap):
    """An arena whose registration blocks until the test allows it."""

    def __init__(self) -> None:
        self.capacity = 1
        self.may_be_pinned = threading.Event()

    def take_large_pages(self) -> int:
        self.may_be_pinned.wait(60)
        return 0

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def tensor(self) -> torch.Tensor:
        return torch.zeros(1 << 16, dtype=torch.uint8)


class DevicePages:
    """Copies that are done once the test marks them as finished."""

    staged = True

    def __init__(self, *_: object) -> None:
        self.started = 0
        self.finished: set[int] = set()

    def load(self, *_: object, **__: object) -> int:
        self.started += 1
        return self.started

    def done(self, ticket: int) -> bool:
        return ticket in self.finished

    def wait(self, ticket: int) -> None:
        raise AssertionError("a hook waited for a copy")


class Memory:
    """Registered memory; deleting it unregisters."""

    def __init__(self, _: object) -> None:
        pass


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CudaCopies:
    simulated: Any = SimpleNamespace(
        PinnedMemory=Memory, DevicePages=DevicePages, CudaError=RuntimeError, use_device=lambda _: None
    )
    monkeypatch.setattr(native, "cuda", simulated, raising=False)
    monkeypatch.setattr(CudaCopies, "_stream", lambda _: 0)
    return CudaCopies(LAYOUT, 0, [[torch.zeros((5, 4096), dtype=torch.uint8)]])


def test_replacing_an_arena_does_not_wait_for_its_registration(copies: CudaCopies) -> None:
    first, second = Arena(), Arena()
    copies.load(first, CHUNKS)
    pinning = copies._pinning
    assert pinning is not None
    copies.load(second, CHUNKS)  # Returns although the first arena is not registered yet.
    first.may_be_pinned.set()
    second.may_be_pinned.set()
    pinning._ended.wait()
    wait_until(lambda: pinning.memory is None)


def test_arena_stays_registered_until_its_last_copy_is_done(copies: CudaCopies) -> None:
    first, second = Arena(), Arena()
    first.may_be_pinned.set()
    second.may_be_pinned.set()
    assert pin(copies, first)
    pinning = copies._pinning
    assert pinning is not None
    ticket = copies.load(first, CHUNKS)
    copies.load(second, CHUNKS)
    pages: Any = copies._memory
    assert pinning.memory is not None
    pages.finished.add(ticket)
    assert copies.done(ticket)
    copies.load(second, CHUNKS)
    wait_until(lambda: pinning.memory is None)
