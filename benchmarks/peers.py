"""Look-ups at peers and fetching from them, beside a bare round trip and the transport's own read.

::

    python -m benchmarks.peers                          # tcp and nixl, 8 GiB of memory, two minutes each
    python -m benchmarks.peers --transport tcp --peers 1 --part look-ups

Instances in processes of their own on loopback are each other's peers, with mutual authentication. Chunks lie
in a peer's memory and come into this one's through the whole of a cache: look-up, promise, read, verification
of the header, release. The limit of a look-up is as many bytes there and back on a raw socket; that of
fetching is one batch of the same bytes, by the same links, split evenly between the peers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import NamedTuple

import anyio

from benchmarks.common import MIB, ratio, show, speed
from benchmarks.peers_process import (
    NAMESPACE,
    ChunkSet,
    PeerProcess,
    free_ports,
    number_in,
    opened,
    peer_process,
    settings_of,
)
from benchmarks.transports import TRANSPORTS
from kvtier.backends.base import Outcome
from kvtier.bench.raw_sockets import RawSockets
from kvtier.instance import Instance
from kvtier.peers.backend import PeersBackend
from kvtier.peers.protocol import Granted, LookUp
from kvtier.peers.source import Source
from kvtier.pipeline.discover import Expected
from kvtier.sockets.frames import encode
from kvtier.testing.backend import make_key

PARTS = ("look-ups", "fetch")
TOKENS = 32_768
CONNECT_SECONDS = 30
HELD_BYTES = 4096
"""What is looked up is that long: a look-up does not see it."""
RUNS_IN_A_ROW = 10
NOBODYS = 1 << 40
"""The number of the first chunk that nobody holds."""


class Extent(NamedTuple):
    """How much is measured."""

    asked: Sequence[int]
    """Chunks of a prompt."""
    runs: int
    fetched_bytes: int
    chunk_bytes: Sequence[int]
    turns: int


FULL = Extent([TOKENS // 256, TOKENS // 16], 100, 1024 * MIB, [32 * MIB, 2 * MIB], 5)
QUICK = Extent([16], 3, 8 * MIB, [2 * MIB], 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Peers beside the limits of what connects them.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--peers", action="append", type=int, help="so many at once; default: 1, 2 and 3")
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    extent = QUICK if given.quick else FULL
    numbers = given.peers or ([1, 2] if given.quick else [1, 2, 3])
    for transport in given.transport or TRANSPORTS:
        for part in given.part or PARTS:
            if part == "look-ups":
                anyio.run(measure_look_ups, transport, extent, numbers)
            else:
                anyio.run(measure_fetching, transport, extent, numbers)


def sets_of(lengths: Sequence[tuple[int, int]]) -> list[ChunkSet]:
    """Prompts of so many chunks of such a length each, none of them the beginning of another."""
    return [ChunkSet(1 + (index << 24), count, length) for index, (count, length) in enumerate(lengths)]


@contextmanager
def peers(
    transport: str, count: int, here: int, sets: Sequence[ChunkSet], *, checksum: bool
) -> Iterator[tuple[list[int], list[PeerProcess]]]:
    """Peers of the instance that will listen at ``here``; their ports."""
    ports = free_ports(count)
    capacity = capacity_for(sum(chunks.total for chunks in sets))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                peer_process(settings_of(transport, port, [here], capacity, checksum=checksum), sets)
            )
            for port in ports
        ]
        yield ports, processes


def capacity_for(length: int) -> int:
    """Far enough from the watermark at which eviction begins."""
    return 2 * length + 16 * MIB


async def connected(instance: Instance) -> list[Source]:
    """The peers, when each of them can be asked."""
    clients = backend_of(instance).clients
    with anyio.fail_after(CONNECT_SECONDS):
        while True:
            sources = [client.source for client in clients if client.source is not None]
            if len(sources) == len(clients):
                return sources
            await anyio.sleep(0.05)


def backend_of(instance: Instance) -> PeersBackend:
    assert instance.peers is not None
    return instance.peers


# Look-ups.


async def measure_look_ups(transport: str, extent: Extent, numbers: Sequence[int]) -> None:
    """Print a table for each length of a prompt."""
    sets = sets_of([(count, HELD_BYTES) for count in extent.asked])
    (here,) = free_ports(1)
    rows: dict[int, list[tuple[str, Sequence[float]]]] = defaultdict(list)
    with peers(transport, max(numbers), here, sets, checksum=True) as (ports, processes):
        for number in numbers:
            capacity = capacity_for(max(chunks.total for chunks in sets))
            settings = settings_of(transport, here, ports[:number], capacity, checksum=True)
            async with opened(settings) as instance:
                await connected(instance)
                for chunks in sets:
                    rows[chunks.amount] += await look_ups(instance, processes[0], chunks, extent.runs, number)
    for count, measured in rows.items():
        cells = [(name, *in_microseconds(seconds)) for name, seconds in measured]
        title = f"{transport}: a prompt of {count:,} chunks, all of them at each peer"
        show(title, ("", "median µs", "99 % µs"), cells)


async def look_ups(
    instance: Instance, process: PeerProcess, chunks: ChunkSet, runs: int, peers: int
) -> list[tuple[str, list[float]]]:
    """The seconds of each kind of look-up."""
    timed = LookUps(instance, chunks)
    limit = RoundTrip(instance, process, chunks)
    contestants = {
        limit.name: limit.ask,
        f"PeersBackend.held_prefix, {of(peers)}": timed.held_prefix,
        f"look-up and answered, {of(peers)}": timed.whole,
        f"of what nobody holds, {of(peers)}": timed.nobodys,
    }
    seconds = await alternating(contestants, runs)
    limit.close()
    rows = [(name, taken) for name, taken in seconds.items() if peers == 1 or name != limit.name]
    return [*rows, (f"look-up and all {chunks.length} bytes of each there, {of(peers)}", timed.fetched)]


class LookUps:
    """Look-ups of one prompt: each call is one, and its seconds."""

    def __init__(self, instance: Instance, chunks: ChunkSet) -> None:
        self._instance = instance
        self._chunks = chunks
        self._expected = Expected(NAMESPACE, [chunks.length] * chunks.amount)
        self._fresh = iter(range(NOBODYS, 1 << 62))
        self.fetched: list[float] = []
        """The seconds until all bytes were there, of each :meth:`whole`."""

    async def held_prefix(self) -> float:
        backend, keys = backend_of(self._instance), self._chunks.keys
        started = perf_counter()
        held = await backend.held_prefix(keys)
        seconds = perf_counter() - started
        expect(held == len(keys), f"{held} of {len(keys)} chunks are held")
        backend._drop_promises(keys)
        return seconds

    async def whole(self) -> float:
        keys = self._chunks.keys
        started = perf_counter()
        found = self._instance.cache.look_up(keys, self._expected)
        await found.answered.wait()
        seconds = perf_counter() - started
        expect(len(found.chunks) == len(keys), f"{len(found.chunks)} of {len(keys)} chunks are found")
        await found.settle(None)
        self.fetched.append(perf_counter() - started)
        expect(found.ready == len(keys), f"{found.ready} of {len(keys)} chunks have come")
        found.release()
        await emptied(self._instance, self._chunks)
        return seconds

    async def nobodys(self) -> float:
        unknown = [make_key(next(self._fresh)) for _ in self._chunks.keys]
        started = perf_counter()
        found = self._instance.cache.look_up(unknown, self._expected)
        await found.answered.wait()
        seconds = perf_counter() - started
        expect(not found.chunks, "what nobody holds is found")
        return seconds


class RoundTrip:
    """A question and an answer as long as those of a look-up, and nothing else."""

    def __init__(self, instance: Instance, process: PeerProcess, chunks: ChunkSet) -> None:
        count = chunks.amount
        offsets = [chunk << 20 for chunk in range(count)]
        answer = Granted(1, (1 << 63) - 1, list(range(count)), offsets, [chunks.length] * count, count)
        self._question = memoryview(encode(LookUp(1, bytes(32 * count), True)))
        self._answer = memoryview(bytearray(len(encode(answer))))
        self._sockets = RawSockets(instance.cache.arena, process.echo_port, 1)
        self.name = f"limit: a bare round trip, {len(self._question):,} and {len(self._answer):,} bytes"

    async def ask(self) -> float:
        started = perf_counter()
        self._sockets.ask(self._question, self._answer)
        return perf_counter() - started

    def close(self) -> None:
        self._sockets.close()


async def alternating(
    contestants: Mapping[str, Callable[[], Awaitable[float]]], runs: int
) -> dict[str, list[float]]:
    """The seconds of each, some in a row before it is the next one's turn. The first of them never counts."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(-(-runs // RUNS_IN_A_ROW)):
        for name, contestant in contestants.items():
            for run in range(-1, RUNS_IN_A_ROW):
                took = await contestant()
                # What is given back after a look-up is not part of the next.
                await anyio.sleep(0.002)
                if run >= 0:
                    seconds[name].append(took)
    return seconds


