"""Memory, disk and Redis: chunks into a tier and out again, and look-ups of 128 keys."""

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

from benchmarks.compare.pairs import Pair
from benchmarks.compare.peer import LMCacheProcess
from benchmarks.peer import LMCache
from benchmarks.pools_sides import RawRESP
from kvtier.arena import Arena
from kvtier.backends.base import Backend
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk import DiskBackend, DiskSettings, walk
from kvtier.backends.redis import RedisBackend
from kvtier.backends.redis.settings import RedisSettings
from kvtier.backends.sealed import SealedBackend
from kvtier.bench.chunks import clear_stamps, have_stamps, make_chunks, own_keys
from kvtier.bench.sides import BackendSide, Chunk
from kvtier.catalog import Catalog, State
from kvtier.eviction.lru import LruPolicy
from kvtier.settings import LocalTierSettings
from kvtier.testing.servers.redis import RedisServer
from kvtier.units import MIB

LOOK_UP_KEYS = 128
LOOK_UPS = 20
THREADS = 4
"""Of either disk tier, and connections of either pool."""
DEADLINE_SECONDS = 120
CALLS = ("put", "get", "look-up", "forget")

Ask = Callable[[str], Awaitable[float]]
"""One side: does what a call of :data:`CALLS` names with all its chunks, and tells the seconds."""


class Extent(NamedTuple):
    """How much is moved, and how often."""

    size: int
    chunks: int
    pairs: int

    @property
    def length(self) -> int:
        return self.size * self.chunks


def of_kvtier(
    backend: Backend,
    chunks: Sequence[Chunk],
    cool: Callable[[], None] = lambda: None,
    server: RawRESP | None = None,
) -> Ask:
    """A tier of kvtier. ``cool`` is called before each reading and is not counted.

    What a tier of this host holds the catalog knows: a look-up asks that alone, as a cache does. A pool's
    ``server`` is asked itself, and emptied by hand: UNLINK would leave it at work in the next one's turn.
    """
    side, keys = BackendSide(backend), [key for key, _ in chunks]
    asked = [keys[index % len(keys)] for index in range(LOOK_UP_KEYS)]
    catalog = Catalog([LruPolicy()])
    for key, view in chunks:
        catalog.add(key, 0, len(view), State.READY)

    def look_up() -> float:
        started = time.perf_counter()
        held = catalog.prefix(asked)
        catalog.touch(asked)
        seconds = time.perf_counter() - started
        if len(held) != len(asked):
            raise SystemExit("kvtier has not found all chunks")
        return seconds

    async def ask(call: str) -> float:
        if call == "put":
            return await side.put(chunks)
        if call == "forget":
            await (server.forget([]) if server else side.forget(keys))
            return 0.0
        if call == "look-up":
            if server is None:
                return statistics.median(look_up() for _ in range(LOOK_UPS))
            seconds = [await side.prefix(asked) or await side.look_up(asked) for _ in range(LOOK_UPS)]
            return statistics.median(seconds)
        cool()
        stamps = clear_stamps(chunks)
        took = await side.get(chunks)
        if not have_stamps(chunks, stamps):
            raise SystemExit("kvtier has not brought the bytes that it was given")
        return took

    return ask


def of_lmcache(process: LMCacheProcess, kind: str) -> Ask:
    """A tier of LMCache's."""

    async def ask(call: str) -> float:
        if call == "look-up":
            return statistics.median(process.ask(kind, "look_up") for _ in range(LOOK_UPS))
        return process.ask(kind, call)

    return ask


def of_connector(process: LMCache, kind: str, count: int, server: RawRESP) -> Ask:
    """One of its connectors to a Redis, which ``server`` empties."""

    async def ask(call: str) -> float:
        if call == "forget":
            await server.forget([])
            return 0.0
        if call == "look-up":
            return statistics.median(process.ask(kind, "look_up", LOOK_UP_KEYS) for _ in range(LOOK_UPS))
        return process.ask(kind, call, count)

    return ask


async def alternate(sides: Mapping[str, Ask], pairs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by call and side, after a turn of each that is not counted. The order is drawn each time."""
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
    """A pair for each call."""
    return [
        Pair(row, call, by_side[ours], by_side[theirs], 0 if call == "look-up" else length)
        for call, by_side in seconds.items()
    ]


async def cpu(extent: Extent) -> list[Pair]:
    """A tier of memory, which copies."""
    tier = LocalTierSettings(name="ram", type="cpu", capacity=extent.length + MIB)
    backend = CpuBackend(tier)
    await backend.open()
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, own_keys(extent.chunks), extent.size)
    with tempfile.TemporaryDirectory() as folder, lmcache(folder, extent) as process:
        sides = {"kvtier": of_kvtier(backend, chunks), "LMCache": of_lmcache(process, "cpu")}
        seconds = await alternate(sides, extent.pairs)
    await backend.close()
    return pairs_of("cpu", seconds, "kvtier", "LMCache", extent.length)


async def disk(extent: Extent, folder: Path, *, direct: bool) -> list[Pair]:
    """A disk, read cold. LMCache computes no checksum: ``plain`` is without one, too."""
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, own_keys(extent.chunks), extent.size)
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

        def cool() -> None:
            for path in walk(tier.path):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

        with lmcache(name, extent) as process:
            sides = {
                "plain": of_kvtier(backend, chunks, cool),
                "sealed": of_kvtier(SealedBackend(backend), chunks, cool),
                "LMCache": of_lmcache(process, "disk O_DIRECT" if direct else "disk"),
            }
            seconds = await alternate(sides, extent.pairs)
        await backend.close()
    row = "disk O_DIRECT" if direct else "disk buffered"
    return [
        *pairs_of(f"{row}, plain", seconds, "plain", "LMCache", extent.length),
        *pairs_of(f"{row}, sealed", seconds, "sealed", "LMCache", extent.length),
    ]


async def redis(extent: Extent, kinds: Sequence[str]) -> list[Pair]:
    """A Redis on loopback, beside LMCache's ``redis://`` and ``resp://``."""
    if missing := RedisServer.missing():
        raise SystemExit(missing)
    arena = Arena.create(extent.length + MIB)
    chunks = make_chunks(arena, own_keys(extent.chunks), extent.size)
    pairs = []
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        tier = RedisSettings.model_validate(
            {"name": "pool", **server.tier(), "connections": THREADS, "deadline": DEADLINE_SECONDS}
        )
        backend = RedisBackend(tier)
        await backend.open()
        raw = RawRESP(("127.0.0.1", server.port), 1)
        process = LMCache(tier.url, extent.size, extent.chunks)
        sides = {
            "plain": of_kvtier(backend, chunks, server=raw),
            "sealed": of_kvtier(SealedBackend(backend), chunks, server=raw),
            **{kind: of_connector(process, kind, extent.chunks, raw) for kind in kinds},
        }
        seconds = await alternate(sides, extent.pairs)
        process.close()
        await raw.close()
        await backend.close()
    for kind in kinds:
        for ours in ("plain", "sealed"):
            pairs += pairs_of(f"{kind}, {ours}", seconds, ours, kind, extent.length)
    return pairs


def lmcache(folder: str, extent: Extent) -> LMCacheProcess:
    options = {
        "--folder": folder,
        "--chunk-bytes": extent.size,
        "--chunks": extent.chunks,
        "--threads": THREADS,
    }
    return LMCacheProcess([str(word) for option in options.items() for word in option])
