"""The transports between peers beside the limits of their media, in the same run.

::

    python -m benchmarks.transports                     # tcp and nixl, 2 GiB of memory, a minute each
    python -m benchmarks.transports --transport nixl --ucx TLS=tcp

Two processes on loopback, each with a real arena; a row's chunks are one batch, read from the other arena or
written into it, by each side in turn. The limit of ``tcp`` is the same bytes by hand on as many blocking
sockets, each in a thread; that of ``nixl`` one NIXL transfer by hand, in a busy loop, between two processes
that map the same arenas and have the same UCX variables. Processor time is that of all processes that work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import anyio

from benchmarks.common import MIB, ratio, show, speed
from benchmarks.transports_nixl import BareNixl
from benchmarks.transports_process import cpu_seconds, family
from benchmarks.transports_raw import RawSockets, Span
from kvtier.arena import Arena, ArenaMap, Lease
from kvtier.backends.base import Outcome
from kvtier.plugins import Plugins
from kvtier.testing.transport_side import Side, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan
from kvtier.transports.nixl.settings import NixlSettings

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
SMALL_BYTES = 4096
SMALL_AT_ONCE = 100
"""Small reads in a row before the other side has its turn."""
STAMP_BYTES = 8
STOP_SECONDS = 10


class Extent(NamedTuple):
    """How much is measured."""

    chunk_bytes: int
    depths: Sequence[int]
    bytes_a_row: int
    """So many each side moves, in at least as many turns as ``least_turns``."""
    least_turns: int
    small_runs: int


FULL = Extent(32 * MIB, [1, 4, 16], 2048 * MIB, 7, 2000)
QUICK = Extent(MIB, [1, 4], 0, 1, 100)


class Mover(Protocol):
    """One way to move bytes between the two arenas."""

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans at once; the seconds that it took."""
        ...

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        """Read one span so many times; the seconds of each."""
        ...


class Contestant(NamedTuple):
    mover: Mover
    processes: Sequence[int]
    """Who works for it."""
    helpers: Sequence[int] = ()
    """Those of them that are stopped while it is another's turn: NIXL's wait for peers in a busy loop."""


class Row(NamedTuple):
    """What came of one kind of move, by contestant."""

    access: Access
    depth: int
    seconds: Mapping[str, Sequence[float]]
    cpu_seconds: Mapping[str, float]
    """Of all turns together."""


