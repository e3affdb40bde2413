"""A transport and its limit between two processes of this host, each with a real arena.

The limit of ``tcp`` is the same bytes by hand on as many blocking sockets, each in a thread; that of ``nixl``
one NIXL transfer by hand, in a busy loop, between two processes that map the same arenas and have the same
UCX variables. A third party's transport has none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from kvtier.arena import Arena, ArenaMap
from kvtier.backends.base import Outcome
from kvtier.bench.bare_nixl import BareNixl
from kvtier.bench.errors import BenchFailed
from kvtier.bench.raw_sockets import RawSockets, Span
from kvtier.bench.transport_process import family
from kvtier.slices import Lease
from kvtier.testing.transport_side import Side, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan, TransportSettings
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.tcp.settings import TcpSettings

LIMIT = "limit"
"""The name of the contestant that a transport is held against."""
STAMP_BYTES = 8
STOP_SECONDS = 10


class Mover(Protocol):
    """One way to move bytes between the two arenas."""

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans at once; the seconds that it took."""
        ...

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        """Read one span so many times; the seconds of each."""
        ...


class Contestant(NamedTuple):
    """One of those that take turns."""

    mover: Mover
    processes: Sequence[int]
    """Who works for it."""
    helpers: Sequence[int] = ()
    """Those of them that are stopped while it is another's turn: NIXL's wait for peers in a busy loop."""


class OverTransport:
    """A transport of kvtier."""

    def __init__(self, link: Link, grants: Mapping[Access, int], arena: Arena) -> None:
        self._link = link
        self._grants = grants
        self._arena = arena

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """See :meth:`Mover.move`."""
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
            told = ", ".join(sorted({outcome.value for outcome in outcomes} - {Outcome.OK.value}))
            raise BenchFailed(f"the transport did not move what it was asked to: {told}")
        return seconds

    async def one_by_one(self, span: Span, runs: int) -> list[float]:
        """See :meth:`Mover.one_by_one`."""
        return [await self.move(Access.READ, [span]) for _ in range(runs)]


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
def other_process(
    settings: Mapping[str, Any], lengths: Sequence[int], *, plugins: Sequence[str] | None
) -> Iterator[There]:
    """The other side of the transport that ``settings`` name, with slices of these lengths.

    It runs meanwhile. ``plugins``: as the setting of that name. Raises :class:`BenchFailed`.
    """
    command = [sys.executable, "-m", "kvtier.bench.transport_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([dict(settings), lengths, plugins]).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise BenchFailed("the other side of the transport did not start; what it said is above")
        said = json.loads(line)
        if "failed" in said:
            raise BenchFailed(said["failed"])
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
        process.stdin.close()  # Its input ends, and so does it.
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


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
    settings: TransportSettings, side: Side, there: There
) -> AsyncIterator[dict[str, Contestant]]:
    """The transport, under its own name, and before it its limit, where one is known."""
    link = await side.transport.connect(there.endpoint, dial_to(there.port))
    grants = {access: spans[0].grant for access, spans in there.spans.items()}
    own = family(os.getpid())
    limit: RawSockets | BareNixl | None = None
    contestants: dict[str, Contestant] = {}
    helpers: list[int] = []
    try:
        if isinstance(settings, TcpSettings):
            limit = RawSockets(side.arena, there.raw_port, settings.connections)
            contestants[LIMIT] = Contestant(limit, own)
        elif isinstance(settings, NixlSettings):
            helpers = [number for number in own if number not in (os.getpid(), there.process)]
            here = Path(f"/proc/{os.getpid()}/fd/{side.arena.fd}")
            capacities = (side.arena.capacity, there.capacity)
            limit = BareNixl(here, there.arena, capacities, settings.environment())
            contestants[LIMIT] = Contestant(limit, limit.processes, limit.processes)
        contestants[settings.type] = Contestant(OverTransport(link, grants, side.arena), own, helpers)
        yield contestants
    finally:
        if limit is not None:
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

    def clear(self, access: Access, spans: Sequence[Span]) -> None:
        """Make what a move has to bring differ from what is there."""
        for view in self._targets(access, spans):
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)

    def arrived(self, access: Access, spans: Sequence[Span]) -> bool:
        """Whether both ends of each chunk are there."""
        return [
            (bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for view in self._targets(access, spans)
        ] == [self._stamps[self.spans[access].index(span)] for span in spans]

    def _targets(self, access: Access, spans: Sequence[Span]) -> Iterator[memoryview]:
        for ours, theirs, length in spans:
            yield self._arenas[access].view(ours if access is Access.READ else theirs, length)

    def close(self) -> None:
        """Let go of the other arena."""
        self._arenas[Access.WRITE].close()


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
    """Wait for SIGSTOP to have come. Raises :class:`BenchFailed` where the process has ended."""
    deadline = perf_counter() + STOP_SECONDS
    while (state := state_of(process)) != "T":
        if state in "ZX":
            raise BenchFailed(f"process {process}, which moves bytes here, has ended")
        if perf_counter() > deadline:
            raise BenchFailed(f"process {process} does not stop: it is in state {state}")


def state_of(process: int) -> str:
    """As in ps(1): T is stopped, Z has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
