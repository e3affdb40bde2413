"""Find costs that grow faster than the work: the same calls with more held, more entries, more in flight.

::

    python -m benchmarks.growth                  # up to 100 GB held, sparse, and 10^7 entries: 4 GiB, minutes
    python -m benchmarks.growth --entries 6      # up to 10^6

*Held*: a memory tier and a disk folder that hold that many bytes in chunks of 32 MiB. All chunks but the
measured ones are sparse (memory that is leased but never touched, files without blocks), so that smaller
machines can run it. *Entries*: of the catalog. *In flight*: concurrent lookups of 128 chunks at a real cache
process, and concurrent reads of one chunk each from a disk.

Each row is the cost of one unit of work. ``growth`` is the ratio of the last column to the first one; rows
above :data:`MAX_GROWTH` are listed below the table.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio

from benchmarks import catalog as catalog_bench
from benchmarks.common import parse, show
from benchmarks.look_up import CHUNK_TOKENS, ROOT, cache_process, hello, store_all
from kvtier.backends.base import Backend, Outcome
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk.backend import DiskBackend, DiskSettings, object_path
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.lab.bench.sides import filled
from kvtier.memory.arena import Arena
from kvtier.memory.keys import KEY_BYTES, ChunkKey, chunk_keys
from kvtier.pipeline.query import Query
from kvtier.settings import LocalTierSettings
from kvtier.units import MIB

MAX_GROWTH = 2.0
"""CPU caches alone can make a cost grow by this factor."""
SIZE = 32 * MIB
HELD = {"1 GB": 10**9, "10 GB": 10**10, "100 GB": 10**11}
IN_FLIGHT = (1, 4, 16, 64)
RUNS = 9
LOOKUP_KEYS = 128
TIMEOUT_SECONDS = 60

Costs = dict[str, list[float]]
"""Microseconds per unit, one value for each column."""


class ChunkCosts(NamedTuple):
    """Seconds per chunk of one backend; ``look_up``: per key."""

    put: float
    get: float
    look_up: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Find costs that grow faster than the work.")
    parser.add_argument("--entries", type=int, default=7, help="exponent of 10; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the disk; default: current folder")
    options = parse(parser)
    held = dict(list(HELD.items())[: 2 if options.small else None])
    exponents = range(4, (5 if options.small else options.entries) + 1)
    concurrency = IN_FLIGHT[: 2 if options.small else None]
    tables = {
        "bytes held, sparse except for the measured chunks": (
            list(held),
            anyio.run(by_held, held, options.folder),
        ),
        "catalog entries": ([f"10^{exponent}" for exponent in exponents], by_entries(exponents)),
        "in flight": (
            [str(count) for count in concurrency],
            by_lookups(concurrency) | anyio.run(by_reads, concurrency, options.folder),
        ),
    }
    for title, (columns, costs) in tables.items():
        report(title, columns, costs)


def report(title: str, columns: Sequence[str], costs: Costs) -> None:
    growth = {name: values[-1] / values[0] for name, values in costs.items()}
    rows = [[name, *(f"{value:,.2f}" for value in values), growth[name]] for name, values in costs.items()]
    show(f"{title}: µs per unit", ["", *columns, "growth"], rows)
    for name, factor in growth.items():
        if factor > MAX_GROWTH:
            print(f"grows faster than the work: {name}, by a factor of {factor:.1f}")


async def by_held(held: dict[str, int], folder: Path) -> Costs:
    """Measure put, get and lookup in tiers that already hold that many bytes."""
    costs: Costs = {}
    view = filled(SIZE)
    for capacity in held.values():
        count = capacity // SIZE
        memory = CpuBackend(LocalTierSettings(name="ram", type="cpu", capacity=(count + 2) * SIZE))
        await memory.open()
        keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]
        reserved = memory.arena.allocate_all(SIZE, 2)
        memory.arena.settle()
        leave_sparse(memory.arena)
        for key in keys:
            lease = memory.arena.allocate(SIZE)
            assert lease is not None
            memory._held[key] = lease  # Without a copy.
        for lease in reserved:
            lease.release()
        add_costs(costs, "memory", await chunk_costs(memory, keys, view))
        await memory.close()
        with tempfile.TemporaryDirectory(dir=folder, prefix="kvtier-bench-") as name:
            settings = {"name": "ssd", "type": "disk", "path": name, "capacity": "1TiB"}
            disk = DiskBackend(DiskSettings.model_validate(settings))
            for key in keys:
                path = object_path(Path(name), key)
                path.parent.mkdir(exist_ok=True)
                path.touch()
                os.truncate(path, SIZE)
            await disk.open()
            add_costs(costs, "disk", await chunk_costs(disk, keys, view))
            started = time.perf_counter()
            indexed = sum([len(batch) async for batch in disk.scan()])
            costs.setdefault("disk: index a chunk at startup", []).append(
                (time.perf_counter() - started) / indexed * 1e6
            )
            await disk.close()
    return costs


def leave_sparse(arena: Arena) -> None:
    """Stop preparing memory ahead of its use: it is never used, and may exceed that of the machine."""
    if arena.large_pages is not None:
        arena.large_pages.close()


def add_costs(costs: Costs, tier: str, measured: ChunkCosts) -> None:
    costs.setdefault(f"{tier}: put a chunk", []).append(measured.put * 1e6)
    costs.setdefault(f"{tier}: get a chunk", []).append(measured.get * 1e6)
    costs.setdefault(f"{tier}: look up a key", []).append(measured.look_up * 1e6)


async def chunk_costs(backend: Backend, keys: Sequence[ChunkKey], view: memoryview) -> ChunkCosts:
    """Return the medians, for chunks that are not sparse."""
    puts, gets, lookups = [], [], []
    for _ in range(RUNS):
        key = ChunkKey(os.urandom(KEY_BYTES))
        started = time.perf_counter()
        stored = await backend.put([(key, view)])
        puts.append(time.perf_counter() - started)
        started = time.perf_counter()
        fetched = await backend.get([(key, view)])
        gets.append(time.perf_counter() - started)
        if [*stored, *fetched] != [Outcome.OK, Outcome.OK]:
            raise SystemExit(f"the tier failed: {stored} {fetched}")
        sampled = random.choices(keys, k=LOOKUP_KEYS)
        started = time.perf_counter()
        if not all(await backend.contains(sampled)):
            raise SystemExit("the tier lost a chunk")
        lookups.append((time.perf_counter() - started) / len(sampled))
        await backend.delete([key])
    return ChunkCosts(statistics.median(puts), statistics.median(gets), statistics.median(lookups))


def by_entries(exponents: Sequence[int]) -> Costs:
    """Measure the catalog, filled as by :mod:`benchmarks.catalog`, in CPU time."""
    costs: Costs = {}
    for exponent in exponents:
        prompts = 10**exponent // catalog_bench.PROMPT_CHUNKS
        catalog = Catalog([LruPolicy.factory(), LruPolicy.factory()])
        adding = array("f", bytes(4 * prompts * catalog_bench.PROMPT_CHUNKS))
        catalog_bench.fill(catalog, prompts, adding)
        picked = random.Random(0).choices(range(prompts), k=500)
        measured = {
            "add a chunk": (adding, 1),
            "prefix, per chunk": (
                catalog_bench.timed(catalog.prefix, map(catalog_bench.prompt_keys, picked)),
                catalog_bench.PROMPT_CHUNKS,
            ),
            "touch, per chunk": (
                catalog_bench.timed(catalog.touch, map(catalog_bench.prompt_keys, picked)),
                catalog_bench.PROMPT_CHUNKS,
            ),
            "replace the coldest, per chunk": (
                catalog_bench.timed(
                    partial(catalog_bench.replace_coldest, catalog), catalog_bench.newcomers(500)
                ),
                catalog_bench.BATCH,
            ),
        }
        for name, (seconds, units) in measured.items():
            costs.setdefault(name, []).append(statistics.median(seconds) / units * 1e6)
        del catalog
        gc.collect()
    return costs


def by_lookups(concurrency: Sequence[int]) -> Costs:
    """Measure concurrent lookups of a prompt of 128 chunks, on one connection to a real cache process."""
    costs: Costs = {"lookup of 32,768 tokens": []}
    with cache_process([]) as path, bridges(path) as (scheduler, worker):
        keys = chunk_keys(ROOT, list(range(LOOKUP_KEYS * CHUNK_TOKENS)), CHUNK_TOKENS)
        store_all(scheduler, worker, keys)
        for count in concurrency:
            seconds = [time_lookups(scheduler, keys, count) for _ in range(30)]
            costs["lookup of 32,768 tokens"].append(statistics.median(seconds) / count * 1e6)
    return costs


def start_lookup(scheduler: SchedulerBridge, keys: Sequence[ChunkKey]) -> int:
    """Start a lookup, as soon as the bridge accepts it."""
    while (ticket := scheduler.look_up(Query(keys, len(keys) * CHUNK_TOKENS))) is None:
        scheduler.poll()
    return ticket


def time_lookups(scheduler: SchedulerBridge, keys: Sequence[ChunkKey], count: int) -> float:
    started = time.perf_counter()
    for ticket in [start_lookup(scheduler, keys) for _ in range(count)]:
        lookup = scheduler.found(ticket, wait=TIMEOUT_SECONDS)
        if lookup is None or len(lookup.leases) != len(keys):
            raise SystemExit("a lookup did not find all chunks")
        scheduler.cancel(ticket)
    return time.perf_counter() - started


@contextmanager
def bridges(path: Path) -> Iterator[tuple[SchedulerBridge, WorkerBridge]]:
    scheduler, worker = SchedulerBridge(hello("scheduler"), path), WorkerBridge(hello("worker"), path)
    worker.connect()
    scheduler.connect()
    yield scheduler, worker
    scheduler.close()
    worker.close()


async def by_reads(concurrency: Sequence[int], folder: Path) -> Costs:
    """Measure concurrent reads of one 1 MiB chunk each from a disk."""
    costs: Costs = {"read a chunk of 1 MiB from disk": []}
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvtier-bench-") as name:
        settings = {"name": "ssd", "type": "disk", "path": name, "capacity": "1TiB"}
        disk = DiskBackend(DiskSettings.model_validate(settings))
        await disk.open()
        memory = filled(max(concurrency) * MIB)
        chunks = [
            (ChunkKey(os.urandom(KEY_BYTES)), memory[index * MIB : (index + 1) * MIB])
            for index in range(max(concurrency))
        ]
        await disk.put(chunks)
        for count in concurrency:
            seconds = []
            for _ in range(RUNS):
                started = time.perf_counter()
                async with anyio.create_task_group() as tasks:
                    for chunk in chunks[:count]:
                        tasks.start_soon(disk.get, [chunk])
                seconds.append((time.perf_counter() - started) / count)
            costs["read a chunk of 1 MiB from disk"].append(statistics.median(seconds) * 1e6)
        await disk.close()
    return costs


if __name__ == "__main__":
    main()
