"""Behaviour specific to NIXL: its worker processes, and transfers that cannot be cancelled."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection, Deadline
from kvtier.concurrency.tasks import DetachedTask
from kvtier.errors import PeerError
from kvtier.memory.arena import Arena
from kvtier.memory.slices import Lease
from kvtier.testing.noise import is_poisoned, poison
from kvtier.testing.transport_sides import OtherProcess, Side, dial_nowhere, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan
from kvtier.transports.nixl.link import Endpoint, encode_endpoint
from kvtier.transports.nixl.process import MAX_STARTS
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.nixl.transport import NixlTransport
from kvtier.transports.nixl.worker import LARGE_PAGE_BYTES, map_shared
from tests.rigs.children import children, nixl_processes
from tests.rigs.mapped import flags_at

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.anyio

MIB = 1 << 20
CAPACITY = 128 * MIB
TCP_SETTINGS: dict[str, Any] = {"type": "nixl", "deadline": "20s", "ucx": {"TLS": "tcp,self"}}
"""Over TCP a transfer needs the CPU of the peer, and stops when the peer process is stopped."""
SHARED_MEMORY_SETTINGS: dict[str, Any] = {"type": "nixl", "deadline": "20s", "ucx": {"TLS": "tcp,sm,self"}}


@pytest.fixture(autouse=True)
def _no_process_leaked() -> Iterator[None]:
    before = children(os.getpid())
    yield
    # An arena does not wait for the process that populates its memory.
    deadline = time.monotonic() + 60
    while not (remaining := children(os.getpid())) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert remaining <= before


@pytest.fixture
def peer() -> Iterator[OtherProcess]:
    process = OtherProcess()
    process.start()
    yield process
    process.kill()


@asynccontextmanager
async def open_link(
    peer: OtherProcess, settings: dict[str, Any] = TCP_SETTINGS
) -> AsyncIterator[tuple[Side, NixlTransport, Link]]:
    """Open a local side, and a link from it to the peer. Check on exit that no lease is leaked."""
    endpoint, port = await peer.open(NixlTransport, settings, CAPACITY, None)
    async with Side.open(NixlTransport, settings, CAPACITY) as side:
        assert isinstance(side.transport, NixlTransport)
        link = await side.transport.connect(endpoint, dial_to(port))
        try:
            yield side, side.transport, link
        finally:
            await link.close()
        assert side.arena.leases == side.grants.leases


async def share_of_time_awake(pids: set[int]) -> float:
    """Return the share of the next 0.3 s that threads are running or runnable, summed over all threads.

    A thread that polls counts as 1, even on a busy machine.
    """
    start, before = time.monotonic(), awake_seconds(pids)
    await asyncio.sleep(0.3)
    return (awake_seconds(pids) - before) / (time.monotonic() - start)


def awake_seconds(pids: set[int]) -> float:
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            running, runnable, _ = path.read_text().split()
            total += int(running) + int(runnable)
    return total / 1e9


def serving_process(peer: OtherProcess) -> int:
    """Return the process that serves the arena of the peer."""
    (nixl_process,) = nixl_processes(peer.pid)
    return nixl_process


@asynccontextmanager
async def paused(pid: int) -> AsyncIterator[None]:
    """Stop a process for the duration of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
            await asyncio.sleep(0.001)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def memory(side: Side, length: int) -> Iterator[Lease]:
    """Allocate memory of the arena."""
    lease = side.arena.allocate(length)
    assert lease is not None
    yield lease
    lease.release()


async def test_memory_outside_the_arena_and_read_only_memory(peer: OtherProcess) -> None:
    async with open_link(peer, SHARED_MEMORY_SETTINGS) as (side, _, link):
        first, second = await peer.grant([5000, 3 * MIB], seed=3)
        read = [bytearray(5000), bytearray(3 * MIB)]
        views = [memoryview(data) for data in read]
        assert await link.read(list(zip((first, second), views, strict=True))) == [Outcome.OK] * 2
        assert read == [pattern(3, 5000), pattern(4, 3 * MIB)]

        (target,) = await peer.grant([5000], access=Access.WRITE)
        assert await link.write([(memoryview(pattern(9, 5000)), target)]) == [Outcome.OK]
        assert await link.read([(target, views[0])]) == [Outcome.OK]
        assert read[0] == pattern(9, 5000)
        with memory(side, side.arena.capacity):
            assert await link.read([(first, views[0])]) == [Outcome.FAILED]


