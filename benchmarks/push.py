"""Handing chunks over to a peer, beside the transport's own write of the same bytes.

::

    python -m benchmarks.push                     # tcp and nixl, 3 GiB of memory, a minute each
    python -m benchmarks.push --transport tcp --quick

Another instance, in a process of its own on loopback, is pushed to, with mutual authentication. Chunks lie in
this one's memory as engines leave them, without a checksum: a hand-over announces them, computes checksums,
reserves room, writes, and has them verified and served there. The limit is one batch of the same bytes, from
the same memory into room that was reserved before, by the same link.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import anyio

from benchmarks.common import MIB, ratio, show, speed
from benchmarks.peers import expect
from benchmarks.peers_process import (
    ChunkSet,
    address,
    free_ports,
    opened,
    peer_process,
    settings_of,
    store,
)
from benchmarks.transports import TRANSPORTS
from kvtier.backends.base import Outcome
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.instance import Instance
from kvtier.peers.promises import Promise
from kvtier.peers.protocol import MOST_RESERVED
from kvtier.peers.push import Target
from kvtier.peers.source import Source
from kvtier.pipeline.found import LookUp

FINISH_SECONDS = 60.0


class Extent(NamedTuple):
    """How much is measured."""

    pushed_bytes: int
    chunk_bytes: Sequence[int]
    turns: int
    single_turns: int


FULL = Extent(512 * MIB, [32 * MIB, 2 * MIB], 7, 50)
QUICK = Extent(8 * MIB, [2 * MIB], 1, 2)


class Pushed(NamedTuple):
    """What was measured of one length of chunks, in seconds."""

    chunks: ChunkSet
    first: float
    """The first time, with the link to be made."""
    limit: list[float]
    seconds: list[float]
    single_limit: list[float]
    """Of one chunk alone."""
    single: list[float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hand-overs beside the limit of what carries them.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    for transport in given.transport or TRANSPORTS:
        anyio.run(measure, transport, QUICK if given.quick else FULL)


async def measure(transport: str, extent: Extent) -> None:
    """Print two tables."""
    here, there = free_ports(2)
    # Twice over: what was pushed before is evicted while more comes.
    capacity = 2 * extent.pushed_bytes + 64 * MIB
    target = settings_of(transport, there, [], capacity, checksum=True)
    measured: list[Pushed] = []
    with peer_process(target, []):
        async with opened(settings_of(transport, here, [], capacity, checksum=True)) as instance:
            firsts = itertools.count(1, 1 << 24)
            for length in extent.chunk_bytes:

                def fresh(count: int, length: int = length) -> ChunkSet:
                    return ChunkSet(next(firsts), count, length)

                measured.append(await Pushing(instance, address(there), fresh).measure(extent, length))
    show(
        f"{transport}: pushing {extent.pushed_bytes // MIB} MiB to a peer, GB/s",
        ("", "the first time", "limit", "kvtier", "kvtier : limit"),
        [
            (
                f"{one.chunks.amount} x {one.chunks.length // MIB} MiB",
                speed(one.chunks.total, [one.first]),
                speed(one.chunks.total, one.limit),
                speed(one.chunks.total, one.seconds),
                ratio(one.seconds, one.limit),
            )
            for one in measured
        ],
    )
    show(
        f"{transport}: one chunk, from READY here to READY there, median ms",
        ("", "limit", "kvtier", "more"),
        [
            (
                f"{one.chunks.length // MIB} MiB",
                (limit := statistics.median(one.single_limit) * 1e3),
                (median := statistics.median(one.single) * 1e3),
                median - limit,
            )
            for one in measured
        ],
    )


class Pushing:
    """Pushes chunks of one length, fresh ones each time: the peer has none of them yet."""

    def __init__(self, instance: Instance, to: str, fresh: Callable[[int], ChunkSet]) -> None:
        self._instance = instance
        self._to = to
        self._fresh = fresh

    async def measure(self, extent: Extent, length: int) -> Pushed:
        """Take turns."""
        count = extent.pushed_bytes // length
        first = await self.hand_over(count)
        await self.write(count)
        limit, seconds = await self._alternate(extent.turns, count)
        single_limit, single = await self._alternate(extent.single_turns, 1)
        return Pushed(ChunkSet(0, count, length), first, limit, seconds, single_limit, single)

    async def _alternate(self, turns: int, count: int) -> tuple[list[float], list[float]]:
        limit, seconds = [], []
        for turn in range(turns):
            if turn % 2:
                limit.append(await self.write(count))
            seconds.append(await self.hand_over(count))
            if not turn % 2:
                limit.append(await self.write(count))
        return limit, seconds

    async def hand_over(self, count: int) -> float:
        """By all of kvtier; the seconds."""
        chunks = self._fresh(count)
        store(self._instance.cache, chunks)
        started = perf_counter()
        handed = await self._instance.hand_over(self._to, chunks.keys).finish(FINISH_SECONDS)
        seconds = perf_counter() - started
        expect(handed.leading == count, f"{handed.leading} of {count} chunks are there: {handed.trouble}")
        expect(handed.pushed_bytes == chunks.total, "some were there before")
        await self._instance.cache.clear(chunks.keys)
        return seconds

    async def write(self, count: int) -> float:
        """By the link alone; the seconds."""
        chunks = self._fresh(count)
        store(self._instance.cache, chunks)
        found = self._instance.cache.look_up(chunks.keys)
        handing = self._instance._handing
        assert handing is not None
        async with handing.peers.lend(self._to) as source:
            promises = await self._reserve(source, found)
            views = [
                chunk.lease.view[HEADER_BYTES : HEADER_BYTES + promise.length]
                for chunk, promise in zip(found.chunks, promises, strict=True)
            ]
            started = perf_counter()
            outcomes = await source.write(list(zip(promises, views, strict=True)))
            seconds = perf_counter() - started
            views.clear()
            expect(all(outcome is Outcome.OK for outcome in outcomes), f"not all was written: {outcomes}")
            source.release(promises)
            await source.contains([])  # An answer: the room has gone back.
        found.release()
        await self._instance.cache.clear(chunks.keys)
        return seconds

    async def _reserve(self, source: Source, found: LookUp) -> list[Promise]:
        target = Target(source, self._instance.cache.hierarchy.sealer)
        headers = [ChunkHeader.parse(chunk.lease.view) for chunk in found.chunks]
        promises: list[Promise] = []
        for start in range(0, len(headers), MOST_RESERVED):
            room = await target.reserve(headers[start : start + MOST_RESERVED])
            promises += room.promises.values()
        expect(len(promises) == len(headers), f"there is room for {len(promises)} of {len(headers)} chunks")
        return promises


if __name__ == "__main__":
    main()
