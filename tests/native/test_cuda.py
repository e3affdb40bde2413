"""Copies between a GPU and the arena: correct bytes, ordered with the engine's stream, without blocking."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier import native
from kvtier.errors import ArenaError
from kvtier.integrations.vllm.copies import ChunkCopy, CudaCopies, page_copies
from kvtier.memory.arena import HUGE_PAGE_BYTES, Arena, ArenaMap
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.native.test_copy import BLOCKS, LAYOUTS, chunks, engine, expected_pages, rank_of
from tests.rigs.pinning import pin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(native.cuda_problem()), reason=native.cuda_problem() or "CUDA is available"),
]

METHODS = ["BEST", "DIRECT"]
Pages = list[list[torch.Tensor]]


@pytest.fixture(params=[False, True], ids=["normal pages", "huge pages"])
def arena(request: pytest.FixtureRequest) -> Iterator[ArenaMap]:
    try:
        made = Arena.create(2 * HUGE_PAGE_BYTES, huge=request.param, fallback=False)
    except ArenaError as error:
        pytest.skip(str(error))
    mapped = ArenaMap(os.dup(made.fd), made.capacity)
    yield mapped
    mapped.close()
    made.close()


def on_device(pages: Pages) -> Pages:
    return [[layer.cuda() for layer in group] for group in pages]


def same(first: Pages, second: Pages) -> bool:
    return all(
        torch.equal(one.cpu(), other.cpu())
        for group in zip(first, second, strict=True)
        for one, other in zip(*group, strict=True)
    )


def copies(layout: ChunkLayout, pages: Pages, arena: ArenaMap) -> CudaCopies:
    made = page_copies(layout, rank_of(layout), pages)
    assert isinstance(made, CudaCopies)
    assert pin(made, arena)
    return made


@pytest.fixture(params=METHODS)
def copy_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this copy method for every batch."""
    method = native.cuda.CopyMethod[request.param]
    for verb in ("load", "save"):
        call: Callable[..., int] = getattr(native.cuda.DevicePages, verb)
        monkeypatch.setattr(
            native.cuda.DevicePages,
            verb,
            lambda *given, call=call, **named: call(*given, method=method, **named),
        )


@pytest.mark.usefixtures("copy_method")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_save_places_pages_according_to_the_layout(layout: ChunkLayout, arena: ArenaMap) -> None:
    pages, selected = on_device(engine(layout, 1)), chunks(layout, 2)
    memory = arena.view(0, arena.capacity)
    memory[:] = b"\xee" * arena.capacity
    expected = bytearray(memory)
    for chunk in selected:
        for group, layer, block, at, length in expected_pages(layout, chunk):
            expected[at : at + length] = pages[group][layer][block].cpu().numpy().tobytes()
    saving = copies(layout, pages, arena)
    saving.wait(saving.save(arena, selected))
    assert memory == expected
    saving.close()


@pytest.mark.usefixtures("copy_method")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_load_fills_only_the_given_blocks(layout: ChunkLayout, arena: ArenaMap) -> None:
    expected, selected = engine(layout, 1), chunks(layout, 2)
    pages = on_device(expected)
    memory = arena.view(0, arena.capacity)
    memory[:] = random.Random(3).randbytes(arena.capacity)
    for chunk in selected:
        for group, layer, block, at, length in expected_pages(layout, chunk):
            expected[group][layer][block] = torch.frombuffer(
                bytearray(memory[at : at + length]), dtype=torch.uint8
            )
    loading = copies(layout, pages, arena)
    loading.wait(loading.load(arena, selected))
    assert same(pages, expected)
    loading.close()


def delay() -> None:
    """Keep the engine's stream busy with a spin kernel, for a number of device clock ticks."""
    torch.cuda._sleep(200_000_000)


