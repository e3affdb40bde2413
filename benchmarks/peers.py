"""Compare lookups at peers with a plain round trip, and fetches from peers with the transport's own read.

::

    python -m benchmarks.peers                          # tcp and nixl, 8 GiB of memory, two minutes each
    python -m benchmarks.peers --transport tcp --peers 1 --part lookups

Instances in separate processes on loopback are each other's peers, with mutual authentication. Chunks in a
peer's memory are fetched through the whole cache: lookup, remote, read, verification of the header, release.
The limit of a lookup is a round trip of as many bytes on a raw socket. The limit of a fetch is one batch of
the same bytes over the same links, split evenly between the peers. If both keep all cores busy, the fetch
cannot come closer to the limit than their CPU times do: all processes share the cores of one machine.
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

from benchmarks.common import MIB, parse, show, speed
from benchmarks.peers_process import (
    LENGTHS,
    NAMESPACE,
    ChunkSet,
    PeerProcess,
    number_in,
    opened,
    peer_process,
    settings_of,
)
from benchmarks.transports import COLUMNS, TRANSPORTS, Cost, Meter
from kvtier.backends.base import Outcome
from kvtier.instance import Instance
from kvtier.lab.bench import raw_resp
from kvtier.peers.backend import PeersBackend
from kvtier.peers.client import drop_leases
from kvtier.peers.protocol import Granted, Lookup
from kvtier.peers.source import Source
from kvtier.pipeline.query import Expected, Query
from kvtier.rpc.frames import encode
from kvtier.testing.backend import make_key
from kvtier.testing.servers import free_port

PARTS = ("lookups", "fetch")
TOKENS = 32_768
CONNECT_SECONDS = 30
HELD_BYTES = 4096
"""Size of the chunks that are looked up. It does not affect lookups."""
RUNS_IN_A_ROW = 10
FIRST_UNKNOWN = 1 << 40
"""Number of the first chunk that no instance holds."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    prompt_chunks: Sequence[int]
    """Chunks per prompt."""
    runs: int
    fetched_bytes: int
    chunk_bytes: Sequence[int]
    turns: int


