"""Limit of a disk: whole files with O_DIRECT, one system call each."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.lab.bench.errors import BenchFailed
from kvtier.lab.bench.sides import Chunk, Side
from kvtier.memory.keys import ChunkKey


class RawFiles(Side):
    """One file per chunk in an existing folder, written and read with O_DIRECT by ``threads`` threads."""

    title = "raw O_DIRECT"

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = threads

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        return self._timed(chunks, lambda chunk: write_file(self._path(chunk[0]), chunk[1]))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        return self._timed(chunks, lambda chunk: read_file(self._path(chunk[0]), chunk[1]))

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _timed(self, chunks: Sequence[Chunk], work: Callable[[Chunk], object]) -> float:
        started = time.perf_counter()
        in_threads(self._threads, chunks, work)
        return time.perf_counter() - started

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / key.hex()


def in_threads(depth: int, chunks: Sequence[Chunk], work: Callable[[Chunk], object]) -> None:
    """Call ``work`` for each chunk, in at most ``depth`` threads. Blocks; raises the first error."""
    pending = deque(chunks)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while pending and not failed:
                work(pending.popleft())
        except IndexError:
            return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(min(depth, len(chunks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def write_file(path: Path, view: memoryview) -> None:
    """Write a view of aligned whole pages to a file. Raises ``OSError`` and :class:`BenchFailed`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        moved = os.pwrite(descriptor, view, 0)
    finally:
        os.close(descriptor)
    if moved != len(view):
        raise BenchFailed(f"short write of {moved} bytes: is the disk full?")


def read_file(path: Path, view: memoryview) -> None:
    """Read a file into a view. Raises ``OSError`` and :class:`BenchFailed`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        moved = os.preadv(descriptor, [view], 0)
    finally:
        os.close(descriptor)
    if moved != len(view):
        raise BenchFailed(f"short read of {moved} bytes")
