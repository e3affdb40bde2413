"""The shared pools beside the limits of their media, and beside LMCache, in the same run.

::

    python -m benchmarks.pools --pool redis --peer    # 12 GiB of memory, 5 minutes
    python -m benchmarks.pools                        # all pools whose servers are there

Each pool is a real server on loopback. ``limit`` is, for Redis and Valkey, the same commands by hand on raw
blocking sockets, in as many threads as the tier has connections; for InfiniStore and Mooncake the calls of
their own client libraries. ``pump`` moves the same bytes from and to a process that holds nothing. ``plain``
is the backend, ``sealed`` the backend with header and checksum around it, as a cache runs it. Data lies in a
real arena; a row's chunks are one batch, stored, fetched, checked and removed by each side in turn.
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
from typing import NamedTuple

import anyio

from benchmarks.common import MIB, ratio, show, speed
from benchmarks.peer import LMCache, LMCacheSide
from benchmarks.pools_sides import Pump, RawRESP, fill_arena
from kvtier.arena import Arena
from kvtier.backends.base import SupportsRegistration
from kvtier.backends.sealed import SealedBackend
from kvtier.bench.chunks import clear_stamps, have_stamps, put_stamps
from kvtier.bench.libraries import InfiniStoreLibrary, MooncakeLibrary
from kvtier.bench.sides import BackendSide, Chunk, Side
from kvtier.bench.timing import rotated
from kvtier.plugins import Plugins
from kvtier.testing.servers import SERVERS
from kvtier.testing.servers.base import Server

CONNECTIONS = 4
"""Of the tier, of the raw sockets, and threads of the libraries."""
DEADLINE_SECONDS = 60
KEYS = 128
"""A prompt of 32,768 tokens in chunks of 256."""
HELD_BYTES = 4096
"""What is looked up is that long: a look-up does not see it."""
RESP = ("redis", "valkey")

Seconds = Mapping[str, Sequence[float]]
"""Of each turn, by side."""


class Extent(NamedTuple):
    """How much is measured."""

    sizes: Sequence[int]
    depths: Sequence[int]
    turns: Callable[[int], int]
    """How often bytes so many are moved."""
    look_ups: int


FULL = Extent(
    [4 * MIB, 32 * MIB, 128 * MIB], [1, 4, 16], lambda length: min(max(1024 * MIB // length, 5), 100), 50
)
QUICK = Extent([MIB], [1, 4], lambda _: 1, 1)
ROOM = {"infinistore": 768 * MIB}
"""The most that a row may store, where the server's memory bounds it."""
INFINISTORE_BYTES = 8 << 30
"""Its server (0.2.35) grew to all of the machine once, while its own client read 16 chunks of 32 MiB."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The shared pools beside the limits of their media.")
    parser.add_argument("--pool", action="append", choices=list(SERVERS), help="default: all")
    parser.add_argument(
        "--size", action="append", type=int, metavar="MIB", help="of a chunk; default: 4, 32, 128"
    )
    parser.add_argument("--peer", action="store_true", help="LMCache, too, which is installed for it")
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    extent = QUICK if given.quick else FULL
    if given.size:
        extent = extent._replace(sizes=[size * MIB for size in given.size])
    for pool in given.pool or SERVERS:
        if missing := SERVERS[pool].missing():
            print(f"{pool}: left out: {missing}")
            continue
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, started(pool, folder) as server:
            peer = given.peer and pool in RESP
            anyio.run(measure, pool, server, extent, peer)


@contextmanager
def started(pool: str, folder: str) -> Iterator[Server]:
    """A server that holds the largest row."""
    segment = {"segment": "4 GB"} if pool == "mooncake" else {}
    server = SERVERS[pool](Path(folder), **segment)
    with server if pool != "infinistore" else bounded(server, INFINISTORE_BYTES):
        yield server


@contextmanager
def bounded(server: Server, most: int) -> Iterator[None]:
    """A server that ends where it wants more memory, and does not take the machine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        yield
    finally:
        server.kill()


async def measure(pool: str, server: Server, extent: Extent, peer: bool) -> None:
    """Print the tables of one pool."""
    moves, asks = [], []
    for size in extent.sizes:
        depths = [depth for depth in extent.depths if depth * size <= ROOM.get(pool, depth * size)]
        arena = Arena.create(max(depths) * size + KEYS * HELD_BYTES)
        async with sides_of(pool, server, arena, size, max(depths), peer) as sides:
            chunks = fill_arena(arena, max(depths), size)
            for depth in depths:
                put, get = await take_turns(sides, chunks[:depth], extent.turns(depth * size))
                moves += [("put", depth, size, put), ("get", depth, size, get)]
                print(f"{pool}: {depth} x {size // MIB} MiB measured", file=sys.stderr)
            if size == extent.sizes[0]:
                asks = await look_ups(sides, fill_arena(arena, KEYS, HELD_BYTES), extent.look_ups)
        arena.close()
    show(f"{pool}, GB/s beside the limit", *against_limit(moves))
    if peer:
        show(f"{pool}, GB/s of LMCache, and the speed of kvtier beside it", *against_peer(moves))
    show(f"{pool}, a look-up of {KEYS} keys, median µs (and µs a key)", *of_look_ups(asks))


