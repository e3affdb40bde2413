"""Compare the disk backend, with io_uring and with threads, with raw O_DIRECT I/O of the same bytes.

::

    python -m benchmarks.disk                     # needs 5 GiB in the current folder, 2 GiB of memory
    python -m benchmarks.disk --folder /mnt/ssd --small

All sides move bytes between files and one arena, in the same run. ``raw``: as many threads as the depth; each
opens a file, reads or writes it in one call, and closes it. ``uring`` and ``threads``: the backend with that
setting of ``io``. ``aiofiles``: like ``threads``, but each object is a call through aiofiles. ``sealed``: the
backend with header, checksum and ``io: auto``, as in a cache. Each write creates new files. Reads are cold,
because O_DIRECT leaves nothing in the page cache. With ``--buffered``, the backend uses the page cache, and
these files are dropped from it before each run.

``CPU`` is the CPU time of the whole process per GB, in seconds. ``loop`` is the longest time that the event
loop's thread computed without a pause while the backend was working, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import aiofiles.os
import anyio

from benchmarks.common import MIB, filled, parse, ratio, show, speed
from kvtier.backends.base import Backend, Outcome
from kvtier.backends.disk.backend import DiskBackend, DiskSettings, walk
from kvtier.lab.bench.limits import RawFiles
from kvtier.lab.bench.rows import rotated
from kvtier.lab.bench.sides import object_length, unseal
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.tiers.batches import in_batches
from kvtier.tiers.seal import Seal
from kvtier.units import format_size

KIB = 1 << 10
TIMER_SECONDS = 0.001
SIDES: dict[str, Literal["auto", "uring", "threads"]] = {
    "uring": "uring",
    "threads": "threads",
    "aiofiles": "threads",
    "sealed": "auto",
}

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

Chunks = Sequence[tuple[ChunkKey, memoryview]]


class Run(NamedTuple):
    """Duration of one turn of one side."""

    seconds: float
    cpu_seconds: float
    loop_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the disk backend with raw O_DIRECT I/O.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: current folder")
    parser.add_argument("--buffered", action="store_true", help="run the backend without O_DIRECT")
    parser.add_argument("--runs", type=int, default=7, help="default: %(default)s")
    options = parse(parser, runs=1)
    loads, depths = [(64 * KIB, 512), (4 * MIB, 32), (32 * MIB, 32)], [1, 4, 16]
    if options.small:
        loads, depths = [(64 * KIB, 8), (MIB, 4)], [1, 2]
    measured: list[tuple[str, int, int, dict[str, list[Run]]]] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder:
        for size, count in loads:
            arena = filled_arena(size * count)
            chunks = chunk_objects(arena.view(0, size * count), size)
            for depth in depths:
                bench = Bench(Path(folder), arena, chunks, depth, direct=not options.buffered)
                for name, runs in anyio.run(bench.measure, options.runs).items():
                    measured.append((f"{name} {count} x {format_size(size)}", depth, size * count, runs))
    kind = "buffered" if options.buffered else "O_DIRECT"
    columns = ("", "depth", "raw GB/s", *(f"{side} : raw" for side in SIDES))
    show(f"disk backend ({kind}) and raw O_DIRECT", columns, [speeds(*row) for row in measured])
    columns = ("", "depth", "raw CPU", *(f"{side} {what}" for side in SIDES for what in ("CPU", "loop")))
    show(
        "CPU seconds per GB, and the longest time the loop was blocked, ms",
        columns,
        [costs(*row) for row in measured],
    )


def speeds(name: str, depth: int, length: int, runs: dict[str, list[Run]]) -> tuple[object, ...]:
    seconds = {side: [run.seconds for run in of_side] for side, of_side in runs.items()}
    return (
        name,
        depth,
        speed(length, seconds["raw"]),
        *(ratio(seconds[side], seconds["raw"]) for side in SIDES),
    )


def costs(name: str, depth: int, length: int, runs: dict[str, list[Run]]) -> tuple[object, ...]:
    cells: list[object] = [name, depth]
    for side in ("raw", *SIDES):
        cells.append(statistics.median(run.cpu_seconds for run in runs[side]) / length * 1e9)
        if side != "raw":
            cells.append(max(run.loop_seconds for run in runs[side]) * 1e3)
    return tuple(cells)


class Bench:
    """Moves the same chunks through every side, interleaved."""

    def __init__(self, folder: Path, arena: Arena, chunks: Chunks, depth: int, *, direct: bool) -> None:
        self._raw = folder / "raw"
        self._raw_files = RawFiles(self._raw, depth)
        self._folders = {side: folder / side for side in SIDES}
        self._arena = arena
        self._chunks = chunks
        self._depth = depth
        self._direct = direct

    async def measure(self, runs: int) -> dict[str, dict[str, list[Run]]]:
        """Return every run of every side, for writes and reads."""
        self._raw.mkdir(exist_ok=True)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._raw_files.close)
            backends: dict[str, Backend | Seal] = {}
            for side, path in self._folders.items():
                backend = self._backend(side, path)
                await backend.open()
                stack.push_async_callback(backend.close)
                await backend.register(self._arena)
                backends[side] = Seal(backend) if side == "sealed" else backend
            writes: dict[str, Callable[[], Awaitable[None]]] = {
                "raw": self._raw_write,
                **{side: partial(put, backends[side], self._chunks) for side in SIDES},
            }
            reads: dict[str, Callable[[], Awaitable[None]]] = {
                "raw": self._raw_read,
                **{side: partial(get, backends[side], self._chunks) for side in SIDES},
            }
            try:
                return {
                    "write": await interleave_runs(writes, runs, lambda side: self._remove([side])),
                    "cold read": await interleave_runs(reads, runs, lambda _: self._drop_cache()),
                }
            finally:
                self._remove(list(writes))

    def _backend(self, side: str, path: Path) -> DiskBackend:
        settings = DiskSettings(
            name="ssd",
            type="disk",
            capacity=1 << 40,
            path=path,
            direct=self._direct,
            concurrency=self._depth,
            io=SIDES[side],
        )
        return AiofilesBackend(settings) if side == "aiofiles" else DiskBackend(settings)

    async def _raw_write(self) -> None:
        await self._raw_files.put(self._chunks)

    async def _raw_read(self) -> None:
        await self._raw_files.get(self._chunks)

    def _remove(self, sides: Sequence[str]) -> None:
        for side in sides:
            for path in self._raw.iterdir() if side == "raw" else walk(self._folders[side]):
                path.unlink()

    def _drop_cache(self) -> None:
        """Drop the backends' files from the page cache."""
        for path in (path for folder in self._folders.values() for path in walk(folder)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class AiofilesBackend(DiskBackend):
    """The backend with one call through aiofiles per object, the fewest that it allows. Not cancellable."""

    async def open(self) -> None:
        await super().open()
        self._pool = ThreadPoolExecutor(self._settings.concurrency)

    async def close(self) -> None:
        await super().close()
        self._pool.shutdown()

    async def _spread(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], items_per_thread: int = 1
    ) -> list[ResultT]:
        call = partial(aiofiles.os.wrap(work), executor=self._pool)
        results: dict[int, ResultT] = {}
        queue = iter(enumerate(items))

        async def take() -> None:
            for index, item in queue:
                results[index] = await call(item)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._settings.concurrency, len(items))):
                tasks.start_soon(take)
        return [results[index] for index in range(len(items))]


