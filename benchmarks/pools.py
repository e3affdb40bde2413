"""Compare the shared pools with the limits of their media, and with LMCache, in the same run.

::

    python -m benchmarks.pools --pool redis --peer    # 12 GiB of memory, 5 minutes
    python -m benchmarks.pools                        # all pools whose servers are installed

Each pool is a real server on loopback. ``limit`` for Redis and Valkey: the same commands on raw blocking
sockets, in as many threads as the tier has connections; for InfiniStore, Mooncake and S3: the client library
alone. ``pump`` moves the same bytes from and to a process that stores nothing. ``plain`` is the backend,
``sealed`` the backend with header and checksum, as in a cache. The chunks are in a real arena; those of a row
are one batch, which each side in turn stores, fetches, verifies and deletes.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from benchmarks.common import MIB, parse, ratio, show, speed
from benchmarks.peer import LMCacheSide, run_connectors
from benchmarks.pools_sides import (
    InfiniStoreLibrary,
    MooncakeLibrary,
    ObstoreLibrary,
    PoolSide,
    Pump,
    RawRESP,
    TierSide,
    fill_arena,
)
from kvtier.backends.s3.settings import S3Settings
from kvtier.lab.bench.rows import rotated
from kvtier.lab.bench.sides import Chunk, clear_stamps, have_stamps, put_stamps
from kvtier.memory.arena import Arena
from kvtier.plugins import Plugins
from kvtier.testing.servers import Server
from kvtier.tiers.seal import Seal
from tests.rigs.servers import SERVERS

CONNECTIONS = 4
"""Connections of the tier, raw sockets, and threads of the libraries."""
DEADLINE_SECONDS = 60
KEYS = 128
"""A prompt of 32,768 tokens in chunks of 256."""
HELD_BYTES = 4096
"""Size of the chunks that are looked up. It does not affect lookups."""
RESP = ("redis", "valkey")

Seconds = Mapping[str, Sequence[float]]
"""Seconds of each turn, by side."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    sizes: Sequence[int]
    depths: Sequence[int]
    turns: Callable[[int], int]
    """Returns the number of turns for a number of bytes."""
    lookup_runs: int