@asynccontextmanager
async def sides_of(
    pool: str, server: Server, arena: Arena, size: int, depth: int, peer: bool
) -> AsyncIterator[dict[str, Side]]:
    """Everybody who takes part."""
    backend_type = Plugins.load([]).backend(pool)
    fields = backend_type.settings_type.model_fields
    settings = {**server.tier(), "name": "pool", "deadline": DEADLINE_SECONDS, "concurrency": CONNECTIONS}
    if "connections" in fields:
        settings["connections"] = CONNECTIONS
    backend = backend_type(backend_type.settings_type.model_validate(settings))
    await backend.open()
    if isinstance(backend, SupportsRegistration):
        await backend.register(arena)
    sides: dict[str, Side] = {
        "limit": limit_of(pool, settings, arena),
        "pump": Pump(CONNECTIONS, size),
        "plain": BackendSide(backend),
        "sealed": BackendSide(SealedBackend(backend)),
    }
    process = LMCache(settings["url"].replace("valkey:", "redis:"), size, depth) if peer else None
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


def limit_of(pool: str, settings: Mapping[str, str], arena: Arena) -> Side:
    """What the pool's own medium can do."""
    if pool == "mooncake":
        return MooncakeLibrary(settings["master"], arena)
    host, _, port = settings["url"].partition("://")[2].partition(":")
    if pool in RESP:
        return RawRESP((host, int(port)), CONNECTIONS)
    return InfiniStoreLibrary((host, int(port)), CONNECTIONS)


async def take_turns(
    sides: Mapping[str, Side], chunks: Sequence[Chunk], turns: int
) -> tuple[Seconds, Seconds]:
    """Seconds of storing and of fetching, after one turn that is not counted. Who begins changes."""
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
                raise SystemExit(f"{name} has not brought what it was given")
            # The limit's empties a Redis at once, where the backend would leave that to the background.
            await sides["limit"].forget(keys)
            await sides[name].forget(keys)
            if turn:
                put[name].append(stored)
                get[name].append(fetched)
    return put, get


async def look_ups(sides: Mapping[str, Side], held: Sequence[Chunk], turns: int) -> list[tuple[str, Seconds]]:
    """Seconds of ``contains`` and, where there is such a call, of the leading keys."""
    keys = [key for key, _ in held]
    for side in sides.values():
        await side.hold(held)
    contains: dict[str, list[float]] = {name: [] for name in sides}
    prefix: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for name in rotated(list(sides), turn):
            asked, matched = await sides[name].look_up(keys), await sides[name].prefix(keys)
            if turn:
                contains[name].append(asked)
                if matched is not None:
                    prefix[name].append(matched)
    for side in sides.values():
        await side.forget(keys)
    return [("contains", contains), *([("held prefix", prefix)] if prefix else [])]


Moves = Sequence[tuple[str, int, int, Seconds]]


def against_limit(moves: Moves) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the first table."""
    columns = ("", "pump", "limit", "plain", "plain : limit", "sealed", "sealed : limit")
    rows: list[Sequence[object]] = []
    for call, depth, size, seconds in moves:
        cells: list[object] = [f"{call} {depth} x {size // MIB} MiB"]
        cells += [speed(depth * size, seconds[name]) for name in ("pump", "limit")]
        for name in ("plain", "sealed"):
            cells += [speed(depth * size, seconds[name]), ratio(seconds[name], seconds["limit"])]
        rows.append(cells)
    return columns, rows


def against_peer(moves: Moves) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the second table."""
    columns = ("", "redis://", "plain : it", "sealed : it", "resp://", "plain : it", "sealed : it")
    rows: list[Sequence[object]] = []
    for call, depth, size, seconds in moves:
        cells: list[object] = [f"{call} {depth} x {size // MIB} MiB"]
        for kind in ("redis", "resp"):
            theirs = seconds[f"LMCache {kind}"]
            cells += [speed(depth * size, theirs)]
            cells += [ratio(seconds[name], theirs) for name in ("plain", "sealed")]
        rows.append(cells)
    return columns, rows


def of_look_ups(asks: Sequence[tuple[str, Seconds]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the third table."""
    rows: list[Sequence[object]] = []
    for call, by_side in asks:
        for name, seconds in by_side.items():
            whole = statistics.median(seconds) * 1e6
            rows.append((call, name, f"{whole:,.0f}", whole / KEYS))
    return ("", "", "all", "a key"), rows


if __name__ == "__main__":
    main()
