"""What grows faster than its work: the same calls with more held, more entries, more requests in flight.

::

    python -m benchmarks.growth                  # up to 100 GB held, sparse, and 10^7 entries: 4 GiB, minutes
    python -m benchmarks.growth --entries 6      # up to 10^6

*Held*: a tier of memory and a folder of a disk that hold so many bytes in chunks of 32 MiB. All but the
measured chunks are sparse, so that it runs on machines that have not so much: memory that is leased and never
touched, files without blocks. *Entries*: of the catalog. *In flight*: look-ups of 128 chunks, asked for at
once of a real cache process, and reads of one chunk each from a disk.

Every row is the cost of one unit of work; ``growth`` is how many times the first column's the last one's is.
What has more than :data:`ALLOWED` is named below the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio

from benchmarks import catalog as full
from benchmarks.common import show
from benchmarks.look_up import CHUNK_TOKENS, ROOT, cache_process, hello, hold
from kvtier.arena import Arena
from kvtier.backends.base import Backend, Outcome
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk import DiskBackend, DiskSettings, object_path
from kvtier.bench.timing import filled
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.catalog import Catalog
from kvtier.eviction.lru import LruPolicy
from kvtier.keys import KEY_BYTES, ChunkKey, chunk_keys
from kvtier.settings import LocalTierSettings
from kvtier.units import MIB

ALLOWED = 2.0
"""Caches of the processor alone make a row grow by as much."""
SIZE = 32 * MIB
HELD = {"1 GB": 10**9, "10 GB": 10**10, "100 GB": 10**11}
IN_FLIGHT = (1, 4, 16, 64)
RUNS = 9
LOOK_UP_KEYS = 128
PATIENCE_SECONDS = 60

Costs = dict[str, list[float]]
"""Microseconds of one unit, a value for each column."""


class Held(NamedTuple):
    """What a backend that holds so much already takes for one chunk, in seconds."""

    put: float
    get: float
    look_up: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What grows faster than its work.")
    parser.add_argument("--entries", type=int, default=7, help="10 to the power of it; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the disk; default: here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="the smallest columns, to see that it runs")
    given = parser.parse_args(arguments)
    held = dict(list(HELD.items())[: 2 if given.quick else None])
    powers = range(4, (5 if given.quick else given.entries) + 1)
    flights = IN_FLIGHT[: 2 if given.quick else None]
    tables = {
        "held, all but the measured chunks sparse": (list(held), anyio.run(by_held, held, given.folder)),
        "entries of the catalog": ([f"10^{power}" for power in powers], by_entries(powers)),
        "in flight": (
            [str(count) for count in flights],
            by_look_ups(flights) | anyio.run(by_reads, flights, given.folder),
        ),
    }
    for title, (columns, costs) in tables.items():
        report(title, columns, costs)
    if given.json:
        given.json.write_text(json.dumps(tables, indent=2) + "\n")


def report(title: str, columns: Sequence[str], costs: Costs) -> None:
    growth = {name: values[-1] / values[0] for name, values in costs.items()}
    rows = [[name, *(f"{value:,.2f}" for value in values), growth[name]] for name, values in costs.items()]
    show(f"{title}: µs a unit", ["", *columns, "growth"], rows)
    for name, factor in growth.items():
        if factor > ALLOWED:
            print(f"grows faster than its work: {name}, {factor:.1f} times")


async def by_held(held: dict[str, int], folder: Path) -> Costs:
    """A chunk into a tier that holds so much already and out again, and a key that is asked for."""
    costs: Costs = {}
    view = filled(SIZE)
    for capacity in held.values():
        count = capacity // SIZE
        memory = CpuBackend(LocalTierSettings(name="ram", type="cpu", capacity=(count + 2) * SIZE))
        await memory.open()
        keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]
        room = memory.arena.allocate_all(SIZE, 2)
        memory.arena.settle()
        leave_sparse(memory.arena)
        for key in keys:
            lease = memory.arena.allocate(SIZE)
            assert lease is not None
            memory.adopt(key, lease)
        for lease in room:
            lease.release()
        note(costs, "memory", await chunk_costs(memory, keys, view))
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
            note(costs, "disk", await chunk_costs(disk, keys, view))
            started = time.perf_counter()
            found = sum([len(batch) async for batch in disk.scan()])
            costs.setdefault("disk: taken in at the start", []).append(
                (time.perf_counter() - started) / found * 1e6
            )
            await disk.close()
    return costs


def leave_sparse(arena: Arena) -> None:
    """Have no memory taken for what is leased from now on: it is never used, and there may not be so much."""
    if arena._large_pages is not None:
        arena._large_pages.close()


def note(costs: Costs, tier: str, measured: Held) -> None:
    costs.setdefault(f"{tier}: put a chunk", []).append(measured.put * 1e6)
    costs.setdefault(f"{tier}: get a chunk", []).append(measured.get * 1e6)
    costs.setdefault(f"{tier}: look a key up", []).append(measured.look_up * 1e6)


async def chunk_costs(backend: Backend, keys: Sequence[ChunkKey], view: memoryview) -> Held:
    """Medians, of chunks that are not sparse."""
    puts, gets, look_ups = [], [], []
    for _ in range(RUNS):
        key = ChunkKey(os.urandom(KEY_BYTES))
        started = time.perf_counter()
        stored = await backend.put([(key, view)])
        puts.append(time.perf_counter() - started)
        started = time.perf_counter()
        fetched = await backend.get([(key, view)])
        gets.append(time.perf_counter() - started)
        if [*stored, *fetched] != [Outcome.OK, Outcome.OK]:
            raise SystemExit(f"the tier did not do it: {stored} {fetched}")
        asked = random.choices(keys, k=LOOK_UP_KEYS)
        started = time.perf_counter()
        if not all(await backend.contains(asked)):
            raise SystemExit("the tier has lost a chunk")
        look_ups.append((time.perf_counter() - started) / len(asked))
        await backend.delete([key])
    return Held(statistics.median(puts), statistics.median(gets), statistics.median(look_ups))


def by_entries(powers: Sequence[int]) -> Costs:
    """The catalog with so many entries, as :mod:`benchmarks.catalog` fills it. Processor time."""
    costs: Costs = {}
    for power in powers:
        prompts = 10**power // full.PROMPT_CHUNKS
        catalog = Catalog([LruPolicy(), LruPolicy()])
        adding = array("f", bytes(4 * prompts * full.PROMPT_CHUNKS))
        full.fill(catalog, prompts, adding)
        picked = random.Random(0).choices(range(prompts), k=500)
        measured = {
            "add a chunk": (adding, 1),
            "prefix, a chunk": (
                full.timed(catalog.prefix, map(full.prompt_keys, picked)),
                full.PROMPT_CHUNKS,
            ),
            "touch, a chunk": (full.timed(catalog.touch, map(full.prompt_keys, picked)), full.PROMPT_CHUNKS),
            "replace the coldest": (
                full.timed(lambda key, held=catalog: full.replace_coldest(held, key), full.newcomers(500)),
                1,
            ),
        }
        for name, (seconds, units) in measured.items():
            costs.setdefault(name, []).append(statistics.median(seconds) / units * 1e6)
        del catalog
        gc.collect()
    return costs


def by_look_ups(flights: Sequence[int]) -> Costs:
    """So many look-ups of a prompt of 128 chunks at once, on one connection of a real cache process."""
    costs: Costs = {"a look-up of 32,768 tokens": []}
    with cache_process([]) as path, bridges(path) as (scheduler, worker):
        keys = chunk_keys(ROOT, list(range(LOOK_UP_KEYS * CHUNK_TOKENS)), CHUNK_TOKENS)
        hold(scheduler, worker, keys)
        for count in flights:
            seconds = [at_once(scheduler, keys, count) for _ in range(30)]
            costs["a look-up of 32,768 tokens"].append(statistics.median(seconds) / count * 1e6)
    return costs


def asked(scheduler: SchedulerBridge, keys: Sequence[ChunkKey]) -> int:
    """A look-up, as soon as the cache process has taken in what it was asked before."""
    while (ticket := scheduler.look_up(keys, len(keys) * CHUNK_TOKENS)) is None:
        scheduler.poll()
    return ticket


def at_once(scheduler: SchedulerBridge, keys: Sequence[ChunkKey], count: int) -> float:
    started = time.perf_counter()
    for ticket in [asked(scheduler, keys) for _ in range(count)]:
        finding = scheduler.found(ticket, wait=PATIENCE_SECONDS)
        if finding is None or len(finding.leases) != len(keys):
            raise SystemExit("a look-up has not found all chunks")
        scheduler.take(ticket)
        scheduler.release(finding.leases)
    return time.perf_counter() - started


@contextmanager
def bridges(path: Path) -> Iterator[tuple[SchedulerBridge, WorkerBridge]]:
    scheduler, worker = SchedulerBridge(hello("scheduler"), path), WorkerBridge(hello("worker"), path)
    worker.connect()
    scheduler.connect()
    yield scheduler, worker
    scheduler.close()
    worker.close()


async def by_reads(flights: Sequence[int], folder: Path) -> Costs:
    """So many batches of one chunk of 1 MiB each at once, from a disk."""
    costs: Costs = {"a chunk of 1 MiB from disk": []}
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvtier-bench-") as name:
        settings = {"name": "ssd", "type": "disk", "path": name, "capacity": "1TiB"}
        disk = DiskBackend(DiskSettings.model_validate(settings))
        await disk.open()
        memory = filled(max(flights) * MIB)
        chunks = [
            (ChunkKey(os.urandom(KEY_BYTES)), memory[index * MIB : (index + 1) * MIB])
            for index in range(max(flights))
        ]
        await disk.put(chunks)
        for count in flights:
            seconds = []
            for _ in range(RUNS):
                started = time.perf_counter()
                async with anyio.create_task_group() as tasks:
                    for chunk in chunks[:count]:
                        tasks.start_soon(disk.get, [chunk])
                seconds.append((time.perf_counter() - started) / count)
            costs["a chunk of 1 MiB from disk"].append(statistics.median(seconds) * 1e6)
        await disk.close()
    return costs


if __name__ == "__main__":
    main()