FULL = Extent([TOKENS // 256, TOKENS // 16], 100, 1024 * MIB, [32 * MIB, 2 * MIB], 5)
SMALL = Extent([16], 3, 8 * MIB, [2 * MIB], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare peers with the limits of their transport.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument(
        "--peers", action="append", type=int, help="number of peers; repeatable; default: 1, 2 and 3"
    )
    options = parse(parser)
    extent = SMALL if options.small else FULL
    peer_counts = options.peers or ([1, 2] if options.small else [1, 2, 3])
    for transport in options.transport or TRANSPORTS:
        for part in options.part or PARTS:
            if part == "lookups":
                anyio.run(measure_lookups, transport, extent, peer_counts)
            else:
                anyio.run(measure_fetches, transport, extent, peer_counts)


def sets_of(lengths: Sequence[tuple[int, int]]) -> list[ChunkSet]:
    """Return a prompt for each pair of a chunk count and chunk length. No prompt is a prefix of another."""
    return [ChunkSet(1 + (index << 24), count, length) for index, (count, length) in enumerate(lengths)]


@contextmanager
def peers(
    transport: str, count: int, own_port: int, sets: Sequence[ChunkSet], *, checksum: bool
) -> Iterator[tuple[list[int], list[PeerProcess]]]:
    """Run peers of the instance that will listen at ``own_port``; yield their ports and processes."""
    ports = [free_port() for _ in range(count)]
    capacity = capacity_for(sum(chunks.total for chunks in sets))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                peer_process(settings_of(transport, port, [own_port], capacity, checksum=checksum), sets)
            )
            for port in ports
        ]
        yield ports, processes


def capacity_for(length: int) -> int:
    """Return a capacity at which ``length`` bytes do not reach the watermark of eviction."""
    return 2 * length + 16 * MIB


async def connected(instance: Instance) -> list[Source]:
    """Wait until all peers are connected, and return them."""
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


# Lookups.


async def measure_lookups(transport: str, extent: Extent, peer_counts: Sequence[int]) -> None:
    """Print a table for each prompt length."""
    sets = sets_of([(count, HELD_BYTES) for count in extent.prompt_chunks])
    own_port = free_port()
    rows: dict[int, list[tuple[str, Sequence[float]]]] = defaultdict(list)
    with peers(transport, max(peer_counts), own_port, sets, checksum=True) as (ports, processes):
        for number in peer_counts:
            capacity = capacity_for(max(chunks.total for chunks in sets))
            settings = settings_of(transport, own_port, ports[:number], capacity, checksum=True)
            async with opened(settings) as instance:
                await connected(instance)
                for chunks in sets:
                    rows[chunks.amount] += await measure_prompt(
                        instance, processes[0], chunks, extent.runs, number
                    )
    for count, results in rows.items():
        cells = [(name, *in_microseconds(seconds)) for name, seconds in results]
        title = f"{transport}: a prompt of {count:,} chunks, all held by each peer"
        show(title, ("", "median µs", "p99 µs"), cells)


async def measure_prompt(
    instance: Instance, process: PeerProcess, chunks: ChunkSet, runs: int, peers: int
) -> list[tuple[str, list[float]]]:
    """Return the seconds of each kind of lookup."""
    lookups = Lookups(instance, chunks)
    limit = RoundTrip(process, chunks)
    contestants = {
        limit.name: limit.ask,
        f"PeersBackend.held_prefix, {format_peers(peers)}": lookups.held_prefix,
        f"lookup until answered, {format_peers(peers)}": lookups.look_up,
        f"lookup of an unknown prompt, {format_peers(peers)}": lookups.look_up_unknown,
    }
    seconds = await interleave_calls(contestants, runs)
    limit.close()
    rows = [(name, taken) for name, taken in seconds.items() if peers == 1 or name != limit.name]
    return [
        *rows,
        (f"lookup until fetched ({chunks.length} bytes each), {format_peers(peers)}", lookups.fetched),
    ]


class Lookups:
    """Lookups of one prompt. Each method runs one lookup and returns its seconds."""

    def __init__(self, instance: Instance, chunks: ChunkSet) -> None:
        self._instance = instance
        self._chunks = chunks
        self._expected = Expected(NAMESPACE, [chunks.length] * chunks.amount)
        self._fresh = iter(range(FIRST_UNKNOWN, 1 << 62))
        self.fetched: list[float] = []
        """Seconds until all bytes were fetched, for each call of :meth:`look_up`."""

    async def held_prefix(self) -> float:
        backend, keys = backend_of(self._instance), self._chunks.keys
        started = perf_counter()
        held = await backend.held_prefix(keys)
        seconds = perf_counter() - started
        expect(held == len(keys), f"{held} of {len(keys)} chunks are held")
        drop_leases(backend.clients, keys)
        return seconds

    async def look_up(self) -> float:
        keys = self._chunks.keys
        started = perf_counter()
        found = self._instance.cache.look_up(Query(keys), self._expected)
        await found.answered.wait()
        seconds = perf_counter() - started
        expect(len(found.chunks) == len(keys), f"{len(found.chunks)} of {len(keys)} chunks are found")
        await found.settle(None)
        self.fetched.append(perf_counter() - started)
        expect(found.ready == len(keys), f"{found.ready} of {len(keys)} chunks were fetched")
        found.release()
        await clear_memory(self._instance, self._chunks)
        return seconds

    async def look_up_unknown(self) -> float:
        unknown_keys = [make_key(next(self._fresh)) for _ in self._chunks.keys]
        started = perf_counter()
        found = self._instance.cache.look_up(Query(unknown_keys), self._expected)
        await found.answered.wait()
        seconds = perf_counter() - started
        expect(not found.chunks, "an unknown prompt was found")
        return seconds


class RoundTrip:
    """A plain round trip, with a request and an answer as long as those of a lookup."""

    def __init__(self, process: PeerProcess, chunks: ChunkSet) -> None:
        count = chunks.amount
        offsets = [chunk << 20 for chunk in range(count)]
        answer = Granted(1, (1 << 63) - 1, list(range(count)), offsets, [chunks.length] * count, count)
        self._request = memoryview(encode(Lookup(1, bytes(32 * count), True)))
        self._answer = memoryview(bytearray(len(encode(answer))))
        self._socket = raw_resp.connected(("127.0.0.1", process.echo_port))
        self.name = f"limit: plain round trip, {len(self._request):,} and {len(self._answer):,} bytes"

    async def ask(self) -> float:
        started = perf_counter()
        self._socket.sendmsg([LENGTHS.pack(len(self._request), len(self._answer)), self._request])
        raw_resp.fill(self._socket, self._answer)
        return perf_counter() - started

    def close(self) -> None:
        self._socket.close()


async def interleave_calls(
    contestants: Mapping[str, Callable[[], Awaitable[float]]], runs: int
) -> dict[str, list[float]]:
    """Alternate between contestants after some runs, without the first of these; return the seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(-(-runs // RUNS_IN_A_ROW)):
        for name, contestant in contestants.items():
            for run in range(-1, RUNS_IN_A_ROW):
                took = await contestant()
                # The release after a lookup must not be part of the next one.
                await anyio.sleep(0.002)
                if run >= 0:
                    seconds[name].append(took)
    return seconds


def in_microseconds(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median and the 99th percentile."""
    p99 = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
    return f"{statistics.median(seconds) * 1e6:,.0f}", f"{p99 * 1e6:,.0f}"


# Fetches.


class Fetched(NamedTuple):
    """Measurements of fetching one prompt."""

    chunks: ChunkSet
    peers: int
    checksum: bool
    first: float
    """Seconds of the first fetch, for which the peers have to compute checksums."""
    limit: Sequence[Cost]
    costs: Sequence[Cost]


async def measure_fetches(transport: str, extent: Extent, peer_counts: Sequence[int]) -> None:
    """Print one table."""
    sets = sets_of([(extent.fetched_bytes // length, length) for length in extent.chunk_bytes])
    results: list[Fetched] = []
    for checksum in (False, True):
        own_port = free_port()
        with peers(transport, max(peer_counts), own_port, sets, checksum=checksum) as (ports, _):
            for number in peer_counts:
                capacity = capacity_for(extent.fetched_bytes)
                settings = settings_of(transport, own_port, ports[:number], capacity, checksum=checksum)
                async with opened(settings) as instance:
                    await connected(instance)
                    for chunks in sets:
                        first, limit, costs = await measure_fetch(instance, chunks, extent.turns)
                        results.append(Fetched(chunks, number, checksum, first, limit, costs))
                        print(
                            f"{transport}: {format_peers(number)}, {chunks.length} bytes measured",
                            file=sys.stderr,
                        )
    rows = [
        (
            f"{fetched.chunks.amount} x {fetched.chunks.length // MIB} MiB, {format_peers(fetched.peers)}, "
            f"{'with' if fetched.checksum else 'without'} checksums",
            speed(fetched.chunks.total, [fetched.first]),
            *Cost.compared(fetched.chunks.total, fetched.limit, fetched.costs),
        )
        for fetched in results
    ]
    columns = ("", "first time", *COLUMNS)
    show(f"{transport}: fetching {extent.fetched_bytes // MIB} MiB from peers, GB/s", columns, rows)


async def measure_fetch(
    instance: Instance, chunks: ChunkSet, turns: int
) -> tuple[float, list[Cost], list[Cost]]:
    """Return the seconds of the first fetch, and the costs of the transport alone and of the whole cache."""
    first = await fetch_through_cache(instance, chunks)
    await read_over_links(instance, chunks)
    limit, costs = [], []
    for turn in range(turns):
        if turn % 2:
            limit.append(await read_over_links(instance, chunks))
        costs.append(await fetch_through_cache(instance, chunks))
        if not turn % 2:
            limit.append(await read_over_links(instance, chunks))
    return first.seconds, limit, costs


async def fetch_through_cache(instance: Instance, chunks: ChunkSet) -> Cost:
    """Fetch a prompt into memory as a request does."""
    cache, keys = instance.cache, chunks.keys
    expected = Expected(NAMESPACE, [chunks.length] * chunks.amount)
    with Meter() as meter:
        ready = await cache.prefetch(Query(keys), expected)
    expect(ready == len(keys), f"{ready} of {len(keys)} chunks were fetched")
    found = cache.look_up(Query(keys))
    arrived = [number_in(chunk.lease.view) for chunk in found.chunks]
    found.release()
    expect(arrived == list(chunks.numbers), "wrong contents in a chunk")
    await clear_memory(instance, chunks)
    return meter.cost


async def read_over_links(instance: Instance, chunks: ChunkSet) -> Cost:
    """Read the same bytes into the same memory with the transport alone, an equal share from each peer."""
    sources = await connected(instance)
    leases = [instance.cache.arena.allocate(chunks.length) for _ in chunks.numbers]
    views = [lease.view for lease in leases if lease is not None]
    batches = []
    for index, source in enumerate(sources):
        share = slice(index, None, len(sources))
        keys = chunks.keys[share]
        await source.look_up(keys, prefix=False)
        remotes = [remote for key in keys if (remote := source.leases.take(key)) is not None]
        expect(len(remotes) == len(keys), f"{len(remotes)} of {len(keys)} chunks are promised")
        await source.readable([remote for remote in remotes if not remote.ready])
        batches.append((source, list(zip(remotes, views[share], strict=True))))
    with Meter() as meter:
        outcomes = await asyncio.gather(*(source.read(reads) for source, reads in batches))
    expect(all(outcome is Outcome.OK for batch in outcomes for outcome in batch), f"not all read: {outcomes}")
    expect([number_in(view) for view in views] == list(chunks.numbers), "wrong contents in a chunk")
    for source, reads in batches:
        source.release([remote for remote, _ in reads])
    views.clear()
    for lease in leases:
        if lease is not None:
            lease.release()
    return meter.cost


async def clear_memory(instance: Instance, chunks: ChunkSet) -> None:
    """Delete the chunks, and wait until their memory is free."""
    await instance.cache.clear(chunks.keys)
    with anyio.fail_after(CONNECT_SECONDS):
        while instance.cache.arena.leases:  # noqa: ASYNC110 - no event
            await anyio.sleep(0.001)


def format_peers(peers: int) -> str:
    return "1 peer" if peers == 1 else f"{peers} peers"


def expect(ok: bool, error: str) -> None:
    """End the benchmark with ``error`` unless ``ok``."""
    if not ok:
        raise SystemExit(f"invalid measurement: {error}")


if __name__ == "__main__":
    main()
