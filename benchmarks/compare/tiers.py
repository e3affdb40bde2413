"""Memory, disk and Redis tiers: puts and gets of chunks, and lookups of 128 keys."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import CommandProcess
from benchmarks.compare.pairs import Pair
from benchmarks.peer import run_connectors, run_script
from benchmarks.pools_sides import RawRESP
from kvtier.backends.base import Backend
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk.backend import DiskBackend, DiskSettings, walk
from kvtier.backends.redis import RedisBackend
from kvtier.backends.redis.settings import RedisSettings
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.lab.bench.sides import BackendSide, Chunk, clear_stamps, have_stamps, make_chunks, random_keys
from kvtier.memory.arena import Arena
from kvtier.settings import LocalTierSettings
from kvtier.tiers.seal import Seal
from kvtier.units import MIB
from tests.rigs.servers.redis import RedisServer

LMCACHE = Path(__file__).with_name("lmcache_process.py")
LOOKUP_KEYS = 128
LOOKUPS = 20
THREADS = 4
"""Threads of each disk tier, and connections of each pool client."""
DEADLINE_SECONDS = 120
CALLS = ("put", "get", "lookup", "forget")

RunCall = Callable[[str], Awaitable[float]]
"""One side: runs a call of :data:`CALLS` for all its chunks, and returns the seconds."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    size: int
    chunks: int
    pairs: int

    @property
    def length(self) -> int:
        return self.size * self.chunks


def kvtier_side(
    backend: Backend,
    chunks: Sequence[Chunk],
    prepare_read: Callable[[], None] = lambda: None,
    server: RawRESP | None = None,
    seal: Seal | None = None,
) -> RunCall:
    """Return a side for a tier of kvtier. ``prepare_read`` is called before each get and is not timed.

    Lookups in a local tier use only the catalog, as in a cache. With a pool, lookups query the ``server``,
    which is emptied over a raw socket: with UNLINK, it would still be busy during the next side's turn.
    """
    side, keys = BackendSide(backend, seal), [key for key, _ in chunks]
    lookup_keys = [keys[index % len(keys)] for index in range(LOOKUP_KEYS)]
    catalog = Catalog([LruPolicy.factory()])
    for key, view in chunks:
        catalog.add(key, 0, len(view), State.READY)

    def look_up() -> float:
        started = time.perf_counter()
        held = catalog.prefix(lookup_keys)
        catalog.touch(lookup_keys)
        seconds = time.perf_counter() - started
        if len(held) != len(lookup_keys):
            raise SystemExit("kvtier did not find all chunks")
        return seconds

    async def run(call: str) -> float:
        if call == "put":
            return await side.put(chunks)
        if call == "forget":
            await (server.forget([]) if server else side.forget(keys))
            return 0.0
        if call == "lookup":
            if server is None:
                return statistics.median(look_up() for _ in range(LOOKUPS))
            seconds = [
                await side.prefix(lookup_keys) or await side.look_up(lookup_keys) for _ in range(LOOKUPS)
            ]
            return statistics.median(seconds)
        prepare_read()
        stamps = clear_stamps(chunks)
        took = await side.get(chunks)
        if not have_stamps(chunks, stamps):
            raise SystemExit("kvtier returned wrong contents")
        return took

    return run


def lmcache_side(process: CommandProcess, kind: str) -> RunCall:
    """Return a side for a tier of LMCache."""

    async def run(call: str) -> float:
        if call == "lookup":
            return statistics.median(process.ask(kind, "look_up") for _ in range(LOOKUPS))
        return process.ask(kind, call)

    return run


def connector_side(process: CommandProcess, kind: str, count: int, server: RawRESP) -> RunCall:
    """Return a side for one of LMCache's connectors to Redis. ``server``: empties the Redis."""

    async def run(call: str) -> float:
        if call == "forget":
            await server.forget([])
            return 0.0
        if call == "lookup":
            return statistics.median(process.ask(kind, "look_up", LOOKUP_KEYS) for _ in range(LOOKUPS))
        return process.ask(kind, call, count)

    return run


