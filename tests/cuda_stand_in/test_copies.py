"""GPU copies of the connector: right bytes and right order, however late CUDA runs them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.errors import ArenaError
from kvtier.integrations.vllm.copies import ChunkCopy, CudaCopies, Pinning
from kvtier.memory.arena import Arena, ArenaMap
from kvtier.memory.layout import ChunkLayout
from tests.native.test_copy import BLOCKS, LAYOUTS, chunks, engine, expected_pages, rank_of
from tests.rigs.cuda_stand_in.control import DeviceMemory, StandIn
from tests.rigs.pinning import pin
from tests.rigs.waiting import wait_until

Pages = list[list[torch.Tensor]]
SIMPLE = LAYOUTS["one group"]


class Engine:
    """An engine's KV memory, all of which has one value."""

    def __init__(self, machine: StandIn, layout: ChunkLayout) -> None:
        self._machine = machine
        self.pages: Pages = engine(layout, 1)
        self.memory = [machine.add_device(group[0]) for group in self.pages]

    def fill(self, value: int) -> None:
        """Have a kernel write a value to all pages."""
        for group in self.pages:
            self._machine.fill(group[0], value)

    def holds(self, value: int, layout: ChunkLayout, selected: list[ChunkCopy]) -> bool:
        """Return whether the pages of these chunks have this value now."""
        for group in self.pages:
            self._machine.on_host(group[0], writes=False)
        pages = (
            (group, layer, block)
            for chunk in selected
            for group, layer, block, _, _ in expected_pages(layout, chunk)
        )
        return all(bool((self.pages[group][layer][block] == value).all()) for group, layer, block in pages)


@pytest.fixture
def open_engine(stand_in: StandIn) -> Iterator[Callable[[ChunkLayout], Engine]]:
    """Return a function that makes an engine, which frees its memory in the end."""
    memory: list[DeviceMemory] = []

    def open_one(layout: ChunkLayout) -> Engine:
        made = Engine(stand_in, layout)
        memory.extend(made.memory)
        return made

    yield open_one
    for part in memory:
        part.free()


def copies(layout: ChunkLayout, pages: Pages, arena: ArenaMap) -> CudaCopies:
    made = CudaCopies(layout, rank_of(layout), pages)
    assert pin(made, arena)
    return made


def finish(copying: CudaCopies, ticket: int) -> None:
    """Poll until a copy is done, like the connector in its hooks."""
    while not copying.done(ticket):
        pass


def saved(layout: ChunkLayout, arena: ArenaMap, selected: list[ChunkCopy]) -> set[int]:
    """Return the values of all bytes that belong to pages of these chunks."""
    parts = [
        arena.view(at, length) for chunk in selected for _, _, _, at, length in expected_pages(layout, chunk)
    ]
    return {byte for part in parts for byte in bytes(part)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_loaded_pages_are_those_that_were_saved(
    layout: ChunkLayout, arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    engine, selected = open_engine(layout), chunks(layout, 2)
    copying = copies(layout, engine.pages, arena)
    engine.fill(1)
    ticket = copying.save(arena, selected)
    copying.hold(ticket)
    engine.fill(2)
    finish(copying, ticket)
    stand_in.on_host(arena.tensor(), writes=True)
    assert saved(layout, arena, selected) == {1}
    finish(copying, copying.load(arena, selected))
    assert engine.holds(1, layout, selected)
    copying.close()


def test_close_waits_for_copies_in_flight(
    arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    engine, selected = open_engine(SIMPLE), chunks(SIMPLE, 2)
    copying = copies(SIMPLE, engine.pages, arena)
    engine.fill(1)
    copying.save(arena, selected[:1])
    copying.load(arena, selected[2:3])
    copying.close()
    stand_in.on_host(arena.tensor(), writes=True)
    assert saved(SIMPLE, arena, selected[:1]) == {1}
    assert "registered" not in stand_in.alive()


def test_close_unpins_even_if_the_thread_that_pinned_still_runs(
    arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    copying = copies(SIMPLE, open_engine(SIMPLE).pages, arena)
    pinning = copying._pinning  # As that thread holds it.
    assert pinning is not None
    copying.close()
    assert "registered" not in stand_in.alive()
    again = copies(SIMPLE, open_engine(SIMPLE).pages, arena)  # As after a sleep of the engine.
    again.close()


def test_close_waits_for_a_registration(
    arena: ArenaMap,
    stand_in: StandIn,
    open_engine: Callable[[ChunkLayout], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_pin = threading.Event()

    def wait_until_closing(_: ArenaMap) -> int:
        assert may_pin.wait(60)
        return 0

    monkeypatch.setattr(ArenaMap, "take_large_pages", wait_until_closing)
    copying = CudaCopies(SIMPLE, 0, open_engine(SIMPLE).pages)
    copying.load(arena, chunks(SIMPLE, 2))  # By torch, as the arena is not registered yet.
    unpin = Pinning.unpin

    def allow_and_unpin(pinning: Pinning) -> None:
        may_pin.set()
        unpin(pinning)

    monkeypatch.setattr(Pinning, "unpin", allow_and_unpin)
    copying.close()
    assert "registered" not in stand_in.alive()
    assert "cudaHostUnregister" in stand_in.calls()


def test_replaced_arena_is_unpinned_after_its_last_copy(
    arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    engine, selected = open_engine(SIMPLE), chunks(SIMPLE, 2)
    copying = copies(SIMPLE, engine.pages, arena)
    ticket = copying.save(arena, selected[:1])
    other = another_arena()
    assert pin(copying, other)
    finish(copying, copying.load(other, selected[2:3]))
    assert stand_in.alive()["registered"] == 2
    finish(copying, ticket)
    finish(copying, copying.load(other, selected[2:3]))
    wait_until(lambda: stand_in.alive()["registered"] == 1)
    copying.close()
    other.close()


def another_arena() -> ArenaMap:
    made = Arena.create(4 << 20)
    mapped = ArenaMap(os.dup(made.fd), made.capacity)
    made.close()
    return mapped


def test_arena_may_be_closed_while_it_is_pinned(
    arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    engine = open_engine(SIMPLE)
    other = another_arena()
    copying = copies(SIMPLE, engine.pages, other)
    copying.save(other, chunks(SIMPLE, 2))
    other.close()  # As the bridge does when the cache process is lost. The memory stays mapped.
    with pytest.raises((ValueError, ArenaError)):
        other.view(0, 1)
    copying.close()


@pytest.mark.parametrize("stand_in", ["random"], indirect=True)
def test_pinning_uses_the_device_of_the_engine_only(arena: ArenaMap, stand_in: StandIn) -> None:
    stand_in.reset("random", devices=2)
    pinning = Pinning(arena, 1)
    pinning._ended.wait()
    assert pinning.memory is not None
    pinning.release()
    wait_until(lambda: not stand_in.alive())
    stand_in.finish()
    assert stand_in.has_context(1)
    assert not stand_in.has_context(0)


def test_invalid_chunk_starts_nothing(
    arena: ArenaMap, stand_in: StandIn, open_engine: Callable[[ChunkLayout], Engine]
) -> None:
    copying = copies(SIMPLE, open_engine(SIMPLE).pages, arena)
    before = stand_in.calls()
    with pytest.raises(IndexError):
        copying.load(arena, [ChunkCopy(0, 8192, 64, ([5, 6, 7, BLOCKS],))])
    assert stand_in.calls() == before
    copying.close()
