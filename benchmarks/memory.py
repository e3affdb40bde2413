"""Compare the memory backends with memmove of the same bytes, in the same run.

::

    python -m benchmarks.memory                   # needs 2 GiB of memory
    sysctl -w vm.nr_hugepages=600                 # first, for huge pages of 2 MiB

Tiers below the first one use ``put`` and ``get``, which copy. In the first tier a chunk is reserved, and then
adopted with the memory that the engine has filled, without a copy: ``adopt`` is the time of the bookkeeping.
memmove copies one buffer in one thread, between pages of 4 KiB that have been touched before.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Sequence
from itertools import pairwise

import anyio

from benchmarks.common import MIB, filled, interleave, parse, ratio, show, speed
from kvtier.backends.base import Outcome
from kvtier.backends.cpu import CpuBackend, HugePageBackend, HugePageSettings, MemoryBackend
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.settings import LocalTierSettings
from kvtier.tiers.host_memory import HostMemory
from kvtier.tiers.sealer import Sealer

Chunks = Sequence[tuple[ChunkKey, memoryview]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the memory backends with memmove.")
    parser.add_argument("--runs", type=int, default=7, help="default: %(default)s")
    options = parse(parser, runs=1)
    sizes, total = ([256 * 1024, 4 * MIB, 32 * MIB], 512 * MIB)
    if options.small:
        sizes, total = ([256 * 1024, MIB], 8 * MIB)
    memory, buffer = filled(total), filled(total)
    rows = []
    for kind in ("cpu", "hugepage"):
        for size in sizes:
            rows += anyio.run(measure, kind, memory, buffer, size, options.runs)
    show("memory backends and memmove", ("", "page", "memmove GB/s", "GB/s", "ratio", "µs per chunk"), rows)


def make(kind: str, capacity: int) -> MemoryBackend:
    if kind == "hugepage":
        return HugePageBackend(HugePageSettings(name="ram", type=kind, capacity=capacity))
    return CpuBackend(LocalTierSettings(name="ram", type=kind, capacity=capacity))


async def measure(
    kind: str, memory: memoryview, buffer: memoryview, size: int, runs: int
) -> list[tuple[object, ...]]:
    """Return one row each for put, get and adopt."""
    backend = make(kind, len(memory))
    await backend.open()
    chunks = [
        (ChunkKey(index.to_bytes(2, "big") * (KEY_BYTES // 2)), memory[index * size : (index + 1) * size])
        for index in range(len(memory) // size)
    ]
    keys = [key for key, _ in chunks]
    targets = [buffer[index * size : (index + 1) * size] for index in range(len(chunks))]
    addresses = [
        (ctypes.addressof(ctypes.c_char.from_buffer(to)), ctypes.addressof(ctypes.c_char.from_buffer(view)))
        for to, (_, view) in zip(targets, chunks, strict=True)
    ]

    async def copy() -> None:
        for to, source in addresses:
            ctypes.memmove(to, source, size)

    async def put() -> None:
        expect_ok(await backend.put(chunks))

    async def get() -> None:
        expect_ok(await backend.get([(key, to) for key, to in zip(keys, targets, strict=True)]))

    def empty() -> None:
        for key in keys:
            backend._replace(key, None)

    stored = await interleave({"memmove": copy, "put": put}, runs, empty)
    empty()
    await put()
    fetched = await interleave({"memmove": copy, "get": get}, runs)
    page = f"{backend.arena.page_bytes // 1024} KiB"
    await backend.close()
    adopted = await adopting(make(kind, len(memory)), keys, size, runs)
    return [
        row(f"{kind} {name} {len(chunks)} x {size // 1024} KiB", page, chunks, seconds, name)
        for name, seconds in (("put", stored), ("get", fetched), ("adopt", adopted))
    ]


async def adopting(
    medium: MemoryBackend, keys: Sequence[ChunkKey], size: int, runs: int
) -> dict[str, list[float]]:
    """Return the seconds to allocate, begin and adopt a prompt of chunks in the first tier."""
    catalog = Catalog([LruPolicy.factory()])
    memory = HostMemory(medium._settings, medium.create_arena(), catalog, Sealer())

    payload_bytes, root = size - HEADER_BYTES, ChunkKey(bytes(KEY_BYTES))
    headers = [ChunkHeader(key, parent, bytes(32), payload_bytes) for parent, key in pairwise([root, *keys])]

    async def adopt() -> None:
        leases = memory.arena.allocate_all(size, len(keys))
        memory.adopt(memory.begin(headers, leases))

    def empty() -> None:
        memory.drop(keys if len(catalog) else [])

    seconds = await interleave({"adopt": adopt}, runs, empty)
    memory.close()
    return seconds


def row(
    title: str, page: str, chunks: Chunks, seconds: dict[str, list[float]], name: str
) -> tuple[object, ...]:
    length = sum(len(view) for _, view in chunks)
    copied = name != "adopt"
    return (
        title,
        page,
        speed(length, seconds["memmove"]) if copied else "",
        speed(length, seconds[name]) if copied else "no copy",
        ratio(seconds[name], seconds["memmove"]) if copied else "",
        statistics.median(seconds[name]) / len(chunks) * 1e6,
    )


def expect_ok(outcomes: Sequence[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise SystemExit(f"the memory backend failed: {outcomes}")


if __name__ == "__main__":
    main()
