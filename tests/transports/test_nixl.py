"""What NIXL does of its own: processes that come and go, transfers that cannot be taken back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from kvtier.arena import Arena
from kvtier.backends.base import Outcome
from kvtier.errors import PeerError
from kvtier.sockets.connection import Connection, Deadline
from kvtier.testing.transport_process import OtherProcess
from kvtier.testing.transport_side import Side, dial_nowhere, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan
from kvtier.transports.nixl import NixlSettings, NixlTransport
from kvtier.transports.nixl.carrier import LARGE_PAGE_BYTES, map_shared
from kvtier.transports.nixl.endpoint import Endpoint
from kvtier.transports.nixl.process import MAX_STARTS

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.anyio

MIB = 1 << 20
CAPACITY = 128 * MIB
OVER_TCP: dict[str, Any] = {"type": "nixl", "deadline": "20s", "ucx": {"TLS": "tcp,self"}}
"""Here a transfer needs the other side's processor, and stands still with it."""
OVER_MEMORY: dict[str, Any] = {"type": "nixl", "deadline": "20s", "ucx": {"TLS": "tcp,sm,self"}}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = children(os.getpid())
    yield
    # An arena does not wait for the process that prepares its memory.
    deadline = time.monotonic() + 60
    while not (left := children(os.getpid())) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left <= before


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    process.start()
    yield process
    process.kill()


@asynccontextmanager
async def linked(
    other: OtherProcess, settings: dict[str, Any] = OVER_TCP
) -> AsyncIterator[tuple[Side, NixlTransport, Link]]:
    """A side here, and a link from it to one there. Nothing of it is left behind."""
    endpoint, port = await other.open(NixlTransport, settings, CAPACITY, None)
    async with Side.open(NixlTransport, settings, CAPACITY) as side:
        assert isinstance(side.transport, NixlTransport)
        link = await side.transport.connect(endpoint, dial_to(port))
        try:
            yield side, side.transport, link
        finally:
            await link.close()
        assert side.arena.leases == side.grants.leases


def children(pid: int) -> set[int]:
    """The processes that a process has started and that are there yet."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # A thread may end meanwhile.
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def carriers(pid: int) -> set[int]:
    """Those of them that have NIXL in them."""
    return {
        child
        for child in children(pid)
        if b"transports/nixl/carrier.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    }


async def share_of_time_not_asleep(pids: set[int]) -> float:
    """Of the next moment, summed over all threads: what they compute, and what they wait for a core to do so.

    A thread that polls is never asleep, on any machine, and so never below 1.
    """
    began, before = time.monotonic(), awake_seconds(pids)
    await asyncio.sleep(0.3)
    return (awake_seconds(pids) - before) / (time.monotonic() - began)


def awake_seconds(pids: set[int]) -> float:
    found = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            computed, waited, _ = path.read_text().split()
            found += int(computed) + int(waited)
    return found / 1e9


def serving(other: OtherProcess) -> int:
    """The carrier that serves the other side's arena."""
    (carrier,) = carriers(other._running.pid)
    return carrier


