"""NIXL processes with a stand-in for NIXL: messages, failures and how they end. Runs without NIXL."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.concurrency import processes
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.transports.nixl import process
from kvtier.transports.nixl.process import Batch, NixlProcess, NixlProcessEnded, Part, Region
from kvtier.transports.nixl.protocol import DONE, DROPPED, LOST
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.nixl.worker import MAX_BYTES_IN_FLIGHT

pytestmark = pytest.mark.anyio

MIB = 1 << 20
TIMEOUT_SECONDS = 60
WORKER = """\
import os
import time

from kvtier.transports.nixl import worker


class Agent:
    metadata = b"m" * (1 << 20)

    def __init__(self, *arguments, **options):
        pass

    def register(self, address, length):
        pass

    def add_peer(self, name, metadata):
        if not metadata:
            raise ValueError("no metadata")

    def start(self, peer, write, local, remote):
        return peer, self.state(peer)

    def state(self, handle):
        return "PROC" if handle == "slow" else "DONE"


worker.Agent = Agent
"""
"""A transfer with the peer ``slow`` never ends, and any other one at once."""
MAIN = "\nworker.main()\n"

Start = Callable[..., Awaitable[NixlProcess]]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the processes that have been started, in order."""
    found: list[subprocess.Popen[bytes]] = []

    def spawn(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(processes.start(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(process, "processes", SimpleNamespace(start=spawn, python=processes.python))
    return found


@pytest.fixture
async def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawned: list[subprocess.Popen[bytes]]
) -> AsyncIterator[Start]:
    """Start processes of a stand-in. Check that neither a process nor a task is left."""
    script = tmp_path / "worker.py"
    monkeypatch.setattr(process, "worker", SimpleNamespace(__file__=str(script)))
    executor = WorkerThreads(4)
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 4 * MIB)
    started: list[NixlProcess] = []
    tasks = len(asyncio.all_tasks())

    async def start(change: str = "", peers: Sequence[str] = ()) -> NixlProcess:
        script.write_text(WORKER + change + MAIN)
        settings = NixlSettings(type="nixl")
        nixl_process = await NixlProcess.start(Region(4 * MIB, memory), settings, executor, serves=False)
        started.append(nixl_process)
        for peer in peers:
            await nixl_process.add_peer(peer, 4096, b"metadata")
        return nixl_process

    yield start
    for nixl_process in started:
        await nixl_process.end()
    assert all(each.returncode is not None for each in spawned)
    assert len(asyncio.all_tasks()) == tasks
    executor.close()
    os.close(memory)


async def ended(nixl_process: NixlProcess, batch: Batch) -> None:
    with anyio.fail_after(TIMEOUT_SECONDS):
        await nixl_process.until_ended(batch)


def parts(length: int = 4096) -> list[Part]:
    return [Part(0, 0, length)]


async def test_process_is_reaped_if_the_event_loop_ends_while_it_starts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, spawned = threading.Event(), list[subprocess.Popen[bytes]]()

    def spawn_slowly(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.set()
        time.sleep(0.2)
        spawned.append(processes.start(*arguments, **options))
        return spawned[0]

    monkeypatch.setattr(process, "processes", SimpleNamespace(start=spawn_slowly, python=processes.python))
    before = asyncio.all_tasks()
    starting = asyncio.ensure_future(start())
    assert await anyio.to_thread.run_sync(begun.wait, TIMEOUT_SECONDS)
    tasks = asyncio.all_tasks() - before
    for task in tasks:  # As asyncio.run does.
        task.cancel()
    await asyncio.wait(tasks)
    assert starting.cancelled()
    assert spawned[0].returncode is not None


async def test_transfers_of_several_batches(start: Start) -> None:
    nixl_process = await start()
    assert nixl_process.opened.metadata == b"m" * MIB, "more than the socket takes at once"
    await nixl_process.add_peer("peer", 4096, b"metadata")
    with anyio.fail_after(TIMEOUT_SECONDS):
        batches = [nixl_process.transfer("peer", [parts()] * count, write=True) for count in (1, 0, 300)]
        for batch in batches:
            await nixl_process.until_ended(batch)
    assert [batch.results for batch in batches] == [[DONE], [], [DONE] * 300]


async def test_process_continues_after_a_peer_that_it_cannot_add(start: Start) -> None:
    nixl_process = await start()
    with pytest.raises(PeerError, match="NIXL cannot connect to the peer: no metadata"):
        await nixl_process.add_peer("peer", 4096, b"")
    await nixl_process.add_peer("slow", 4096, b"metadata")
    nixl_process.transfer("slow", [parts()], write=True)
    await nixl_process.add_peer("peer", 4096, b"metadata")  # By the next message, the transfer is running.
    with pytest.raises(PeerError, match="NIXL still has transfers with that agent in flight"):
        await nixl_process.add_peer("slow", 4096, b"metadata")
    batch = nixl_process.transfer("peer", [parts()], write=False)
    await ended(nixl_process, batch)
    assert batch.results == [DONE]


async def test_waiting_transfers_are_dropped(start: Start) -> None:
    nixl_process = await start(peers=["slow"])
    running = nixl_process.transfer("slow", [parts(MAX_BYTES_IN_FLIGHT)], write=True)
    waiting = nixl_process.transfer("slow", [parts()] * 3, write=True)
    nixl_process.drop(waiting)
    with anyio.fail_after(TIMEOUT_SECONDS):
        await waiting.ended.wait()
    assert waiting.results == [DROPPED] * 3
    assert not running.ended.is_set()


async def test_cancelled_wait_ends_the_process_of_a_transfer_that_does_not_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.1)
    nixl_process = await start(peers=["slow"])
    batch = nixl_process.transfer("slow", [parts()], write=True)
    await nixl_process.add_peer("peer", 4096, b"metadata")  # By the next message, the transfer is running.
    waiting = asyncio.ensure_future(nixl_process.until_ended(batch))
    await asyncio.sleep(0)
    waiting.cancel()
    with anyio.fail_after(TIMEOUT_SECONDS), pytest.raises(asyncio.CancelledError):
        await waiting
    assert nixl_process.exited.is_set()
    assert batch.results == [LOST]


async def test_killed_process_ends_requests_and_transfers(
    start: Start, spawned: list[subprocess.Popen[bytes]]
) -> None:
    nixl_process = await start(peers=["slow"])
    batch = nixl_process.transfer("slow", [parts()] * 2, write=True)
    (child,) = spawned
    child.send_signal(signal.SIGSTOP)
    adding = asyncio.ensure_future(nixl_process.add_peer("peer", 4096, b"metadata"))
    await asyncio.sleep(0)
    child.send_signal(signal.SIGKILL)
    with anyio.fail_after(TIMEOUT_SECONDS):
        with pytest.raises(NixlProcessEnded, match="the NIXL process was killed by signal 9"):
            await adding
        await batch.ended.wait()
    assert nixl_process.exited.is_set(), "the memory is not accessed any more"
    assert batch.results == [LOST] * 2
    late = nixl_process.transfer("peer", [parts()], write=True)
    assert late.ended.is_set()
    assert late.results == [LOST]
    with pytest.raises(NixlProcessEnded, match="the NIXL process was killed by signal 9"):
        await nixl_process.add_peer("peer", 4096, b"metadata")


async def test_process_ends_at_a_malformed_message(start: Start) -> None:
    nixl_process = await start(peers=["slow"])
    batch = nixl_process.transfer("slow", [parts()], write=True)
    nixl_process._endpoint._wire.write(b"\xc1")
    nixl_process._endpoint._wire.flush_now()
    with anyio.fail_after(TIMEOUT_SECONDS):
        await nixl_process.exited.wait()
    assert batch.results == [LOST]


@pytest.mark.parametrize(
    "report",
    [
        "self._parent.socket.send(bytes([1, 0, 0, 0, 0xC1]))",
        "self._send(worker.PeerAdded(10**6, ''))",
        "self._send(worker.Ended([1, 2], [0]))",
    ],
    ids=["malformed", "unsolicited", "incomplete"],
)
async def test_process_that_violates_the_protocol_is_killed(start: Start, report: str) -> None:
    nixl_process = await start(
        f"def report(self):\n    if self._ended: {report}\nworker.NixlWorker._report_ended = report\n",
        peers=["peer"],
    )
    batch = nixl_process.transfer("peer", [parts()], write=True)
    await ended(nixl_process, batch)
    assert nixl_process.exited.is_set()
    assert batch.results == [LOST]


async def test_process_that_reads_nothing_is_killed(start: Start) -> None:
    change = "Agent.state = lambda self, handle: time.sleep(3600)\n"
    nixl_process = await start(change, peers=["peer"])
    large = [Part(1 << 40, 1 << 40, 1 << 40)] * 1024  # More bytes in all than a connection queues.
    batches = []
    for _ in range(700):
        batches.append(nixl_process.transfer("peer", [large], write=True))
        await checkpoint()  # Encoding all of them takes a tenth of a second.
    with anyio.fail_after(TIMEOUT_SECONDS):
        for batch in batches:
            await batch.ended.wait()
    assert nixl_process.exited.is_set()


async def test_process_that_does_not_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_SECONDS", 0.2)
    with pytest.raises(PeerError, match="NIXL does not answer: see `ucx`"):
        await start("time.sleep(3600)\n")


async def test_process_that_exits_during_startup(start: Start) -> None:
    with pytest.raises(PeerError, match=r"exited with code 3 during startup, 3 times: see `ucx`"):
        await start("os._exit(3)\n")


async def test_cancelled_start_leaves_nothing(start: Start) -> None:
    for seconds in (0, 0.001, 0.01, 0.1):
        with anyio.move_on_after(seconds) as scope:
            await start("time.sleep(3600)\n")
        assert scope.cancelled_caught


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Use all descriptors up to 1100."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as stack:
        while True:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if descriptor > 1100:
                break
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
async def test_descriptors_may_be_above_1023(start: Start) -> None:
    nixl_process = await start(peers=["peer"])
    batch = nixl_process.transfer("peer", [parts()], write=True)
    await ended(nixl_process, batch)
    assert batch.results == [DONE]
