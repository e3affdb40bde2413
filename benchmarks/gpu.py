"""Copies between a GPU and the arena beside one large pinned copy, and what they cost the engine.

::

    make bench-gpu                       # needs a GPU, torch for it, and 6 GiB of memory on both sides
    python -m benchmarks.gpu --small     # some megabytes, to see that it runs

Host to device is a load, device to host a save. The limit is one ``cudaMemcpyAsync`` of as many bytes between
pinned memory and the device, in the same run. Blocks are in random order. ``copy_engines`` are the GPU's,
``kernel`` is one launch; ``best`` is what the connector does. Under the table of speeds: how much longer a
matrix product takes, again and again on the engine's stream, while pages are copied all the time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import show
from kvtier import native
from kvtier.arena import Arena, ArenaMap
from kvtier.header import HEADER_BYTES, object_bytes
from kvtier.layout import ChunkLayout, GroupLayout

CHUNK_TOKENS = 256
NULL = 0
KIB, GIB = 1 << 10, 1 << 30
CARRIERS = ("BEST", "KERNEL", "COPY_ENGINES")

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
    """Chunks in a pinned arena and pages on the device for them."""

    arena: native.cuda.PinnedMemory
    pages: native.cuda.DevicePages
    chunks: list[tuple[int, list[list[int]]]]
    length: int
    host: torch.Tensor
    device: torch.Tensor
    keep: list[torch.Tensor]

    def begin(self, verb: str, carrier: str) -> int:
        call = self.pages.load if verb == "load" else self.pages.save
        stream = torch.cuda.current_stream().cuda_stream
        return call(self.arena, self.chunks, stream, carrier=native.cuda.Carrier[carrier])

    def large(self, verb: str) -> None:
        """The limit: one copy of as many bytes."""
        target, source = (self.device, self.host) if verb == "load" else (self.host, self.device)
        target.copy_(source, non_blocking=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Copies between a GPU and the arena.")
    parser.add_argument("--runs", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--gib", type=float, default=1.0, help="what a batch copies; default: %(default)s")
    parser.add_argument("--small", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    if problem := native.cuda_problem():
        raise SystemExit(f"nothing to measure: {problem}")
    print(torch.cuda.get_device_name(), torch.version.cuda, native.summary(), sep="\n")
    length = 16 << 20 if given.small else int(given.gib * GIB)
    with MappedArena(length + (64 << 20)) as arena:
        rows, slowed = [], []
        for name, group in (PAGES | MODELS).items():
            work = prepare(group, arena, length)
            rows += [speeds(name, group, work, verb, given.runs) for verb in ("load", "save")]
            if name in MODELS:
                slowed += [slow_down(name, work, verb, given.runs) for verb in ("load", "save")]
            del work
    columns = ("", "page KiB", "limit GB/s", *(carrier.lower() for carrier in CARRIERS), "begin us")
    show("copies as ratios to one large pinned copy", columns, rows)
    columns = ("", "product alone ms", *(carrier.lower() for carrier in CARRIERS))
    show("a matrix product while pages are copied: how many times as long it takes", columns, slowed)


class MappedArena:
    """An arena of 2 MiB pages where there are any, mapped and registered as the connector does it."""

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


def prepare(group: GroupLayout, arena: MappedArena, most: int) -> Work:
    layout = ChunkLayout(CHUNK_TOKENS, (group,))
    chunk_bytes = object_bytes(layout.payload_bytes(CHUNK_TOKENS))
    count = max(1, min(len(arena.view), most) // chunk_bytes)
    per_chunk = len(group.blocks(CHUNK_TOKENS))
    num_blocks = count * per_chunk + 1
    layers = [
        torch.ones(num_blocks, page_bytes, dtype=torch.uint8, device="cuda")
        for page_bytes in group.page_bytes
    ]
    order = random.Random(1).sample(range(1, num_blocks), num_blocks - 1)
    chunks = [
        (index * chunk_bytes + HEADER_BYTES, [order[index * per_chunk : (index + 1) * per_chunk]])
        for index in range(count)
    ]
    regions = [[(layer.data_ptr(), layer.shape[1], layer.shape[0]) for layer in layers]]
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


def timed(work: Callable[[], object]) -> float:
    """Seconds on the engine's stream, which waits for what is begun."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def wall(work: Callable[[], int], pages: native.cuda.DevicePages) -> tuple[float, float]:
    """Seconds from the call until the copy is done, and seconds until the call returned."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    ticket = work()
    returned = time.perf_counter()
    pages.wait(ticket)
    return time.perf_counter() - started, returned - started


def speeds(name: str, group: GroupLayout, work: Work, verb: str, runs: int) -> tuple[object, ...]:
    limits: list[float] = []
    ratios: dict[str, list[float]] = {carrier: [] for carrier in CARRIERS}
    begins: list[float] = []
    for turn in range(-1, runs):
        limit = timed(lambda: work.large(verb))
        for carrier in CARRIERS:
            took, begin = wall(lambda carrier=carrier: work.begin(verb, carrier), work.pages)
            if turn >= 0:
                ratios[carrier].append(limit / took)
                if carrier == "BEST":
                    begins.append(begin * 1e6)
        if turn >= 0:
            limits.append(limit)
    return (
        f"{name}, {'host to device' if verb == 'load' else 'device to host'}",
        group.page_bytes[0] // KIB,
        work.length / statistics.median(limits) / 1e9,
        *(statistics.median(ratios[carrier]) for carrier in CARRIERS),
        statistics.median(begins),
    )


def slow_down(name: str, work: Work, verb: str, runs: int) -> tuple[object, ...]:
    """The engine's stream does one product after the other; the copies wait for another stream."""
    size = 8192 if work.length >= GIB // 2 else 1024
    one = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(one)
    other = torch.cuda.Stream()

    def products() -> None:
        for _ in range(20):
            torch.matmul(one, one, out=out)

    alone: list[float] = []
    ratios: dict[str, list[float]] = {carrier: [] for carrier in CARRIERS}
    for turn in range(-1, runs):
        without = timed(products)
        for carrier in CARRIERS:
            tickets: list[int] = []

            def beside(carrier: str = carrier, tickets: list[int] = tickets) -> None:
                with torch.cuda.stream(other):
                    tickets += [work.begin(verb, carrier) for _ in range(4)]
                products()

            took = timed(beside)
            for ticket in tickets:
                work.pages.wait(ticket)
            if turn >= 0:
                ratios[carrier].append(took / without)
        if turn >= 0:
            alone.append(without * 1e3 / 20)
    return (
        f"{name}, {'host to device' if verb == 'load' else 'device to host'}",
        statistics.median(alone),
        *(statistics.median(ratios[carrier]) for carrier in CARRIERS),
    )


if __name__ == "__main__":
    main()