def in_microseconds(seconds: Sequence[float]) -> tuple[str, str]:
    """Median and 99th percentile."""
    worst = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
    return f"{statistics.median(seconds) * 1e6:,.0f}", f"{worst * 1e6:,.0f}"


# Fetching.


class Fetched(NamedTuple):
    """What came of fetching one prompt."""

    chunks: ChunkSet
    peers: int
    checksum: bool
    first: float
    """Seconds of the first time, when peers still have to compute their checksums."""
    limit: Sequence[float]
    seconds: Sequence[float]


async def measure_fetching(transport: str, extent: Extent, numbers: Sequence[int]) -> None:
    """Print one table."""
    sets = sets_of([(extent.fetched_bytes // length, length) for length in extent.chunk_bytes])
    measured: list[Fetched] = []
    for checksum in (False, True):
        (here,) = free_ports(1)
        with peers(transport, max(numbers), here, sets, checksum=checksum) as (ports, _):
            for number in numbers:
                capacity = capacity_for(extent.fetched_bytes)
                settings = settings_of(transport, here, ports[:number], capacity, checksum=checksum)
                async with opened(settings) as instance:
                    await connected(instance)
                    for chunks in sets:
                        first, limit, seconds = await fetching(instance, chunks, extent.turns)
                        measured.append(Fetched(chunks, number, checksum, first, limit, seconds))
                        print(f"{transport}: {of(number)}, {chunks.length} bytes measured", file=sys.stderr)
    rows = [
        (
            f"{fetched.chunks.amount} x {fetched.chunks.length // MIB} MiB, {of(fetched.peers)}, "
            f"{'with' if fetched.checksum else 'without'} checksums",
            speed(fetched.chunks.total, [fetched.first]),
            speed(fetched.chunks.total, fetched.limit),
            speed(fetched.chunks.total, fetched.seconds),
            ratio(fetched.seconds, fetched.limit),
        )
        for fetched in measured
    ]
    columns = ("", "the first time", "limit", "kvtier", "kvtier : limit")
    show(f"{transport}: fetching {extent.fetched_bytes // MIB} MiB from peers, GB/s", columns, rows)


async def fetching(
    instance: Instance, chunks: ChunkSet, turns: int
) -> tuple[float, list[float], list[float]]:
    """Seconds of the first time, of the transport alone, and of all of kvtier."""
    first = await through_cache(instance, chunks)
    await by_links(instance, chunks)
    limit, seconds = [], []
    for turn in range(turns):
        if turn % 2:
            limit.append(await by_links(instance, chunks))
        seconds.append(await through_cache(instance, chunks))
        if not turn % 2:
            limit.append(await by_links(instance, chunks))
    return first, limit, seconds


async def through_cache(instance: Instance, chunks: ChunkSet) -> float:
    """Bring a prompt into memory as a request does."""
    cache, keys = instance.cache, chunks.keys
    expected = Expected(NAMESPACE, [chunks.length] * chunks.amount)
    started = perf_counter()
    ready = await cache.prefetch(keys, expected)
    seconds = perf_counter() - started
    expect(ready == len(keys), f"{ready} of {len(keys)} chunks have come")
    found = cache.look_up(keys)
    came = [number_in(chunk.lease.view) for chunk in found.chunks]
    found.release()
    expect(came == list(chunks.numbers), "chunks hold what is of others")
    await emptied(instance, chunks)
    return seconds


async def by_links(instance: Instance, chunks: ChunkSet) -> float:
    """Read the same bytes with the transport alone, an equal part from each peer, into the same memory."""
    sources = await connected(instance)
    leases = [instance.cache.arena.allocate(chunks.length) for _ in chunks.numbers]
    views = [lease.view for lease in leases if lease is not None]
    batches = []
    for index, source in enumerate(sources):
        share = slice(index, None, len(sources))
        keys = chunks.keys[share]
        await source.look_up(keys, prefix=False)
        promises = [promise for key in keys if (promise := source.promises.take(key)) is not None]
        expect(len(promises) == len(keys), f"{len(promises)} of {len(keys)} chunks are promised")
        await source.readable([promise for promise in promises if not promise.ready])
        batches.append((source, list(zip(promises, views[share], strict=True))))
    started = perf_counter()
    outcomes = await asyncio.gather(*(source.read(reads) for source, reads in batches))
    seconds = perf_counter() - started
    expect(all(outcome is Outcome.OK for batch in outcomes for outcome in batch), f"not all read: {outcomes}")
    expect([number_in(view) for view in views] == list(chunks.numbers), "chunks hold what is of others")
    for source, reads in batches:
        source.release([promise for promise, _ in reads])
    views.clear()
    for lease in leases:
        if lease is not None:
            lease.release()
    return seconds


async def emptied(instance: Instance, chunks: ChunkSet) -> None:
    """Have nothing of it in memory."""
    await instance.cache.clear(chunks.keys)
    with anyio.fail_after(CONNECT_SECONDS):
        while instance.cache.arena.leases:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.001)


def of(peers: int) -> str:
    return "1 peer" if peers == 1 else f"{peers} peers"


def expect(fine: bool, otherwise: str) -> None:
    """Go on, or end the benchmark."""
    if not fine:
        raise SystemExit(f"the benchmark measures nothing: {otherwise}")


if __name__ == "__main__":
    main()
