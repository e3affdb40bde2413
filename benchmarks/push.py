"""Compare KV transfers to a peer with the transport's own write of the same bytes.

::

    python -m benchmarks.push                     # tcp and nixl, 3 GiB of memory, a minute each
    python -m benchmarks.push --transport tcp --small

The peer is another instance in a separate process on loopback, with mutual authentication. Chunks are in the
memory of this instance without a checksum, as engines store them. A KV transfer announces them, computes
checksums, reserves room, writes, and waits until the peer has verified them and serves them. The limit is one
batch of the same bytes over the same link, from the same memory into room that was reserved before. It has no
checksums. If both keep all cores busy, a transfer cannot come closer to the limit than their CPU times do.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio

from benchmarks.common import MIB, parse, show, speed
from benchmarks.peers import expect
from benchmarks.peers_process import (
    ChunkSet,
    address,
    opened,
    peer_process,
    settings_of,
    store,
)
from benchmarks.transports import COLUMNS, TRANSPORTS, Cost, Meter
from kvtier.backends.base import Outcome
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.peers.protocol import MAX_RESERVED
from kvtier.peers.push import Pusher
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.source import Source
from kvtier.pipeline.found import FoundPrefix
from kvtier.pipeline.query import Query
from kvtier.testing.servers import free_port

FINISH_SECONDS = 60.0


class Extent(NamedTuple):
    """Amount of work to measure."""

    pushed_bytes: int
    chunk_bytes: Sequence[int]
    turns: int
    single_turns: int


FULL = Extent(512 * MIB, [32 * MIB, 2 * MIB], 7, 50)
SMALL = Extent(8 * MIB, [2 * MIB], 1, 2)


class Pushed(NamedTuple):
    """Measurements for one chunk length, in seconds."""

    chunks: ChunkSet
    first: Cost
    """First transfer, which also establishes the link."""
    limit: list[Cost]
    costs: list[Cost]
    single_limit: list[Cost]
    """For a single chunk."""
    single: list[Cost]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare KV transfers with the limit of the transport.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    options = parse(parser)
    for transport in options.transport or TRANSPORTS:
        anyio.run(measure, transport, SMALL if options.small else FULL)


async def measure(transport: str, extent: Extent) -> None:
    """Print two tables."""
    own_port, peer_port = free_port(), free_port()
    # Twice the amount: earlier chunks are evicted while new ones arrive.
    capacity = 2 * extent.pushed_bytes + 64 * MIB
    target = settings_of(transport, peer_port, [], capacity, checksum=True)
    measured: list[Pushed] = []
    with peer_process(target, []):
        async with opened(settings_of(transport, own_port, [], capacity, checksum=True)) as instance:
            first_numbers = itertools.count(1, 1 << 24)
            for length in extent.chunk_bytes:

                def fresh(count: int, length: int = length) -> ChunkSet:
                    return ChunkSet(next(first_numbers), count, length)

                measured.append(await Pushes(instance, address(peer_port), fresh).measure(extent, length))
    show(
        f"{transport}: transferring {extent.pushed_bytes // MIB} MiB to a peer, GB/s",
        ("", "first time", *COLUMNS),
        [
            (
                f"{pushed.chunks.amount} x {pushed.chunks.length // MIB} MiB",
                speed(pushed.chunks.total, [pushed.first.seconds]),
                *Cost.compared(pushed.chunks.total, pushed.limit, pushed.costs),
            )
            for pushed in measured
        ],
    )
    show(
        f"{transport}: one chunk, from READY locally to READY at the peer, median ms",
        ("", "limit", "kvtier", "overhead"),
        [
            (
                f"{pushed.chunks.length // MIB} MiB",
                (limit := statistics.median(cost.seconds for cost in pushed.single_limit) * 1e3),
                (median := statistics.median(cost.seconds for cost in pushed.single) * 1e3),
                median - limit,
            )
            for pushed in measured
        ],
    )


class Pushes:
    """Pushes chunks of one length; new ones each time, so that the peer does not hold them yet."""

    def __init__(self, instance: Instance, to: str, fresh: Callable[[int], ChunkSet]) -> None:
        self._instance = instance
        self._to = to
        self._fresh = fresh

    async def measure(self, extent: Extent, length: int) -> Pushed:
        """Measure transfers and writes alternately."""
        count = extent.pushed_bytes // length
        first = await self.transfer_kv(count)
        await self.write(count)
        limit, costs = await self._interleave(extent.turns, count)
        single_limit, single = await self._interleave(extent.single_turns, 1)
        return Pushed(ChunkSet(0, count, length), first, limit, costs, single_limit, single)

    async def _interleave(self, turns: int, count: int) -> tuple[list[Cost], list[Cost]]:
        limit, costs = [], []
        for turn in range(turns):
            if turn % 2:
                limit.append(await self.write(count))
            costs.append(await self.transfer_kv(count))
            if not turn % 2:
                limit.append(await self.write(count))
        return limit, costs

    async def transfer_kv(self, count: int) -> Cost:
        """Transfer chunks through the whole stack."""
        chunks = self._fresh(count)
        store(self._instance.cache, chunks)
        with Meter() as meter:
            result = await self._instance.transfer_kv(self._to, chunks.keys).finish(FINISH_SECONDS)
        expect(result.leading == count, f"{result.leading} of {count} chunks arrived: {result.last_error}")
        expect(result.pushed_bytes == chunks.total, "the peer held some chunks before")
        await self._instance.cache.clear(chunks.keys)
        return meter.cost

    async def write(self, count: int) -> Cost:
        """Write chunks over the link alone."""
        chunks = self._fresh(count)
        store(self._instance.cache, chunks)
        found = self._instance.cache.look_up(Query(chunks.keys))
        transfer = self._instance._kv_transfers
        assert transfer is not None
        async with transfer.peers.checkout(self._to) as source:
            remotes = await self._reserve(source, found)
            views = [
                chunk.lease.view[HEADER_BYTES : HEADER_BYTES + remote.length]
                for chunk, remote in zip(found.chunks, remotes, strict=True)
            ]
            with Meter() as meter:
                outcomes = await source.write(list(zip(remotes, views, strict=True)))
            views.clear()
            expect(
                all(outcome is Outcome.OK for outcome in outcomes), f"not all chunks were written: {outcomes}"
            )
            source.release(remotes)
            await source.contains([])  # The answer means that the room has been released.
        found.release()
        await self._instance.cache.clear(chunks.keys)
        return meter.cost

    async def _reserve(self, source: Source, found: FoundPrefix) -> list[RemoteLease]:
        target = Pusher(source, self._instance.cache.memory.sealer)
        headers = [ChunkHeader.parse(chunk.lease.view) for chunk in found.chunks]
        remotes: list[RemoteLease] = []
        for start in range(0, len(headers), MAX_RESERVED):
            room = await target.reserve(headers[start : start + MAX_RESERVED])
            remotes += room.leases.values()
        expect(len(remotes) == len(headers), f"room for {len(remotes)} of {len(headers)} chunks only")
        return remotes


if __name__ == "__main__":
    main()