class OverTransport:
    """A transport of kvtier."""

    def __init__(self, link: Link, grants: Mapping[Access, int], arena: Arena) -> None:
        self._link = link
        self._grants = grants
        self._arena = arena

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        grant = self._grants[access]
        items = [
            (RemoteSpan(grant, theirs, length), self._arena.view(ours, length))
            for ours, theirs, length in spans
        ]
        started = perf_counter()
        if access is Access.READ:
            outcomes = await self._link.read(items)
        else:
            outcomes = await self._link.write([(view, span) for span, view in items])
        seconds = perf_counter() - started
        if set(outcomes) != {Outcome.OK}:
            raise SystemExit(f"the transport did not move what it was asked to: {outcomes}")
        return seconds

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        return [await self.move(Access.READ, [span]) for _ in range(runs)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The transports between peers beside their limits.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--connections", type=int, default=4, help="of tcp; default: %(default)s")
    parser.add_argument("--ucx", action="append", default=[], metavar="NAME=VALUE", help="a variable of UCX")
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    settings: dict[str, dict[str, Any]] = {
        "tcp": {"type": "tcp", "connections": given.connections},
        "nixl": {"type": "nixl", "ucx": dict(text.split("=", 1) for text in given.ucx)},
    }
    for name in given.transport or TRANSPORTS:
        anyio.run(measure, name, settings[name], QUICK if given.quick else FULL)


async def measure(name: str, settings: Mapping[str, Any], extent: Extent) -> None:
    """Print the tables of one transport."""
    count = max(extent.depths)
    lengths = [extent.chunk_bytes] * count
    kind = Plugins.load([]).transport(name)
    with other_process(name, settings, lengths) as there:
        async with Side.open(kind, settings, sum(lengths) + MIB) as side:
            leases = [side.arena.allocate(length) for length in lengths]
            spans = spans_between([lease for lease in leases if lease is not None], there)
            async with contestants_of(name, settings, side, there) as contestants:
                check = Check(side, there, spans)
                rows = []
                for access in Access:
                    for depth in extent.depths:
                        rows.append(await in_turns(contestants, check, access, depth, extent))
                        print(f"{name}: {access.value} {depth} measured", file=sys.stderr)
                small = await small_reads(contestants, spans[Access.READ][0], extent.small_runs)
            check.close()
            for lease in leases:
                if lease is not None:
                    lease.release()
    size = extent.chunk_bytes
    show(f"{name}, chunks of {size // MIB} MiB, GB/s beside the limit", *of_speed(rows, size))
    show(f"{name}, processor seconds a GB, of both hosts", *of_cost(rows, size, extent))
    show(f"{name}, reading {SMALL_BYTES} bytes, µs", *of_latency(small))


class There(NamedTuple):
    """What the other process has said of itself."""

    process: int
    endpoint: bytes
    port: int
    raw_port: int
    arena: Path
    capacity: int
    spans: Mapping[Access, Sequence[RemoteSpan]]


@contextmanager
def other_process(name: str, settings: Mapping[str, Any], lengths: Sequence[int]) -> Iterator[There]:
    """It runs meanwhile."""
    command = [sys.executable, "-m", "benchmarks.transports_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([name, settings, lengths]).encode() + b"\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        yield There(
            process.pid,
            bytes.fromhex(said["endpoint"]),
            said["port"],
            said["raw_port"],
            Path(said["arena"]),
            said["capacity"],
            {access: [RemoteSpan(*span) for span in said["spans"][access.value]] for access in Access},
        )
    finally:
        process.communicate()  # Its input ends, and so does it.


def spans_between(leases: Sequence[Lease], there: There) -> dict[Access, list[Span]]:
    """Each slice here with the one there that it is read from, or written to."""
    return {
        access: [
            Span(lease.offset, theirs.offset, theirs.length)
            for lease, theirs in zip(leases, there.spans[access], strict=True)
        ]
        for access in Access
    }


@asynccontextmanager
async def contestants_of(
    name: str, settings: Mapping[str, Any], side: Side, there: There
) -> AsyncIterator[dict[str, Contestant]]:
    """The transport and its limit."""
    limit: RawSockets | BareNixl
    link = await side.transport.connect(there.endpoint, dial_to(there.port))
    grants = {access: spans[0].grant for access, spans in there.spans.items()}
    over_transport = OverTransport(link, grants, side.arena)
    own = family(os.getpid())
    helpers = [number for number in own if number not in (os.getpid(), there.process)]
    if name == "tcp":
        limit = RawSockets(side.arena, there.raw_port, settings["connections"])
        contestants = {"limit": Contestant(limit, own), name: Contestant(over_transport, own)}
    else:
        here = Path(f"/proc/{os.getpid()}/fd/{side.arena.fd}")
        environment = NixlSettings.model_validate(settings).environment()
        limit = BareNixl(here, there.arena, (side.arena.capacity, there.capacity), environment)
        contestants = {
            "limit": Contestant(limit, limit.processes, limit.processes),
            name: Contestant(over_transport, own, helpers),
        }
    try:
        yield contestants
    finally:
        limit.close()
        await link.close()


class Check:
    """Sees to it that bytes arrive: both ends of each chunk are cleared before, and looked at after."""

    def __init__(self, side: Side, there: There, spans: Mapping[Access, Sequence[Span]]) -> None:
        fd = os.open(there.arena, os.O_RDWR)
        self._arenas = {Access.READ: side.arena, Access.WRITE: ArenaMap(fd, there.capacity)}
        self.spans = spans
        length = spans[Access.READ][0].length
        patterns = [pattern(index, length) for index in range(len(spans[Access.READ]))]
        self._stamps = [(whole[:STAMP_BYTES], whole[-STAMP_BYTES:]) for whole in patterns]
        for span, whole in zip(spans[Access.WRITE], patterns, strict=True):
            side.arena.view(span.ours, span.length)[:] = whole

    def clear(self, access: Access, depth: int) -> None:
        for view in self._targets(access, depth):
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)

    def arrived(self, access: Access, depth: int) -> bool:
        return [
            (bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for view in self._targets(access, depth)
        ] == self._stamps[:depth]

    def _targets(self, access: Access, depth: int) -> Iterator[memoryview]:
        for ours, theirs, length in self.spans[access][:depth]:
            yield self._arenas[access].view(ours if access is Access.READ else theirs, length)

    def close(self) -> None:
        self._arenas[Access.WRITE].close()


async def in_turns(
    contestants: Mapping[str, Contestant], check: Check, access: Access, depth: int, extent: Extent
) -> Row:
    """After one turn that is not counted. Who begins changes."""
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, float] = dict.fromkeys(contestants, 0.0)
    for turn in range(turns_of(extent, depth) + 1):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            mover, processes, _ = contestants[name]
            check.clear(access, depth)
            with alone(contestants, name):
                before = cpu_seconds(processes)
                took = await mover.move(access, check.spans[access][:depth])
                worked = cpu_seconds(processes) - before
            if not check.arrived(access, depth):
                raise SystemExit(f"{name} has not moved what it was to move")
            if turn:
                seconds[name].append(took)
                cpu[name] += worked
    return Row(access, depth, seconds, cpu)


@contextmanager
def alone(contestants: Mapping[str, Contestant], name: str) -> Iterator[None]:
    """While this lasts, the others' helpers stand still."""
    others = [number for other in contestants if other != name for number in contestants[other].helpers]
    for number in others:
        os.kill(number, signal.SIGSTOP)
    try:
        for number in others:
            wait_until_stopped(number)
        yield
    finally:
        for number in others:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)