@asynccontextmanager
async def paused(pid: int) -> AsyncIterator[None]:
    """While this lasts, a process stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
            await asyncio.sleep(0.001)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stain(view: memoryview) -> None:
    view[:] = b"\xee" * len(view)


def is_stained(view: memoryview) -> bool:
    return bytes(view) == b"\xee" * len(view)


async def test_memory_outside_the_arena_and_memory_that_cannot_be_written(other: OtherProcess) -> None:
    async with linked(other, OVER_MEMORY) as (side, _, link):
        first, second = await other.grant([5000, 3 * MIB], seed=3)
        read = [bytearray(5000), bytearray(3 * MIB)]
        views = [memoryview(data) for data in read]
        assert await link.read(list(zip((first, second), views, strict=True))) == [Outcome.OK] * 2
        assert read == [pattern(3, 5000), pattern(4, 3 * MIB)]

        (target,) = await other.grant([5000], access=Access.WRITE)
        assert await link.write([(memoryview(pattern(9, 5000)), target)]) == [Outcome.OK]
        assert await link.read([(target, views[0])]) == [Outcome.OK]
        assert read[0] == pattern(9, 5000)
        everything = side.arena.allocate(side.arena.capacity)
        assert everything is not None
        assert await link.read([(first, views[0])]) == [Outcome.FAILED]
        everything.release()


async def test_spans_outside_the_peers_arena_are_misses(other: OtherProcess) -> None:
    async with linked(other, OVER_MEMORY) as (side, _, link):
        (good,) = await other.grant([4096], seed=1)
        lease = side.arena.allocate(4096)
        assert lease is not None
        outside = [
            RemoteSpan(1, -4096, 4096),
            RemoteSpan(1, CAPACITY, 4096),
            RemoteSpan(1, CAPACITY - 4095, 4096),
            RemoteSpan(1, 1 << 63, 4096),
            RemoteSpan(1, 0, -1),
        ]
        stain(lease.view)
        assert await link.read([(span, lease.view) for span in outside]) == [Outcome.MISS] * 5
        assert is_stained(lease.view)
        assert await link.write([(lease.view, span) for span in outside]) == [Outcome.MISS] * 5
        assert await link.read([(outside[0], lease.view), (good, lease.view)]) == [Outcome.MISS, Outcome.OK]
        assert lease.view == pattern(1, 4096)
        lease.release()


@pytest.mark.parametrize("settings", [OVER_TCP, OVER_MEMORY], ids=["tcp", "memory"])
async def test_who_serves_and_is_asked_for_nothing_leaves_the_processor_alone(
    other: OtherProcess, settings: dict[str, Any]
) -> None:
    async with linked(other, settings):
        processes = {serving(other), *carriers(os.getpid())}
        assert len(processes) == 3, "who serves on either side, and the link"
        with anyio.fail_after(60):
            while await share_of_time_not_asleep(processes) > 0.3:
                pass


async def test_a_link_finds_the_agent_that_took_the_place_of_one_that_ended(other: OtherProcess) -> None:
    async with linked(other) as (side, _, link):
        (span,) = await other.grant([MIB], seed=5)
        lease = side.arena.allocate(MIB)
        assert lease is not None
        assert await link.read([(span, lease.view)]) == [Outcome.OK]
        for find_victims in (lambda: [serving(other)], lambda: carriers(os.getpid())):
            for victim in find_victims():
                os.kill(victim, signal.SIGKILL)
            assert await link.read([(span, lease.view)]) == [Outcome.OK]
            assert lease.view == pattern(5, MIB)
            stain(lease.view)
        lease.release()


async def test_a_peer_that_stands_still_and_memory_after_the_deadline(other: OtherProcess) -> None:
    async with linked(other, {**OVER_TCP, "deadline": "2s"}) as (side, _, link):
        (span,) = await other.grant([32 * MIB], seed=7)
        lease = side.arena.allocate(32 * MIB)
        assert lease is not None
        assert await link.read([(span, lease.view)]) == [Outcome.OK]
        stain(lease.view)
        async with paused(serving(other)):
            began = time.monotonic()
            assert await link.read([(span, lease.view)]) == [Outcome.FAILED]
            assert time.monotonic() - began < 30
            stain(lease.view)
        (small,) = await other.grant([4096], seed=8)
        with anyio.fail_after(30):
            # Where the serving side was ended by it, it is started anew.
            while await link.read([(small, memoryview(bytearray(4096)))]) != [Outcome.OK]:
                await asyncio.sleep(0.05)
        assert is_stained(lease.view)
        lease.release()


async def test_a_cancelled_call_to_a_peer_that_stands_still(other: OtherProcess) -> None:
    async with linked(other, {**OVER_TCP, "deadline": "90s"}) as (side, _, link):
        (span,) = await other.grant([8 * MIB], seed=7)
        lease = side.arena.allocate(8 * MIB)
        assert lease is not None
        assert await link.read([(span, lease.view)]) == [Outcome.OK]
        async with paused(serving(other)):
            reading = asyncio.ensure_future(link.read([(span, lease.view)]))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert time.monotonic() - began < 30, "it did not wait for the deadline"
            stain(lease.view)
        (small,) = await other.grant([4096], seed=8)
        with anyio.fail_after(30):
            while await link.read([(small, memoryview(bytearray(4096)))]) != [Outcome.OK]:
                await asyncio.sleep(0.05)
        assert is_stained(lease.view)
        lease.release()


async def test_a_quarter_of_64_transfers_is_cancelled(other: OtherProcess) -> None:
    async with linked(other) as (side, _, link):
        length = 256 << 10  # Such that nothing here takes the loop for long.
        spans = await other.grant([length] * 64, seed=100)
        leases = [side.arena.allocate(length) for _ in spans]
        reads = [
            asyncio.ensure_future(link.read([(span, lease.view)]))
            for span, lease in zip(spans, leases, strict=True)
            if lease is not None
        ]
        assert len(reads) == 64
        await asyncio.sleep(0.01)
        for number in range(0, 64, 4):
            reads[number].cancel()

        async def then_stain(number: int) -> bool:
            with suppress(asyncio.CancelledError):
                await reads[number]
                return False
            lease = leases[number]
            assert lease is not None
            stain(lease.view)
            return True

        cancelled = await asyncio.gather(*map(then_stain, range(0, 64, 4)))
        assert any(cancelled)
        for number, lease in enumerate(leases):
            assert lease is not None
            if number % 4:
                assert await reads[number] == [Outcome.OK]
                assert lease.view == pattern(100 + number, length)
        for number, was_cancelled in zip(range(0, 64, 4), cancelled, strict=True):
            lease = leases[number]
            assert lease is not None
            assert is_stained(lease.view) == was_cancelled
        for lease in leases:
            assert lease is not None
            lease.release()


@pytest.mark.parametrize("write", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_peer_killed_in_mid_transfer(other: OtherProcess, *, write: bool) -> None:
    async with linked(other, {**OVER_TCP, "deadline": "90s"}) as (side, _, link):
        spans = await other.grant([32 * MIB] * 3, access=Access.WRITE if write else Access.READ)
        lease = side.arena.allocate(96 * MIB)
        assert lease is not None
        views = [lease.view[at * 32 * MIB : (at + 1) * 32 * MIB] for at in range(3)]
        moving = asyncio.ensure_future(
            link.write(list(zip(views, spans, strict=True)))
            if write
            else link.read(list(zip(spans, views, strict=True)))
        )
        await asyncio.sleep(0.02)
        other.kill()
        began = time.monotonic()
        outcomes = await moving
        assert set(outcomes) <= {Outcome.OK, Outcome.FAILED}
        assert time.monotonic() - began < 30, "it did not wait for the deadline"
        assert await link.read([(spans[0], views[0])]) == [Outcome.FAILED]
        del views
        lease.release()


async def test_a_peer_that_was_started_anew_is_linked_to_anew(other: OtherProcess) -> None:
    ports: list[int] = []

    def dial(deadline: Deadline) -> Connection:
        return dial_to(ports[-1])(deadline)

    endpoint, port = await other.open(NixlTransport, OVER_TCP, CAPACITY, None)
    ports.append(port)
    async with Side.open(NixlTransport, OVER_TCP, CAPACITY) as side:
        link = await side.transport.connect(endpoint, dial)
        (span,) = await other.grant([4096], seed=1)
        view = memoryview(bytearray(4096))
        assert await link.read([(span, view)]) == [Outcome.OK]

        other.kill()
        other.start()
        endpoint, port = await other.open(NixlTransport, OVER_TCP, CAPACITY, None)
        ports.append(port)
        (span,) = await other.grant([4096], seed=2)
        # What lies there now was never granted to those who knew the one before.
        assert await link.write([(view, span)]) == [Outcome.FAILED]
        await link.close()
        link = await side.transport.connect(endpoint, dial)
        assert await link.read([(span, view)]) == [Outcome.OK]
        assert view == pattern(2, 4096)
        await link.close()


def hostile(real: bytes) -> dict[str, bytes]:
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


async def test_hostile_endpoints_are_refused_in_words(other: OtherProcess) -> None:
    async with linked(other) as (side, transport, link):
        for endpoint in hostile(side.transport.endpoint).values():
            with pytest.raises(PeerError):
                await transport.connect(endpoint, dial_nowhere)
        (span,) = await other.grant([4096], seed=1)
        assert await link.read([(span, memoryview(bytearray(4096)))]) == [Outcome.OK]


async def test_without_the_library_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl.py").write_text("raise ModuleNotFoundError(\"No module named 'nixl'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerError, match=r"pip install 'kvtier\[nixl\]'"):
        async with Side.open(NixlTransport, OVER_TCP, MIB):
            pass


@pytest.mark.parametrize(("deaths", "starts"), [(MAX_STARTS - 1, True), (MAX_STARTS, False)])
async def test_a_process_that_is_killed_before_it_is_up_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, starts: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        "lives = pathlib.Path(__file__).with_name('lives')\n"
        "if left := int(lives.read_text()):\n"
        "    lives.write_text(str(left - 1))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "lives").write_text(str(deaths))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ends = pytest.raises(PeerError, match=r"ended with signal 9, 3 times before it was up: see `ucx`")
    with nullcontext() if starts else ends:
        async with Side.open(NixlTransport, OVER_TCP, MIB) as side:
            assert side.transport.endpoint
    assert (tmp_path / "lives").read_text() == "0"


async def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(PeerError, match=r"no backend 'ABACUS'.*`backends`"):
        async with Side.open(NixlTransport, {**OVER_TCP, "backends": ["ABACUS"]}, MIB):
            pass


def test_its_processes_map_the_arena_where_large_pages_fit() -> None:
    with closing(Arena.create(3 * MIB)) as arena:
        address = map_shared(arena.fd, arena.capacity)
        assert address % LARGE_PAGE_BYTES == 0
        mapped = (ctypes.c_ubyte * arena.capacity).from_address(address)
        mapped[-1] = 7
        assert arena.view(arena.capacity - 1, 1)[0] == 7
    with pytest.raises(OSError, match="cannot map the arena"):
        map_shared(-1, MIB)


def test_what_the_environment_says_comes_before_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    settings = NixlSettings(type="nixl", ucx={"TLS": "tcp", "UCX_LOG_LEVEL": "warn", "TCP_RX_SEG_SIZE": 8192})
    environment = settings.environment()
    assert environment["UCX_TLS"] == "self"
    assert environment["UCX_LOG_LEVEL"] == "warn"
    assert environment["UCX_TCP_RX_SEG_SIZE"] == "8192"
    assert environment["UCX_HANDLE_ERRORS"] == "none"
