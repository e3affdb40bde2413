"""Compare copies between a GPU and the arena with one large pinned copy, and measure what they cost engines.

::

    make bench-gpu                       # needs a GPU, torch for it, and 6 GiB of memory on both sides
    python -m benchmarks.gpu --small     # smoke test with some megabytes

Host to device is a load, device to host a save. The limit is one ``cudaMemcpyAsync`` of as many bytes
between pinned memory and the device, in the same run. Blocks are in random order. ``best`` is what the
connector uses, ``direct`` what it uses if the device has no memory for the bounce buffers. A second table
shows how much longer repeated matrix products on the engine's stream take while pages are copied. A third one
shows how much longer steps of the engine take in which saves begin: if it waits for none, as with the
connector unless a step may change blocks that are being saved, and if each step waits for the save before.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.common import parse, show
from kvtier import native
from kvtier.memory.arena import Arena, ArenaMap
from kvtier.memory.header import HEADER_BYTES, object_bytes
from kvtier.memory.layout import ChunkLayout, GroupLayout

CHUNK_TOKENS = 256
NULL = 0
KIB, GIB = 1 << 10, 1 << 30
METHODS = ("BEST", "DIRECT")

PAGES = {
    f"pages of {size // KIB} KiB": GroupLayout(16, (size,) * 8)
    for size in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
}
MODELS = {
    "Llama 3.1 8B, bf16": GroupLayout(16, (2 * 8 * 128 * 2 * 16,) * 32),
    "70B, TP=4, bf16": GroupLayout(16, (2 * 2 * 128 * 2 * 16,) * 80),
    "MLA, bf16": GroupLayout(64, (576 * 2 * 64,) * 61),
}


@dataclass
class Work:
    """Chunks in a pinned arena, and pages for them on the device."""

    arena: native.cuda.PinnedMemory
    pages: native.cuda.DevicePages
    chunks: list[tuple[int, Sequence[Sequence[int]]]]
    length: int
    host: torch.Tensor
    device: torch.Tensor
    layers: list[torch.Tensor]

    def begin(self, direction: str, method: str) -> int:
        call = self.pages.load if direction == "load" else self.pages.save
        stream = torch.cuda.current_stream().cuda_stream
        return call(self.arena, self.chunks, stream, method=native.cuda.CopyMethod[method])

    def large(self, direction: str) -> None:
        """Start one copy of as many bytes: the limit."""
        target, source = (self.device, self.host) if direction == "load" else (self.host, self.device)
        target.copy_(source, non_blocking=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies between a GPU and the arena.")
    parser.add_argument("--runs", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a batch; default: %(default)s")
    options = parse(parser)
    if problem := native.cuda_problem():
        raise SystemExit(f"nothing to measure: {problem}")
    print(torch.cuda.get_device_name(), torch.version.cuda, native.summary(), sep="\n")
    length = 16 << 20 if options.small else int(options.gib * GIB)
    with MappedArena(length + (64 << 20)) as arena:
        rows, slowdowns, stepped = [], [], []
        for name, group in (PAGES | MODELS).items():
            work = prepare(group, arena, length)
            rows += [speeds(name, group, work, direction, options.runs) for direction in ("load", "save")]
            if name in MODELS:
                slowdowns += [slowdown(name, work, direction, options.runs) for direction in ("load", "save")]
                stepped.append(steps_with_saves(name, work, options.runs))
            del work
    columns = ("", "page KiB", "limit GB/s", *(method.lower() for method in METHODS), "begin us")
    show("copies: speed relative to one large pinned copy", columns, rows)
    columns = ("", "product alone ms", *(method.lower() for method in METHODS))
    show("slowdown of a matrix product while pages are copied", columns, slowdowns)
    columns = ("", "step alone ms", "saves beside", "saves waited for")
    show("slowdown of the engine's steps, each of which begins a save", columns, stepped)


class MappedArena:
    """An arena, in 2 MiB pages if available, mapped and registered as by the connector."""

    def __init__(self, capacity: int) -> None:
        self._arena = Arena.create(capacity, huge=True)
        self._mapped = ArenaMap(os.dup(self._arena.fd), self._arena.capacity)
        self.view = self._mapped.view(0, self._mapped.capacity)

    def __enter__(self) -> MappedArena:
        self.pinned = native.cuda.PinnedMemory(self.view)
        return self

    def __exit__(self, *_: object) -> None:
        del self.pinned
        self.view.release()
        self._mapped.close()
        self._arena.close()


def prepare(group: GroupLayout, arena: MappedArena, max_bytes: int) -> Work:
    layout = ChunkLayout(CHUNK_TOKENS, (group,))
    chunk_bytes = object_bytes(layout.payload_bytes(CHUNK_TOKENS))
    count = max(1, min(len(arena.view), max_bytes) // chunk_bytes)
    per_chunk = len(group.blocks(CHUNK_TOKENS))
    num_blocks = count * per_chunk + 1
    layers = [
        torch.ones(num_blocks, page_bytes, dtype=torch.uint8, device="cuda")
        for page_bytes in group.page_bytes
    ]
    order = random.Random(1).sample(range(1, num_blocks), num_blocks - 1)
    chunks: list[tuple[int, Sequence[Sequence[int]]]] = [
        (index * chunk_bytes + HEADER_BYTES, [order[index * per_chunk : (index + 1) * per_chunk]])
        for index in range(count)
    ]
    regions = [[(layer.data_ptr(), layer.shape[1], layer.shape[0], layer.stride(0)) for layer in layers]]
    length = count * layout.payload_bytes(CHUNK_TOKENS)
    return Work(
        arena.pinned,
        native.cuda.DevicePages(torch.cuda.current_device(), regions, NULL),
        chunks,
        length,
        torch.ones(length, dtype=torch.uint8, pin_memory=True),
        torch.ones(length, dtype=torch.uint8, device="cuda"),
        layers,
    )


def timed_on_stream(work: Callable[[], object]) -> float:
    """Return the seconds on the engine's stream, which waits for the copies that ``work`` starts."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started.record()
    work()
    ended.record()
    ended.synchronize()
    seconds: float = started.elapsed_time(ended) / 1e3
    return seconds


