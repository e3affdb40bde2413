"""The disk backend beside raw O_DIRECT I/O of the same bytes, from as many threads, in the same run.

::

    python -m benchmarks.disk                     # in the current folder: needs 3 GiB there and of memory
    python -m benchmarks.disk --folder /mnt/ssd --small

Raw: each thread opens a file, transfers the whole of it in one call and closes it. ``disk`` is the backend,
``sealed`` the backend with header and checksum around it, as a cache runs it. Each write makes new files;
reads are cold, since nothing that goes past the page cache is in it. With ``--buffered`` the backend goes
through the page cache, which is emptied of these files before each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from benchmarks.common import MIB, filled, ratio, show, speed, take_turns
from kvtier.backends.base import Backend, Outcome
from kvtier.backends.disk import DiskBackend, DiskSettings, walk
from kvtier.backends.sealed import SealedBackend
from kvtier.bench.raw_files import in_threads, read_file, write_file
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import KEY_BYTES, ChunkKey

Chunks = Sequence[tuple[ChunkKey, memoryview]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The disk backend beside raw O_DIRECT I/O.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: here")
    parser.add_argument("--buffered", action="store_true", help="the backend without O_DIRECT")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    sizes, count, depths = ([4 * MIB, 32 * MIB], 32, [1, 2, 4, 8])
    if given.small:
        sizes, count, depths = ([MIB], 4, [1, 2])
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="kvtier-bench-") as folder:
        for size in sizes:
            memory = filled(size * count)
            for depth in depths:
                rows += anyio.run(measure, Path(folder), memory, size, depth, given.runs, not given.buffered)
    kind = "buffered" if given.buffered else "O_DIRECT"
    columns = ("", "depth", "raw GB/s", "disk GB/s", "disk : raw", "sealed GB/s", "sealed : raw")
    show(f"disk backend ({kind}) and raw O_DIRECT", columns, rows)


async def measure(
    folder: Path, memory: memoryview, size: int, depth: int, runs: int, direct: bool
) -> list[tuple[object, ...]]:
    """One row for writing and one for reading."""
    chunks = chunk_objects(memory, size)
    raw = folder / "raw"
    raw.mkdir()
    settings = DiskSettings(
        name="ssd", type="disk", capacity=1 << 40, path=folder / "ssd", direct=direct, concurrency=depth
    )
    backend = DiskBackend(settings)
    sealed = SealedBackend(backend)
    await backend.open()

    async def raw_write() -> None:
        in_threads(depth, chunks, lambda item: write_file(raw / item[0].hex(), item[1]))

    async def raw_read() -> None:
        in_threads(depth, chunks, lambda item: read_file(raw / item[0].hex(), item[1]))

    def remove() -> None:
        for path in [*raw.iterdir(), *walk(settings.path)]:
            path.unlink()

    contestants = {
        "raw": raw_write,
        "disk": lambda: put(backend, chunks),
        "sealed": lambda: put(sealed, chunks),
    }
    written = await take_turns(contestants, runs, remove)
    # The last to write were the sealed ones; the raw files are gone with the others.
    await raw_write()
    contestants = {
        "raw": raw_read,
        "disk": lambda: get(backend, chunks),
        "sealed": lambda: get(sealed, chunks),
    }
    read = await take_turns(contestants, runs, lambda: forget(settings.path))
    await backend.close()
    shutil.rmtree(raw)
    shutil.rmtree(settings.path)
    return [
        row(f"{name} {len(chunks)} x {size // MIB} MiB", depth, len(memory), seconds)
        for name, seconds in (("write", written), ("cold read", read))
    ]


def row(name: str, depth: int, length: int, seconds: dict[str, list[float]]) -> tuple[object, ...]:
    raw = seconds["raw"]
    cells: list[object] = [name, depth, speed(length, raw)]
    for contestant in ("disk", "sealed"):
        cells += [speed(length, seconds[contestant]), ratio(seconds[contestant], raw)]
    return tuple(cells)


def chunk_objects(memory: memoryview, size: int) -> Chunks:
    """Sealed chunk objects of one size each, one after another in memory."""
    chunks = []
    for index in range(len(memory) // size):
        key = ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2))
        view = memory[index * size : (index + 1) * size]
        ChunkHeader(key, key, bytes(32), size - HEADER_BYTES).seal(view)
        chunks.append((key, view))
    return chunks


async def put(backend: Backend, chunks: Chunks) -> None:
    expect_ok(await backend.put(chunks))


async def get(backend: Backend, chunks: Chunks) -> None:
    expect_ok(await backend.get(chunks))


def expect_ok(outcomes: Sequence[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise SystemExit(f"the disk did not do it: {outcomes}")


def forget(folder: Path) -> None:
    """Take files out of the page cache, where they are in it."""
    for path in walk(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
