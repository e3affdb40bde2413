"""Measure a load from disk while the write queue of the same tier is full.

::

    python -m benchmarks.priorities
    python -m benchmarks.priorities --folder /mnt/nvme --chunk 32 --rounds 20

A prompt that only the disk holds is loaded twice per round: alone, and after other chunks have filled the
queue. The load is complete when all of its chunks are in memory. The writes are measured alone, and together
with the load. Both use O_DIRECT, so no page cache is involved.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel

from benchmarks.common import MIB, parse, show
from kvtier import Settings, TieredCache
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.pipeline.query import Query
from kvtier.plugins import Plugins

NAMESPACE = bytes(32)
DRAIN_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a load beside a full write queue.")
    parser.add_argument("--folder", type=Path, help="of the disk tier; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--chunk", type=int, default=2, help="MiB per chunk, default: %(default)s")
    parser.add_argument("--load", type=int, default=64, help="MiB to load, default: %(default)s")
    parser.add_argument("--queue", type=int, default=256, help="MiB of the write queue, default: %(default)s")
    options = parse(parser, rounds=1, load=4, queue=8)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        anyio.run(run, Path(folder), options)


async def run(folder: Path, options: argparse.Namespace) -> None:
    memory, queue = 4 * options.queue + options.load, options.queue
    disk = {"name": "ssd", "type": "disk", "path": str(folder), "capacity": f"{8 * memory}MiB"}
    settings = Settings(
        tiers=[
            {"name": "ram", "type": "cpu", "capacity": f"{memory}MiB"},
            {**disk, "queue": f"{queue + options.chunk}MiB"},
        ]
    )
    async with TieredCache.open(settings, plugins=Plugins.load([])) as cache:
        load = prompt(0, options.load // options.chunk)
        store(cache, load, options.chunk)
        await cache.drain(DRAIN_SECONDS)
        rounds = []
        for number in range(options.rounds + 1):
            written = prompt(number + 1, options.queue // options.chunk)
            rounds.append(await measure(cache, load, written, options.chunk))
    columns = [sorted(column) for column in zip(*rounds[1:], strict=True)]  # The first one warms up.
    names = (
        f"load {options.load} MiB, alone",
        f"load {options.load} MiB, beside a full write queue",
        f"write {options.queue} MiB, alone",
        f"write {options.queue} MiB, beside the load",
    )
    show(
        f"chunks of {options.chunk} MiB, {options.rounds} rounds",
        ("ms", "median", "lowest", "highest"),
        [
            (name, statistics.median(column), column[0], column[-1])
            for name, column in zip(names, columns, strict=True)
        ],
    )


async def measure(
    cache: TieredCache, load: Sequence[ChunkKey], written: Sequence[ChunkKey], chunk: int
) -> tuple[float, float, float, float]:
    """Return the milliseconds of a load and of writes, each alone and beside the other."""
    alone = await fetch(cache, load)
    store(cache, written, chunk)
    writes_alone = await drain(cache)
    await cache.clear(written)
    async with anyio.create_task_group() as tasks:
        together: list[float] = []

        async def write() -> None:
            together.append(await drain(cache))

        store(cache, written, chunk)
        tasks.start_soon(write)
        await anyio.lowlevel.checkpoint()  # The writes begin first.
        beside = await fetch(cache, load)
    await cache.clear(written)
    return alone, beside, writes_alone, together[0]


async def fetch(cache: TieredCache, keys: Sequence[ChunkKey]) -> float:
    """Load chunks that only the disk holds, and return the milliseconds."""
    await cache.clear(keys, tiers=["ram"])
    started = time.perf_counter()
    found = cache.look_up(Query(keys))
    await found.settle(None)
    elapsed = time.perf_counter() - started
    assert found.ready == len(keys), "chunks were lost"
    found.release()
    return elapsed * 1e3


async def drain(cache: TieredCache) -> float:
    """Wait until everything is written, and return the milliseconds."""
    started = time.perf_counter()
    while cache.pending_bytes:  # noqa: ASYNC110 - there is no event for it
        await anyio.sleep(0.001)
    return (time.perf_counter() - started) * 1e3


def prompt(seed: int, chunks: int) -> list[ChunkKey]:
    """Return the keys of a prompt that shares no chunk with others."""
    return chunk_keys(root_key(NAMESPACE), list(range(seed << 20, (seed << 20) + chunks)), 1)


def store(cache: TieredCache, keys: Sequence[ChunkKey], chunk: int) -> None:
    """Store chunks without filling their memory."""
    parents = [root_key(NAMESPACE), *keys[:-1]]
    size = chunk * MIB - 4096
    headers = [ChunkHeader(key, parent, NAMESPACE, size) for key, parent in zip(keys, parents, strict=True)]
    reserved = cache.reserve_all(headers)
    filled = [reservation for reservation in reserved if reservation is not None]
    assert len(filled) == len(keys), "memory is full"
    cache.commit(filled)


if __name__ == "__main__":
    main()