def timed_copy(work: Callable[[], int], pages: native.cuda.DevicePages) -> tuple[float, float]:
    """Return the seconds from the call until the copy is complete, and until the call returned."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    ticket = work()
    returned = time.perf_counter()
    pages.wait(ticket)
    return time.perf_counter() - started, returned - started


def speeds(name: str, group: GroupLayout, work: Work, direction: str, runs: int) -> tuple[object, ...]:
    limits: list[float] = []
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    begin_us: list[float] = []
    for turn in range(-1, runs):
        limit = timed_on_stream(lambda: work.large(direction))
        for method in METHODS:
            took, begin = timed_copy(partial(work.begin, direction, method), work.pages)
            if turn >= 0:
                ratios[method].append(limit / took)
                if method == "BEST":
                    begin_us.append(begin * 1e6)
        if turn >= 0:
            limits.append(limit)
    return (
        f"{name}, {'host to device' if direction == 'load' else 'device to host'}",
        group.page_bytes[0] // KIB,
        work.length / statistics.median(limits) / 1e9,
        *(statistics.median(ratios[method]) for method in METHODS),
        statistics.median(begin_us),
    )


def slowdown(name: str, work: Work, direction: str, runs: int) -> tuple[object, ...]:
    """Time matrix products on the engine's stream, alone and with copies that wait for another stream."""
    size = 8192 if work.length >= GIB // 2 else 1024
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    copy_stream = torch.cuda.Stream()

    def products() -> None:
        for _ in range(20):
            torch.matmul(matrix, matrix, out=out)

    products_ms: list[float] = []
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(-1, runs):
        alone = timed_on_stream(products)
        for method in METHODS:
            tickets: list[int] = []

            def with_copies(method: str = method, tickets: list[int] = tickets) -> None:
                with torch.cuda.stream(copy_stream):
                    tickets += [work.begin(direction, method) for _ in range(4)]
                products()

            took = timed_on_stream(with_copies)
            for ticket in tickets:
                work.pages.wait(ticket)
            if turn >= 0:
                ratios[method].append(took / alone)
        if turn >= 0:
            products_ms.append(alone * 1e3 / 20)
    return (
        f"{name}, {'host to device' if direction == 'load' else 'device to host'}",
        statistics.median(products_ms),
        *(statistics.median(ratios[method]) for method in METHODS),
    )


def steps_with_saves(name: str, work: Work, runs: int) -> tuple[object, ...]:
    """Time steps on the engine's stream, without saves, with saves, and with waits for these."""
    size = 8192 if work.length >= GIB // 2 else 1024
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    stream = torch.cuda.current_stream().cuda_stream
    steps = 8
    part = max(1, len(work.chunks) // steps)
    tickets: list[int] = []

    def run_steps(saves: bool, waits: bool) -> None:
        for at in range(steps):
            for _ in range(4):
                torch.matmul(matrix, matrix, out=out)
            if saves:
                tickets.append(work.pages.save(work.arena, work.chunks[at * part : (at + 1) * part], stream))
            if waits:
                work.pages.hold(stream, tickets[-1])

    alone_ms: list[float] = []
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-1, runs):
        alone = timed_on_stream(partial(run_steps, False, False))
        for waits, found in ratios.items():
            took = timed_on_stream(partial(run_steps, True, waits))
            while tickets:
                work.pages.wait(tickets.pop())
            if turn >= 0:
                found.append(took / alone)
        if turn >= 0:
            alone_ms.append(alone * 1e3 / steps)
    return (name, statistics.median(alone_ms), *(statistics.median(found) for found in ratios.values()))


if __name__ == "__main__":
    main()