def wait_until_stopped(process: int) -> None:
    deadline = perf_counter() + STOP_SECONDS
    while (state := state_of(process)) != "T":
        if state in "ZX":
            raise SystemExit(f"process {process}, which moves bytes here, has ended")
        if perf_counter() > deadline:
            raise SystemExit(f"process {process} does not stop: it is in state {state}")


def state_of(process: int) -> str:
    """As in ps(1): T is stopped, Z has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def turns_of(extent: Extent, depth: int) -> int:
    return max(extent.bytes_a_row // (extent.chunk_bytes * depth), extent.least_turns)


async def small_reads(
    contestants: Mapping[str, Contestant], span: Span, runs: int
) -> dict[str, Sequence[float]]:
    """Seconds of each of so many reads."""
    span = span._replace(length=SMALL_BYTES)
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, runs // SMALL_AT_ONCE):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            with alone(contestants, name):
                took = await contestants[name].mover.one_by_one(span, SMALL_AT_ONCE)
            if turn >= 0:
                seconds[name] += took
    return dict(seconds)


def of_speed(rows: Sequence[Row], size: int) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the first table."""
    name = transport_of(rows[0].seconds)
    cells: list[Sequence[object]] = []
    for access, depth, seconds, _ in rows:
        ours, limit = seconds[name], seconds["limit"]
        ratios = sorted(there / here for here, there in zip(ours, limit, strict=True))
        cells.append(
            (
                f"{access.value} {depth} in flight",
                speed(depth * size, limit),
                speed(depth * size, ours),
                ratio(ours, limit),
                f"{ratios[len(ratios) // 4]:.2f} to {ratios[-len(ratios) // 4]:.2f}",
            )
        )
    return ("", "limit", name, f"{name} : limit", "middle half"), cells


def of_cost(rows: Sequence[Row], size: int, extent: Extent) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the second table."""
    name = transport_of(rows[0].seconds)
    cells: list[Sequence[object]] = []
    for access, depth, seconds, cpu in rows:
        moved = depth * size * len(seconds[name]) / 1e9
        limit, ours = cpu["limit"] / moved, cpu[name] / moved
        cells.append((f"{access.value} {depth} in flight", limit, ours, ours / limit))
    return ("", "limit", name, f"{name} : limit"), cells


def of_latency(small: Mapping[str, Sequence[float]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Columns and rows of the third table."""
    name = transport_of(small)
    cells: list[Sequence[object]] = []
    for label, share in (("median", 0.5), ("99 %", 0.99)):
        limit, ours = (percentile(small[who], share) * 1e6 for who in ("limit", name))
        cells.append((label, f"{limit:,.0f}", f"{ours:,.0f}", limit / ours))
    return ("", "limit", name, f"{name} : limit"), cells


def percentile(seconds: Sequence[float], share: float) -> float:
    if share == 0.5:
        return statistics.median(seconds)
    return sorted(seconds)[int(share * (len(seconds) - 1))]


def transport_of(by_name: Mapping[str, object]) -> str:
    return next(name for name in by_name if name != "limit")


if __name__ == "__main__":
    main()