async def interleave_runs(
    sides: dict[str, Callable[[], Awaitable[None]]], runs: int, before_each: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Return every run of every side, without a first warm-up run. Each turn starts with another side."""
    measured: dict[str, list[Run]] = {name: [] for name in sides}
    for turn in range(-1, runs):
        for name in rotated(list(sides), turn):
            before_each(name)
            run = await timed(sides[name])
            if turn >= 0:
                measured[name].append(run)
    return measured


async def timed(side: Callable[[], Awaitable[None]]) -> Run:
    """Time one run. A timer on the loop measures how long its thread computed between two ticks."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, time.thread_time()
    timer: asyncio.Handle

    def tick() -> None:
        nonlocal longest, last, timer
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        timer = loop.call_later(TIMER_SECONDS, tick)

    timer = loop.call_soon(tick)
    started, cpu = time.perf_counter(), time.process_time()
    await side()
    run = Run(
        time.perf_counter() - started, time.process_time() - cpu, max(longest, time.thread_time() - last)
    )
    timer.cancel()
    return run


def filled_arena(length: int) -> Arena:
    """Return a filled arena, with the same page sizes as in a cache."""
    arena = Arena.create(length)
    lease = arena.allocate(length)
    assert lease is not None
    lease.view[:] = filled(length)
    arena.settle()
    return arena


def chunk_objects(memory: memoryview, size: int) -> Chunks:
    """Return sealed chunk objects of ``size`` bytes each, consecutive in memory."""
    chunks = []
    for index in range(len(memory) // size):
        key = ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2))
        view = memory[index * size : (index + 1) * size]
        ChunkHeader(key, key, bytes(32), size - HEADER_BYTES).seal(view)
        chunks.append((key, view))
    return chunks


async def put(backend: Backend | Seal, chunks: Chunks) -> None:
    unseal(chunks)
    if isinstance(backend, Seal):
        expect_ok(await in_batches(backend.put, chunks, object_length))
    else:
        expect_ok(await backend.put(chunks))


async def get(backend: Backend | Seal, chunks: Chunks) -> None:
    if isinstance(backend, Seal):
        expect_ok(await in_batches(backend.get, chunks, object_length))
    else:
        expect_ok(await backend.get(chunks))


def expect_ok(outcomes: Sequence[Outcome]) -> None:
    if not set(outcomes) <= {Outcome.OK, Outcome.VERIFIED}:
        raise SystemExit(f"the disk failed: {outcomes}")


if __name__ == "__main__":
    main()