async def test_empty_spans_are_read(peer: OtherProcess) -> None:
    async with open_link(peer, SHARED_MEMORY_SETTINGS) as (_, _, link):
        (span,) = await peer.grant([4096])
        empty = RemoteSpan(span.grant, span.offset, 0)
        with anyio.fail_after(10):
            assert await link.read([(empty, memoryview(bytearray()))] * 2) == [Outcome.OK] * 2


async def test_spans_outside_the_peer_arena_are_misses(peer: OtherProcess) -> None:
    async with open_link(peer, SHARED_MEMORY_SETTINGS) as (side, _, link):
        (good,) = await peer.grant([4096], seed=1)
        outside = [
            RemoteSpan(1, -4096, 4096),
            RemoteSpan(1, CAPACITY, 4096),
            RemoteSpan(1, CAPACITY - 4095, 4096),
            RemoteSpan(1, 1 << 63, 4096),
            RemoteSpan(1, 0, -1),
        ]
        with memory(side, 4096) as lease:
            poison(lease.view)
            assert await link.read([(span, lease.view) for span in outside]) == [Outcome.MISS] * 5
            assert is_poisoned(lease.view)
            assert await link.write([(lease.view, span) for span in outside]) == [Outcome.MISS] * 5
            outcomes = await link.read([(outside[0], lease.view), (good, lease.view)])
            assert outcomes == [Outcome.MISS, Outcome.OK]
            assert lease.view == pattern(1, 4096)


@pytest.mark.parametrize("settings", [TCP_SETTINGS, SHARED_MEMORY_SETTINGS], ids=["tcp", "memory"])
async def test_idle_processes_use_no_cpu(peer: OtherProcess, settings: dict[str, Any]) -> None:
    async with open_link(peer, settings):
        processes = {serving_process(peer), *nixl_processes(os.getpid())}
        assert len(processes) == 3, "one serving process per side, and one for the link"
        with anyio.fail_after(60):
            while await share_of_time_awake(processes) > 0.3:
                pass


async def test_link_recovers_from_killed_processes(peer: OtherProcess) -> None:
    async with open_link(peer) as (side, _, link):
        (span,) = await peer.grant([MIB], seed=5)
        with memory(side, MIB) as lease:
            assert await link.read([(span, lease.view)]) == [Outcome.OK]
            for find_victims in (lambda: [serving_process(peer)], lambda: nixl_processes(os.getpid())):
                for victim in find_victims():
                    os.kill(victim, signal.SIGKILL)
                assert await link.read([(span, lease.view)]) == [Outcome.OK]
                assert lease.view == pattern(5, MIB)
                poison(lease.view)


@pytest.mark.parametrize(
    ("deadline", "length", "cancelled"), [("2s", 32 * MIB, False), ("90s", 8 * MIB, True)]
)
async def test_read_from_stopped_peer_fails_and_writes_nothing_later(
    peer: OtherProcess, deadline: str, length: int, *, cancelled: bool
) -> None:
    async with open_link(peer, {**TCP_SETTINGS, "deadline": deadline}) as (side, _, link):
        (span,) = await peer.grant([length], seed=7)
        with memory(side, length) as lease:
            assert await link.read([(span, lease.view)]) == [Outcome.OK]
            async with paused(serving_process(peer)):
                reading = DetachedTask(link.read([(span, lease.view)]))
                await asyncio.sleep(0.2)
                if cancelled:
                    reading.cancel()
                assert await reading.wait(30), "a cancelled call waited for the deadline"
                assert reading.cancelled if cancelled else reading.result() == [Outcome.FAILED]
                poison(lease.view)
            # Its serving process may be restarting.
            (small,) = await peer.grant([4096], seed=8)
            with anyio.fail_after(30):
                while await link.read([(small, memoryview(bytearray(4096)))]) != [Outcome.OK]:
                    await asyncio.sleep(0.05)
            assert is_poisoned(lease.view)