async def interleave(sides: Mapping[str, RunCall], pairs: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds by call and side, without a first warm-up turn. The order is random each turn."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(pairs + 1):
        for name in random.Random(turn).sample(list(sides), len(sides)):
            for call in CALLS:
                took = await sides[name](call)
                if turn and call != "forget":
                    seconds[call][name].append(took)
    return seconds


def pairs_of(
    row: str, seconds: Mapping[str, Mapping[str, list[float]]], ours: str, theirs: str, length: int
) -> list[Pair]:
    """Return a pair for each call."""
    return [
        Pair(row, call, by_side[ours], by_side[theirs], 0 if call == "lookup" else length)
        for call, by_side in seconds.items()
    ]


async def cpu(extent: Extent) -> list[Pair]:
    """Measure a memory tier that copies."""
    tier = LocalTierSettings(name="ram", type="cpu", capacity=extent.length + MIB)
    backend = CpuBackend(tier)
    await backend.open()
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, random_keys(extent.chunks), extent.size)
    with tempfile.TemporaryDirectory() as folder, lmcache(folder, extent) as process:
        sides = {"kvtier": kvtier_side(backend, chunks), "LMCache": lmcache_side(process, "cpu")}
        seconds = await interleave(sides, extent.pairs)
    await backend.close()
    return pairs_of("cpu", seconds, "kvtier", "LMCache", extent.length)


async def disk(extent: Extent, folder: Path, *, direct: bool) -> list[Pair]:
    """Measure a disk tier with cold reads. ``plain`` has no checksum, like LMCache."""
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, random_keys(extent.chunks), extent.size)
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvtier-bench-") as name:
        tier = DiskSettings(
            name="ssd",
            type="disk",
            capacity=1 << 40,
            path=Path(name, "ssd"),
            direct=direct,
            concurrency=THREADS,
        )
        backend = DiskBackend(tier)
        await backend.open()

        def drop_cache() -> None:
            for path in walk(tier.path):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

        with lmcache(name, extent) as process:
            sides = {
                "plain": kvtier_side(backend, chunks, drop_cache),
                "sealed": kvtier_side(backend, chunks, drop_cache, seal=Seal(backend)),
                "LMCache": lmcache_side(process, "disk O_DIRECT" if direct else "disk"),
            }
            seconds = await interleave(sides, extent.pairs)
        await backend.close()
    row = "disk O_DIRECT" if direct else "disk buffered"
    return [
        *pairs_of(f"{row}, plain", seconds, "plain", "LMCache", extent.length),
        *pairs_of(f"{row}, sealed", seconds, "sealed", "LMCache", extent.length),
    ]


async def redis(extent: Extent, kinds: Sequence[str]) -> list[Pair]:
    """Measure a Redis on loopback, with LMCache's ``redis://`` and ``resp://``."""
    if missing := RedisServer.missing():
        raise SystemExit(missing)
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, random_keys(extent.chunks), extent.size)
    pairs = []
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        tier = RedisSettings.model_validate(
            {"name": "pool", **server.tier(), "connections": THREADS, "deadline": DEADLINE_SECONDS}
        )
        backend = RedisBackend(tier)
        await backend.open()
        raw = RawRESP(("127.0.0.1", server.port), 1)
        process = run_connectors(tier.url, extent.size, extent.chunks)
        sides = {
            "plain": kvtier_side(backend, chunks, server=raw),
            "sealed": kvtier_side(backend, chunks, server=raw, seal=Seal(backend)),
            **{kind: connector_side(process, kind, extent.chunks, raw) for kind in kinds},
        }
        seconds = await interleave(sides, extent.pairs)
        process.close()
        await raw.close()
        await backend.close()
    for kind in kinds:
        for ours in ("plain", "sealed"):
            pairs += pairs_of(f"{kind}, {ours}", seconds, ours, kind, extent.length)
    return pairs


def lmcache(folder: str, extent: Extent) -> CommandProcess:
    sizes = ["--chunk-bytes", extent.size, "--chunks", extent.chunks, "--threads", THREADS]
    return run_script(LMCACHE, "--folder", folder, *sizes)
