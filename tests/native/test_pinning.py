"""An arena that is replaced while it is being registered, or copied from: no step waits for either.

Without a GPU: what CUDA does is scripted, as no GPU can be made to take its time.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import native
from kvtier.arena import ArenaMap
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.cuda_copies import CudaCopies
from kvtier.layout import ChunkLayout, GroupLayout
from tests.bridge.conftest import wait_until

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))
CHUNKS = [ChunkCopy(1, 0, 64, ([1, 2, 3, 4],))]


class Arena(ArenaMap):
    """Registering it takes until the test says so."""

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
    """Copies that are done when the test says so."""

    def __init__(self, *_: object) -> None:
        self.begun = 0
        self.finished: set[int] = set()

    def load(self, *_: object) -> int:
        self.begun += 1
        return self.begun

    def done(self, ticket: int) -> bool:
        return ticket in self.finished

    def wait(self, ticket: int) -> None:
        raise AssertionError("a hook waits for a copy")


class Memory:
    """Registered memory, until it is deleted."""

    def __init__(self, _: object) -> None:
        pass


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CudaCopies:
    scripted: Any = SimpleNamespace(PinnedMemory=Memory, DevicePages=DevicePages, CudaError=RuntimeError)
    monkeypatch.setattr(native, "cuda", scripted, raising=False)
    monkeypatch.setattr(CudaCopies, "_stream", lambda _: 0)
    return CudaCopies(LAYOUT, 0, [[torch.zeros((5, 4096), dtype=torch.uint8)]], NULL_BLOCK)


def test_an_arena_that_is_replaced_while_it_is_registered_is_not_waited_for(copies: CudaCopies) -> None:
    first, second = Arena(), Arena()
    copies.load(first, CHUNKS)
    pinning = copies._pinning
    assert pinning is not None
    copies.load(second, CHUNKS)  # Returns, though the first has not been registered yet.
    first.may_be_pinned.set()
    second.may_be_pinned.set()
    pinning.wait()
    wait_until(lambda: pinning.memory is None)


def test_an_arena_stays_registered_until_the_last_copy_from_it_is_done(copies: CudaCopies) -> None:
    first, second = Arena(), Arena()
    first.may_be_pinned.set()
    second.may_be_pinned.set()
    assert copies.pin(first)
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