async def test_64_reads_with_a_quarter_cancelled(peer: OtherProcess) -> None:
    async with open_link(peer) as (side, _, link):
        length = 256 << 10  # Small enough not to block the event loop.
        spans = await peer.grant([length] * 64, seed=100)
        with ExitStack() as stack:
            leases = [stack.enter_context(memory(side, length)) for _ in spans]
            reads = [
                DetachedTask(link.read([(span, lease.view)]))
                for span, lease in zip(spans, leases, strict=True)
            ]
            await asyncio.sleep(0.01)
            for read in reads[::4]:
                read.cancel()
            for read, lease in zip(reads, leases, strict=True):
                await read.wait()
                if read.cancelled:
                    poison(lease.view)
            assert any(read.cancelled for read in reads)
            for number, (read, lease) in enumerate(zip(reads, leases, strict=True)):
                if read.cancelled:
                    assert is_poisoned(lease.view), "it was written after the read had ended"
                    continue
                assert read.result() == [Outcome.OK]
                assert lease.view == pattern(100 + number, length)


@pytest.mark.parametrize("write", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_peer_killed_during_transfer(peer: OtherProcess, *, write: bool) -> None:
    async with open_link(peer, {**TCP_SETTINGS, "deadline": "90s"}) as (side, _, link):
        spans = await peer.grant([32 * MIB] * 3, access=Access.WRITE if write else Access.READ)
        with ExitStack() as stack:
            views = [stack.enter_context(memory(side, 32 * MIB)).view for _ in spans]
            transfer = DetachedTask(
                link.write(list(zip(views, spans, strict=True)))
                if write
                else link.read(list(zip(spans, views, strict=True)))
            )
            await asyncio.sleep(0.02)
            peer.kill()
            assert await transfer.wait(30), "it waited for the deadline"
            assert set(transfer.result()) <= {Outcome.OK, Outcome.FAILED}
            with anyio.fail_after(30):  # Its NIXL process ends a moment after it.
                while await link.read([(spans[0], views[0])]) != [Outcome.FAILED]:
                    await anyio.sleep(0.01)
            del views


async def test_restarted_peer_requires_new_link(peer: OtherProcess) -> None:
    ports: list[int] = []

    def dial(deadline: Deadline) -> Connection:
        return dial_to(ports[-1])(deadline)

    endpoint, port = await peer.open(NixlTransport, TCP_SETTINGS, CAPACITY, None)
    ports.append(port)
    async with Side.open(NixlTransport, TCP_SETTINGS, CAPACITY) as side:
        link = await side.transport.connect(endpoint, dial)
        (span,) = await peer.grant([4096], seed=1)
        view = memoryview(bytearray(4096))
        assert await link.read([(span, view)]) == [Outcome.OK]

        await anyio.to_thread.run_sync(peer.kill)
        await anyio.to_thread.run_sync(peer.start)
        endpoint, port = await peer.open(NixlTransport, TCP_SETTINGS, CAPACITY, None)
        ports.append(port)
        (span,) = await peer.grant([4096], seed=2)
        # The memory of the new process was not granted to users of the previous one.
        assert await link.write([(view, span)]) == [Outcome.FAILED]
        await link.close()
        link = await side.transport.connect(endpoint, dial)
        assert await link.read([(span, view)]) == [Outcome.OK]
        assert view == pattern(2, 4096)
        await link.close()


def invalid_endpoints(real: bytes) -> dict[str, bytes]:
    endpoint = Endpoint.decode(real)
    replace = msgspec.structs.replace
    metadata = endpoint.metadata
    return {
        "nothing": b"",
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "cut": real[:-1],
        "version": replace(endpoint, version=2).encode(),
        "length": replace(endpoint, length=1 << 63).encode(),
        "address": replace(endpoint, address=(1 << 63) - 1).encode(),
        "negative": replace(endpoint, address=-1).encode(),
        "name": replace(endpoint, name="another").encode(),
        "no metadata": replace(endpoint, metadata=b"").encode(),
        "much metadata": replace(endpoint, metadata=bytes((1 << 20) + 1)).encode(),
        "zeros": replace(endpoint, metadata=bytes(len(metadata))).encode(),
        "half": replace(endpoint, metadata=metadata[: len(metadata) // 2]).encode(),
        "flipped": replace(endpoint, metadata=metadata[:80] + b"\xff" * 60 + metadata[140:]).encode(),
    }


async def test_link_that_lost_an_agent_is_sent_the_endpoint_of_the_next_one() -> None:
    async with Side.open(NixlTransport, TCP_SETTINGS, CAPACITY) as side:
        transport = side.transport
        assert isinstance(transport, NixlTransport)
        lost = Endpoint.decode(transport.endpoint)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(transport.cut_off)
                await anyio.wait_all_tasks_blocked()
                await transport.serve(theirs)
            sent = ours.recv(MIB)
        assert sent == encode_endpoint(transport.endpoint)
        now = Endpoint.decode(transport.endpoint)
        assert now.name != lost.name
        assert now.arena == lost.arena, "grants stay valid"


async def test_invalid_endpoints_are_refused(peer: OtherProcess) -> None:
    async with open_link(peer) as (side, transport, link):
        for endpoint in invalid_endpoints(side.transport.endpoint).values():
            with pytest.raises(PeerError):
                await transport.connect(endpoint, dial_nowhere)
        (span,) = await peer.grant([4096], seed=1)
        assert await link.read([(span, memoryview(bytearray(4096)))]) == [Outcome.OK]


async def test_missing_library_is_reported_with_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl.py").write_text("raise ModuleNotFoundError(\"No module named 'nixl'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerError, match=r"pip install 'kvtier\[nixl\]'"):
        async with Side.open(NixlTransport, TCP_SETTINGS, MIB):
            pass


@pytest.mark.parametrize(("kills", "succeeds"), [(MAX_STARTS - 1, True), (MAX_STARTS, False)])
async def test_process_killed_during_startup_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, succeeds: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        "lives = pathlib.Path(__file__).with_name('lives')\n"
        "if left := int(lives.read_text()):\n"
        "    lives.write_text(str(left - 1))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "lives").write_text(str(kills))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    raises = pytest.raises(PeerError, match=r"killed by signal 9 during startup, 3 times: see `ucx`")
    with nullcontext() if succeeds else raises:
        async with Side.open(NixlTransport, TCP_SETTINGS, MIB) as side:
            assert side.transport.endpoint
    assert (tmp_path / "lives").read_text() == "0"


async def test_unknown_backend_is_reported() -> None:
    with pytest.raises(PeerError, match=r"no backend 'ABACUS'.*`backends`"):
        async with Side.open(NixlTransport, {**TCP_SETTINGS, "backends": ["ABACUS"]}, MIB):
            pass


def test_arena_is_mapped_at_large_page_boundary() -> None:
    with closing(Arena.create(3 * MIB)) as arena:
        address = map_shared(arena.fd, arena.capacity)
        assert address % LARGE_PAGE_BYTES == 0
        assert "dd" in flags_at(address), "core dumps would contain it"
        mapped = (ctypes.c_ubyte * arena.capacity).from_address(address)
        mapped[-1] = 7
        assert arena.view(arena.capacity - 1, 1)[0] == 7
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-1, MIB)


def test_environment_overrides_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    settings = NixlSettings(type="nixl", ucx={"TLS": "tcp", "UCX_LOG_LEVEL": "warn", "TCP_RX_SEG_SIZE": 8192})
    environment = settings.environment()
    assert environment["UCX_TLS"] == "self"
    assert environment["UCX_LOG_LEVEL"] == "warn"
    assert environment["UCX_TCP_RX_SEG_SIZE"] == "8192"
    assert environment["UCX_HANDLE_ERRORS"] == "none"