@pytest.mark.usefixtures("copy_method")
def test_save_and_engine_are_ordered_on_the_stream(arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = on_device(engine(layout, 1))
    saving = copies(layout, pages, arena)
    pages[0][0].fill_(0)  # CUDA loads a kernel when it is first used, and may wait for the device.
    delay()
    for layer in pages[0]:
        layer.fill_(1)
    ticket = saving.save(arena, chunks(layout, 2))
    assert not saving.done(ticket)  # The engine's work is still running, and the call did not block.
    saving.hold(ticket)
    for layer in pages[0]:
        layer.fill_(2)
    saving.wait(ticket)
    memory = arena.view(0, arena.capacity)
    for chunk in chunks(layout, 2):
        for _, _, _, at, length in expected_pages(layout, chunk):
            assert memory[at : at + length] == b"\x01" * length
    saving.close()


@pytest.mark.usefixtures("copy_method")
def test_load_waits_for_earlier_engine_work(arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = on_device(engine(layout, 1))
    loading = copies(layout, pages, arena)
    arena.view(0, arena.capacity)[:] = b"\x03" * arena.capacity
    delay()
    for layer in pages[0]:
        layer.fill_(1)
    ticket = loading.load(arena, chunks(layout, 2))
    assert not loading.done(ticket)
    while not loading.done(ticket):  # Poll, like the connector in its hooks.
        time.sleep(0.001)
    for chunk in chunks(layout, 2):
        for group, layer, block, _, _ in expected_pages(layout, chunk):
            assert bool((pages[group][layer][block] == 3).all())
    loading.close()


@pytest.mark.parametrize(
    "bad",
    [ChunkCopy(0, 4096, 64, ([1, 2, 3, BLOCKS],)), ChunkCopy(0, 64 << 20, 64, ([1, 2, 3, 4],))],
    ids=["block", "chunk"],
)
def test_invalid_chunk_fails_the_whole_batch(bad: ChunkCopy, arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    before = engine(layout, 1)
    pages = on_device(before)
    loading = copies(layout, pages, arena)
    with pytest.raises(IndexError):
        loading.load(arena, [ChunkCopy(0, 8192, 64, ([5, 6, 7, 8],)), bad])
    torch.cuda.synchronize()
    assert same(pages, before)
    loading.close()


def test_many_batches_are_in_flight_concurrently(arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = on_device(engine(layout, 1))
    before = [[layer.cpu().clone() for layer in group] for group in pages]
    copying = copies(layout, pages, arena)
    selected = chunks(layout, 2)[:1]
    tickets = []
    for _ in range(50):
        tickets.append(copying.save(arena, selected))
        tickets.append(copying.load(arena, selected, after=tickets[-1:]))
    for ticket in reversed(tickets):
        copying.wait(ticket)
    assert all(copying.done(ticket) for ticket in tickets)
    assert same(pages, before)
    copying.close()


def test_replacement_arena_is_registered(arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = on_device(engine(layout, 1))
    copying = copies(layout, pages, arena)
    copying.save(arena, chunks(layout, 2))
    made = Arena.create(4 << 20)
    other = ArenaMap(os.dup(made.fd), made.capacity)
    assert pin(copying, other)
    copying.wait(copying.save(other, chunks(layout, 2)))
    for chunk in chunks(layout, 2):
        for _, _, _, at, length in expected_pages(layout, chunk):
            assert other.view(at, length) == arena.view(at, length)
    copying.close()
    other.close()
    made.close()


def test_falls_back_to_torch_if_the_arena_cannot_be_registered(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: memoryview) -> None:
        raise native.cuda.CudaError("refused")

    layout = ChunkLayout(64, (GroupLayout(16, (4096,)),))
    before = engine(layout, 1)
    pages = on_device(before)
    monkeypatch.setattr(native.cuda, "PinnedMemory", refuse)
    copying = page_copies(layout, 0, pages)
    assert isinstance(copying, CudaCopies)
    assert not pin(copying, arena)
    selected = [ChunkCopy(0, 4096, 64, ([5, 3, 9, 1],))]
    assert copying.done(copying.save(arena, selected))
    assert copying.done(copying.load(arena, selected))
    assert same(pages, before)
    copying.close()