FULL = Extent(
    [4 * MIB, 32 * MIB, 128 * MIB], [1, 4, 16], lambda length: min(max(1024 * MIB // length, 5), 100), 50
)
SMALL = Extent([MIB], [1, 4], lambda _: 1, 1)
MAX_STORED = {"infinistore": 768 * MIB, "s3": 128 * MIB}
"""Maximum bytes per row, for servers with limited memory, or that free disk space only later."""
INFINISTORE_BYTES = 8 << 30
"""Memory limit: its server (0.2.35) once used all memory while its own client read 16 chunks of 32 MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the shared pools with the limits of their media.")
    parser.add_argument("--pool", action="append", choices=list(SERVERS), help="default: all")
    parser.add_argument(
        "--size", action="append", type=int, metavar="MIB", help="chunk size; default: 4, 32, 128"
    )
    parser.add_argument("--peer", action="store_true", help="also measure LMCache; installs it")
    options = parse(parser)
    extent = SMALL if options.small else FULL
    if options.size:
        extent = extent._replace(sizes=[size * MIB for size in options.size])
    for pool in options.pool or SERVERS:
        if missing := SERVERS[pool].missing():
            print(f"{pool}: skipped: {missing}")
            continue
        with (
            tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
            run_server(pool, folder) as server,
        ):
            with_lmcache = options.peer and pool in RESP
            anyio.run(measure, pool, server, extent, with_lmcache)


@contextmanager
def run_server(pool: str, folder: str) -> Iterator[Server]:
    """Run a server with room for the largest row."""
    rooms: dict[str, dict[str, Any]] = {"mooncake": {"segment": "4 GB"}, "s3": {"volumes": 100}}
    room = rooms.get(pool, {})
    server = SERVERS[pool](Path(folder), **room)
    with server if pool != "infinistore" else with_memory_limit(server, INFINISTORE_BYTES):
        yield server


@contextmanager
def with_memory_limit(server: Server, max_bytes: int) -> Iterator[None]:
    """Run a server that fails, instead of using all memory of the machine, above ``max_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
    try:
        server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        yield
    finally:
        server.kill()


async def measure(pool: str, server: Server, extent: Extent, with_lmcache: bool) -> None:
    """Print the tables of one pool."""
    transfers, lookups = [], []
    for size in extent.sizes:
        depths = [depth for depth in extent.depths if depth * size <= MAX_STORED.get(pool, depth * size)]
        arena = Arena.create(max(depths) * size + KEYS * HELD_BYTES)
        async with sides_of(pool, server, arena, size, max(depths), with_lmcache) as sides:
            chunks = fill_arena(arena, max(depths), size)
            for depth in depths:
                put, get = await interleave_sides(sides, chunks[:depth], extent.turns(depth * size))
                transfers += [("put", depth, size, put), ("get", depth, size, get)]
                print(f"{pool}: {depth} x {size // MIB} MiB measured", file=sys.stderr)
            if size == extent.sizes[0]:
                lookups = await measure_lookups(
                    sides, fill_arena(arena, KEYS, HELD_BYTES), extent.lookup_runs
                )
        arena.close()
    show(f"{pool}, GB/s and ratio to the limit", *against_limit(transfers))
    if with_lmcache:
        show(f"{pool}, GB/s of LMCache, and the relative speed of kvtier", *against_lmcache(transfers))
    show(f"{pool}, lookup of {KEYS} keys, median µs in total and per key", *of_lookups(lookups))


@asynccontextmanager
async def sides_of(
    pool: str, server: Server, arena: Arena, size: int, depth: int, with_lmcache: bool
) -> AsyncIterator[dict[str, PoolSide]]:
    """Open all sides of the comparison."""
    backend_type = Plugins.load([]).backend(pool)
    fields = backend_type.settings_type.model_fields
    settings = {**server.tier(), "name": "pool", "deadline": DEADLINE_SECONDS, "concurrency": CONNECTIONS}
    if "connections" in fields:
        settings["connections"] = CONNECTIONS
    backend = backend_type(backend_type.settings_type.model_validate(settings))
    await backend.open()
    if (registration := backend.capabilities().registration) is not None:
        await registration.register(arena)
    sides: dict[str, PoolSide] = {
        "limit": limit_of(pool, settings, arena),
        "pump": Pump(CONNECTIONS, size),
        "plain": TierSide(backend),
        "sealed": TierSide(backend, Seal(backend)),
    }
    process = (
        run_connectors(settings["url"].replace("valkey:", "redis:"), size, depth) if with_lmcache else None
    )
    if process is not None:
        sides |= {f"LMCache {kind}": LMCacheSide(process, kind) for kind in ("redis", "resp")}
    try:
        yield sides
    finally:
        for side in sides.values():
            await side.close()
        await backend.close()
        if process is not None:
            process.close()


def limit_of(pool: str, settings: Mapping[str, Any], arena: Arena) -> PoolSide:
    """Return the side that measures the limit of the pool's medium."""
    if pool == "mooncake":
        return MooncakeLibrary(settings["master"], arena)
    if pool == "s3":
        return ObstoreLibrary(S3Settings.model_validate(settings))
    host, _, port = settings["url"].partition("://")[2].partition(":")
    if pool in RESP:
        return RawRESP((host, int(port)), CONNECTIONS)
    return InfiniStoreLibrary((host, int(port)), CONNECTIONS)


async def interleave_sides(
    sides: Mapping[str, PoolSide], chunks: Sequence[Chunk], turns: int
) -> tuple[Seconds, Seconds]:
    """Return the seconds of puts and of gets, without a warm-up turn. The order is drawn anew each turn."""
    put: dict[str, list[float]] = defaultdict(list)
    get: dict[str, list[float]] = defaultdict(list)
    keys = [key for key, _ in chunks]
    for turn in range(turns + 1):
        for name in random.Random(turn).sample(list(sides), len(sides)):
            stored = await sides[name].put(chunks)
            stamps = clear_stamps(chunks)
            fetched = await sides[name].get(chunks)
            if not sides[name].fills:
                put_stamps(chunks, stamps)
            elif not have_stamps(chunks, stamps):
                raise SystemExit(f"{name} returned wrong contents")
            # The limit empties a Redis synchronously, while the backend deletes in the background (UNLINK).
            await sides["limit"].forget(keys)
            await sides[name].forget(keys)
            if turn:
                put[name].append(stored)
                get[name].append(fetched)
    return put, get


async def measure_lookups(
    sides: Mapping[str, PoolSide], held: Sequence[Chunk], turns: int
) -> list[tuple[str, Seconds]]:
    """Return the seconds of ``contains`` and, if supported, of the held prefix."""
    keys = [key for key, _ in held]
    for side in sides.values():
        await side.hold(held)
    contains: dict[str, list[float]] = {name: [] for name in sides}
    prefix: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for name in rotated(list(sides), turn):
            took, prefix_took = await sides[name].look_up(keys), await sides[name].prefix(keys)
            if turn:
                contains[name].append(took)
                if prefix_took is not None:
                    prefix[name].append(prefix_took)
    for side in sides.values():
        await side.forget(keys)
    return [("contains", contains), *([("held prefix", prefix)] if prefix else [])]


Transfers = Sequence[tuple[str, int, int, Seconds]]


def against_limit(transfers: Transfers) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the first table."""
    columns = ("", "pump", "limit", "plain", "plain : limit", "sealed", "sealed : limit")
    rows: list[Sequence[object]] = []
    for call, depth, size, seconds in transfers:
        cells: list[object] = [f"{call} {depth} x {size // MIB} MiB"]
        cells += [speed(depth * size, seconds[name]) for name in ("pump", "limit")]
        for name in ("plain", "sealed"):
            cells += [speed(depth * size, seconds[name]), ratio(seconds[name], seconds["limit"])]
        rows.append(cells)
    return columns, rows


def against_lmcache(transfers: Transfers) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the second table."""
    columns = ("", "redis://", "plain : redis", "sealed : redis", "resp://", "plain : resp", "sealed : resp")
    rows: list[Sequence[object]] = []
    for call, depth, size, seconds in transfers:
        cells: list[object] = [f"{call} {depth} x {size // MIB} MiB"]
        for kind in ("redis", "resp"):
            theirs = seconds[f"LMCache {kind}"]
            cells += [speed(depth * size, theirs)]
            cells += [ratio(seconds[name], theirs) for name in ("plain", "sealed")]
        rows.append(cells)
    return columns, rows


def of_lookups(lookups: Sequence[tuple[str, Seconds]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return the columns and rows of the third table."""
    rows: list[Sequence[object]] = []
    for call, by_side in lookups:
        for name, seconds in by_side.items():
            total = statistics.median(seconds) * 1e6
            rows.append((call, name, f"{total:,.0f}", total / KEYS))
    return ("", "", "total", "per key"), rows


if __name__ == "__main__":
    main()
