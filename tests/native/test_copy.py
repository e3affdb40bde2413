"""Copies of pages and buffers: the native core and torch give identical bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from xxhash import xxh3_128_digest

from kvtier import native
from kvtier.integrations.vllm.copies import ChunkCopy, NativeCopies, PageCopies, TorchCopies, page_copies
from kvtier.memory.arena import ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout

needs_native = pytest.mark.skipif(not native.available(), reason=native.summary())

BLOCKS = 40
NULL = 0


LAYOUTS = {
    "one group": ChunkLayout(64, (GroupLayout(16, (4096,) * 3),)),
    "second rank of two": ChunkLayout(64, (GroupLayout(16, (640,) * 2),), ranks=2),
    "a window and layers of two sizes": ChunkLayout(
        64, (GroupLayout(16, (1024, 512)), GroupLayout(32, (96,), window=20))
    ),
    "states beside attention": ChunkLayout(
        64, (GroupLayout(32, (100, 60), state=True), GroupLayout(16, (512,))), ranks=2
    ),
    "heads that two ranks share": ChunkLayout(
        64, (GroupLayout(16, (640,) * 2, shards=(0, 0, 1, 1)),), ranks=4
    ),
}
PADDING = 28
"""Bytes after each state."""


def engine(layout: ChunkLayout, seed: int) -> list[list[torch.Tensor]]:
    """Return random KV memory. The layers of a group share one storage, as in some engines."""
    generator = torch.Generator().manual_seed(seed)
    created = []
    for group in layout.groups:
        strides = [page_bytes + PADDING * group.state for page_bytes in group.page_bytes]
        storage = torch.randint(0, 256, (BLOCKS * sum(strides),), dtype=torch.uint8, generator=generator)
        layers = zip(storage.split([BLOCKS * stride for stride in strides]), group.page_bytes, strict=True)
        created.append([layer.view(BLOCKS, -1)[:, :page_bytes] for layer, page_bytes in layers])
    return created


def chunks(layout: ChunkLayout, seed: int) -> list[ChunkCopy]:
    """Return consecutive chunks, then a state. The last one is short, and some pages are the null block."""
    order = random.Random(seed)
    free = [order.sample(range(1, BLOCKS), BLOCKS - 1) for _ in layout.groups]
    created, offset = [], 4096
    for tokens in (64, 64, 64, 40, *[STATE_TOKENS] * layout.has_states):
        blocks = []
        for group, unused in zip(layout.groups, free, strict=True):
            table = [unused.pop() for _ in group.blocks(tokens)]
            if len(created) == 1 and table:
                table[0] = NULL
            if len(created) == 2:
                table = [NULL if page % 2 else block for page, block in enumerate(table)]
            blocks.append(table)
        created.append(ChunkCopy(0, offset, tokens, tuple(blocks)))
        offset += -(-(HEADER_BYTES + layout.payload_bytes(tokens)) // 4096) * 4096
    return created


def rank_of(layout: ChunkLayout) -> int:
    return layout.ranks - 1


def copies(kind: str, layout: ChunkLayout, pages: list[list[torch.Tensor]]) -> PageCopies:
    if kind == "native":
        if not native.available():
            pytest.skip(native.summary())
        return NativeCopies(layout, rank_of(layout), pages)
    return TorchCopies(layout, rank_of(layout), pages)


def expected_pages(layout: ChunkLayout, chunk: ChunkCopy) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (group, layer, block, offset of the page in the arena, bytes) according to the layout."""
    for span in layout.spans(chunk.tokens, rank_of(layout)):
        for page, block in enumerate(chunk.blocks[span.group]):
            if block != NULL:
                at = chunk.offset + HEADER_BYTES + span.offset + page * span.page_bytes
                yield span.group, span.layer, block, at, span.page_bytes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_staging_buffer_holds_one_rank_without_a_header(
    kind: str, layout: ChunkLayout, arena: ArenaMap
) -> None:
    pages, loaded = engine(layout, 1), engine(layout, 3)
    held = chunks(layout, 2)[0]
    staged = replace(held, offset=1 << 20, staging=7)
    saving, loading = copies(kind, layout, pages), copies(kind, layout, loaded)
    saving.save(arena, [held])
    saving.save(arena, [staged])
    length = layout.rank_bytes(held.tokens)
    first = held.offset + HEADER_BYTES + layout.share(held.tokens, rank_of(layout))
    assert arena.view(staged.offset, length) == arena.view(first, length)
    loading.load(arena, [staged])
    for group, layer, block, _, _ in expected_pages(layout, held):
        assert torch.equal(loaded[group][layer][block], pages[group][layer][block])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_save_places_pages_according_to_the_layout(kind: str, layout: ChunkLayout, arena: ArenaMap) -> None:
    pages, selected = engine(layout, 1), chunks(layout, 2)
    before = [[layer.clone() for layer in group] for group in pages]
    memory = arena.view(0, arena.capacity)
    memory[:] = b"\xee" * arena.capacity
    expected = bytearray(memory)
    for chunk in selected:
        for group, layer, block, at, length in expected_pages(layout, chunk):
            expected[at : at + length] = pages[group][layer][block].numpy().tobytes()
    saving = copies(kind, layout, pages)
    saving.save(arena, selected)
    assert memory == expected
    assert all(
        torch.equal(*pair) for group in zip(pages, before, strict=True) for pair in zip(*group, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_load_fills_only_the_given_blocks(kind: str, layout: ChunkLayout, arena: ArenaMap) -> None:
    pages, selected = engine(layout, 1), chunks(layout, 2)
    expected = [[layer.clone() for layer in group] for group in pages]
    memory = arena.view(0, arena.capacity)
    memory[:] = random.Random(3).randbytes(arena.capacity)
    before = bytes(memory)
    for chunk in selected:
        for group, layer, block, at, length in expected_pages(layout, chunk):
            expected[group][layer][block] = torch.frombuffer(
                bytearray(memory[at : at + length]), dtype=torch.uint8
            )
    loading = copies(kind, layout, pages)
    loading.load(arena, selected)
    assert all(
        torch.equal(*pair) for group in zip(pages, expected, strict=True) for pair in zip(*group, strict=True)
    )
    assert memory == before


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_no_chunks_is_a_no_op(kind: str, arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = engine(layout, 1)
    copying = copies(kind, layout, pages)
    assert copying.done(copying.load(arena, []))
    assert copying.done(copying.save(arena, [ChunkCopy(0, 0, 64, ([NULL] * 4,))]))
    copying.close()


@needs_native
@pytest.mark.parametrize(
    "bad",
    [
        ChunkCopy(0, 4096, 64, ([1, 2, 3, BLOCKS],)),
        ChunkCopy(0, 4096, 64, ([1, 2, 3, -1],)),
        ChunkCopy(0, (4 << 20) - 4096, 64, ([1, 2, 3, 4],)),
        ChunkCopy(0, 5 << 20, 64, ([1, 2, 3, 4],)),
        ChunkCopy(0, 4096, 64, ([1, 2, 3, 4], [1])),
    ],
    ids=[
        "block too large",
        "negative block",
        "past the end of the arena",
        "offset beyond the arena",
        "too many groups",
    ],
)
def test_invalid_chunk_fails_the_whole_batch(bad: ChunkCopy, arena: ArenaMap) -> None:
    layout = LAYOUTS["one group"]
    pages = engine(layout, 1)
    before = [layer.clone() for layer in pages[0]]
    memory = arena.view(0, arena.capacity)
    memory[:] = b"\xee" * arena.capacity
    both = [ChunkCopy(0, 8192, 64, ([5, 6, 7, 8],)), bad]
    with pytest.raises(IndexError):
        NativeCopies(layout, 0, pages).load(arena, both)
    with pytest.raises(IndexError):
        NativeCopies(layout, 0, pages).save(arena, both)
    assert all(torch.equal(*pair) for pair in zip(pages[0], before, strict=True))
    assert bytes(memory) == b"\xee" * arena.capacity


@needs_native
def test_host_memory_is_copied_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["one group"]
    pages = engine(layout, 1)
    assert isinstance(page_copies(layout, 0, pages), NativeCopies)
    monkeypatch.setattr(native, "available", lambda: False)
    assert isinstance(page_copies(layout, 0, pages), TorchCopies)
    on_device = [[layer.to("meta") for layer in group] for group in pages]
    monkeypatch.undo()
    assert isinstance(page_copies(layout, 0, on_device), TorchCopies)


@needs_native
@pytest.mark.parametrize("length", [0, 1, 4095, 5_000_001])
def test_buffers_are_copied(length: int) -> None:
    first, second = os.urandom(length), bytearray(os.urandom(1000))
    targets = memoryview(bytearray(length)), memoryview(bytearray(1000))
    native.core.copy_buffers([(targets[0], first), (targets[1], memoryview(second))])
    assert targets[0] == first
    assert targets[1] == second


@needs_native
def test_buffers_must_match_in_length_and_be_writable() -> None:
    target = memoryview(bytearray(10))
    with pytest.raises(ValueError, match="length"):
        native.core.copy_buffers([(target, bytes(10)), (target, bytes(11))])
    with pytest.raises(TypeError):
        native.core.copy_buffers([(memoryview(bytes(10)), bytes(10))])


@needs_native
@pytest.mark.parametrize("length", [241, 1024, 1025, 4096, 100_003])
def test_checksums_match_the_xxhash_package(length: int) -> None:
    data = os.urandom(length + 1)
    assert native.core.xxh3_128(data[:length]) == xxh3_128_digest(data[:length])
    assert native.core.xxh3_128(memoryview(bytearray(data))[1:]) == xxh3_128_digest(data[1:])


@needs_native
def test_checksum_of_short_data_is_rejected() -> None:
    with pytest.raises(ValueError, match="short"):
        native.core.xxh3_128(bytes(240))


SATURATED = """
import os, subprocess, sys, time
from kvtier import native

def runnable():
    return int(open("/proc/loadavg").read().split("/")[0].split()[-1])

spinning = [
    subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4 * os.cpu_count())
]
try:
    while runnable() <= os.cpu_count() + 1:
        time.sleep(0.01)
    before = len(os.listdir("/proc/self/task"))
    source = os.urandom(16 << 20)
    target = bytearray(len(source))
    native.core.copy_buffers([(memoryview(target), source)], 4)
    assert target == source
    print(len(os.listdir("/proc/self/task")) - before)
finally:
    for process in spinning:
        process.kill()
        process.wait()
"""


@needs_native
def test_copy_on_saturated_cpus_starts_no_helper_threads() -> None:
    result = subprocess.run([sys.executable, "-c", SATURATED], capture_output=True, text=True, check=True)
    assert int(result.stdout) == 0


@needs_native
def test_concurrent_copies_do_not_interfere(arena: ArenaMap) -> None:
    """Each caller has its own memory; the helper threads are shared."""
    sources = [os.urandom(3 << 20) for _ in range(4)]
    targets = [memoryview(bytearray(len(source))) for source in sources]

    def copy(index: int) -> None:
        for _ in range(10):
            native.core.copy_buffers([(targets[index], sources[index])], 4)

    threads = [threading.Thread(target=copy, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(target) for target in targets] == sources
