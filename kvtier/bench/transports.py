"""A transport and its limit between two processes on this host, each with a real arena.

The limit of ``tcp`` is the same bytes on as many plain blocking sockets, with a thread each. The limit of
``nixl`` is one plain NIXL transfer in a busy loop, between two processes that map the same arenas and have
the same UCX variables. A third-party transport has no limit.
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

from kvtier.backends.base import Outcome
from kvtier.bench.bare_nixl import BareNixl
from kvtier.bench.errors import BenchFailed
from kvtier.bench.raw_sockets import RawSockets, Span
from kvtier.bench.transport_process import family
from kvtier.memory.arena import Arena, ArenaMap
from kvtier.memory.slices import Lease
from kvtier.testing.transport_side import Side, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan, TransportSettings
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.tcp.settings import TcpSettings

LIMIT = "limit"
"""Name of the contestant that a transport is compared with."""
STAMP_BYTES = 8
STOP_SECONDS = 10


class Mover(Protocol):
    """One way to move bytes between the two arenas."""

    async def move(self, access: Access, spans: Sequence[Span]) -> float:
        """Read or write all spans at once; return the duration in seconds."""
        ...

    async def read_repeatedly(self, span: Span, runs: int) -> list[float]:
        """Read one span ``runs`` times; return the seconds of each."""
        ...


class Contestant(NamedTuple):
    """A transport or its limit, with the processes that it uses."""

    mover: Mover
    processes: Sequence[int]
    """All processes that use CPU time for it."""
    helpers: Sequence[int] = ()
    """Processes to stop during another contestant's turn, because NIXL polls in a busy loop."""


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
            (RemoteSpan(grant, remote, length), self._arena.view(local, length))
            for local, remote, length in spans
        ]
        started = perf_counter()
        if access is Access.READ:
            outcomes = await self._link.read(items)
        else:
            outcomes = await self._link.write([(view, span) for span, view in items])
        seconds = perf_counter() - started
        if set(outcomes) != {Outcome.OK}:
            failures = ", ".join(sorted({outcome.value for outcome in outcomes} - {Outcome.OK.value}))
            raise BenchFailed(f"the transport did not transfer all chunks: {failures}")
        return seconds

    async def read_repeatedly(self, span: Span, runs: int) -> list[float]:
        """See :meth:`Mover.read_repeatedly`."""
        return [await self.move(Access.READ, [span]) for _ in range(runs)]


class OtherProcess(NamedTuple):
    """Addresses and spans that the other process reported."""

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
) -> Iterator[OtherProcess]:
    """Run a process with the transport of ``settings`` that grants slices of these lengths.

    ``plugins``: as the setting of that name. Raises :class:`BenchFailed`.
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
            raise BenchFailed("the other process of the transport did not start; its error output is above")
        reply = json.loads(line)
        if "failed" in reply:
            raise BenchFailed(reply["failed"])
        yield OtherProcess(
            process.pid,
            bytes.fromhex(reply["endpoint"]),
            reply["port"],
            reply["raw_port"],
            Path(reply["arena"]),
            reply["capacity"],
            {access: [RemoteSpan(*span) for span in reply["spans"][access.value]] for access in Access},
        )
    finally:
        process.stdin.close()  # It exits at the end of its input.
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def spans_between(leases: Sequence[Lease], other: OtherProcess) -> dict[Access, list[Span]]:
    """Pair each local slice with the remote slice that it is read from or written to."""
    return {
        access: [
            Span(lease.offset, remote.offset, remote.length)
            for lease, remote in zip(leases, other.spans[access], strict=True)
        ]
        for access in Access
    }


@asynccontextmanager
async def contestants_of(
    settings: TransportSettings, side: Side, other: OtherProcess
) -> AsyncIterator[dict[str, Contestant]]:
    """Yield the contestants by name: the limit, if any, and then the transport."""
    link = await side.transport.connect(other.endpoint, dial_to(other.port))
    grants = {access: spans[0].grant for access, spans in other.spans.items()}
    own = family(os.getpid())
    limit: RawSockets | BareNixl | None = None
    contestants: dict[str, Contestant] = {}
    helpers: list[int] = []
    try:
        if isinstance(settings, TcpSettings):
            limit = RawSockets(side.arena, other.raw_port, settings.connections)
            contestants[LIMIT] = Contestant(limit, own)
        elif isinstance(settings, NixlSettings):
            helpers = [number for number in own if number not in (os.getpid(), other.process)]
            here = Path(f"/proc/{os.getpid()}/fd/{side.arena.fd}")
            capacities = (side.arena.capacity, other.capacity)
            limit = BareNixl(here, other.arena, capacities, settings.environment())
            contestants[LIMIT] = Contestant(limit, limit.processes, limit.processes)
        contestants[settings.type] = Contestant(OverTransport(link, grants, side.arena), own, helpers)
        yield contestants
    finally:
        if limit is not None:
            limit.close()
        await link.close()


class Check:
    """Verifies transfers: the first and last bytes of each chunk are cleared before and compared after."""

    def __init__(self, side: Side, other: OtherProcess, spans: Mapping[Access, Sequence[Span]]) -> None:
        fd = os.open(other.arena, os.O_RDWR)
        self._arenas = {Access.READ: side.arena, Access.WRITE: ArenaMap(fd, other.capacity)}
        self.spans = spans
        length = spans[Access.READ][0].length
        patterns = [pattern(index, length) for index in range(len(spans[Access.READ]))]
        self._stamps = [(whole[:STAMP_BYTES], whole[-STAMP_BYTES:]) for whole in patterns]
        for span, whole in zip(spans[Access.WRITE], patterns, strict=True):
            side.arena.view(span.local, span.length)[:] = whole

    def clear(self, access: Access, spans: Sequence[Span]) -> None:
        """Clear the first and last bytes of the chunks at the destination."""
        for view in self._targets(access, spans):
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)

    def arrived(self, access: Access, spans: Sequence[Span]) -> bool:
        """Whether the first and last bytes of each chunk arrived."""
        return [
            (bytes(view[:STAMP_BYTES]), bytes(view[-STAMP_BYTES:])) for view in self._targets(access, spans)
        ] == [self._stamps[self.spans[access].index(span)] for span in spans]

    def _targets(self, access: Access, spans: Sequence[Span]) -> Iterator[memoryview]:
        for local, remote, length in spans:
            yield self._arenas[access].view(local if access is Access.READ else remote, length)

    def close(self) -> None:
        """Unmap the other process's arena."""
        self._arenas[Access.WRITE].close()


@contextmanager
def others_paused(contestants: Mapping[str, Contestant], name: str) -> Iterator[None]:
    """Stop the helpers of all other contestants (SIGSTOP) while the block runs."""
    paused = [number for rival in contestants if rival != name for number in contestants[rival].helpers]
    for number in paused:
        os.kill(number, signal.SIGSTOP)
    try:
        for number in paused:
            wait_until_stopped(number)
        yield
    finally:
        for number in paused:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)


def wait_until_stopped(process: int) -> None:
    """Wait until SIGSTOP takes effect. Raises :class:`BenchFailed` if the process exits or does not stop."""
    deadline = perf_counter() + STOP_SECONDS
    while (state := state_of(process)) != "T":
        if state in "ZX":
            raise BenchFailed(f"process {process} of a contestant has exited")
        if perf_counter() > deadline:
            raise BenchFailed(f"process {process} does not stop: it is in state {state}")


def state_of(process: int) -> str:
    """Return the state of a process as in ps(1): T is stopped, Z a zombie."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
