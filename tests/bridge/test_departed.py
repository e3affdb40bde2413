"""Memory that processes without a connection may write to: never in use meanwhile, and free in the end."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.abc import SocketAttribute

from kvtier.bridge import leases, protocol
from kvtier.bridge.client import status
from kvtier.bridge.leases import WriterProcess
from kvtier.bridge.protocol import Hello, Leave, RequestStaging
from kvtier.peers.protocol import Stage
from kvtier.peers.staging.buffers import Stagings
from kvtier.plugins import Plugins
from kvtier.rpc.client import UnixConnection
from kvtier.settings import Settings
from kvtier.transports.nixl.settings import NixlSettings
from tests.rigs.bridges import KEYS as REAL_KEYS
from tests.rigs.bridges import ROOT as REAL_ROOT
from tests.rigs.bridges import Start, connect, lose_connection, reserve
from tests.rigs.open_files import open_files
from tests.rigs.scripted_engine import KEYS, LAYOUT, NAMESPACE, Host, open_host
from tests.rigs.waiting import until, wait_until
from tests.rigs.worker_process import WorkerProcess

from .test_lost_connections import ask, reservations, until_left

pytestmark = pytest.mark.anyio

Plugins.load([])


async def until_free(host: Host) -> None:
    await until(
        lambda: host.server.status()["reservations"] == {"bytes": 0, "void_bytes": 0, "departed_engines": 0}
    )


def no_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Linux before 6.5, a filter of system calls, or no file descriptor left."""

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(leases, "SO_PEERPIDFD", 0x7FFF)
    monkeypatch.setattr(os, "pidfd_open", fail)


@pytest.mark.parametrize("pidfds", [True, False], ids=["pidfd", "no-pidfd"])
@pytest.mark.parametrize("without", [0, 1], ids=["both-ranks", "one-rank"])
async def test_all_memory_of_an_engine_is_free_when_its_processes_have_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: int, *, pidfds: bool
) -> None:
    """Also if a rank was never connected, and knows of nothing."""
    if not pidfds:
        no_pidfds(monkeypatch)
    async with open_host(tmp_path) as host, host.peer() as scheduler, host.peer() as worker0:
        hello = Hello(protocol.VERSION, "engine", "worker", 1, LAYOUT, NAMESPACE, client=2)
        with WorkerProcess(host.path, hello) as process:
            await to_thread.run_sync(process.await_connected)
            await scheduler.greet()
            if not without:
                await worker0.greet("worker", 0, client=1)
            await ask(scheduler)
            await to_thread.run_sync(process.disconnect)
            await until_left(host, 2)
            later = await scheduler.reserve(KEYS[2:4], KEYS[1], ticket=2)
            assert not any(later.leases), "it would never fill its slices"
            if not without:
                await worker0.send(Leave())
                await worker0.status()
            await worker0.stream.aclose()
            await scheduler.stream.aclose()
            await until(lambda: not host.server.engines)
            assert host.server.status()["reservations"]["departed_engines"] == 1
        await until_free(host)


async def test_worker_whose_first_greeting_was_lost_does_not_keep_memory(tmp_path: Path) -> None:
    """It may have been granted reservations, of which it does not know, between the two."""
    async with (
        open_host(tmp_path) as host,
        host.peer("scheduler") as scheduler,
        host.peer("worker", 0, client=1) as worker0,
    ):
        async with host.peer() as first:
            await first.send(Hello(protocol.VERSION, "engine", "worker", 1, LAYOUT, NAMESPACE, client=2))
            # Welcomed, but it does not read that.
            await anyio.wait_readable(first.stream.extra(SocketAttribute.raw_socket))
            await ask(scheduler)
        await until_left(host, 2)
        async with host.peer("worker", 1, client=2):
            await worker0.send(Leave())
            await worker0.status()
            assert reservations(host) == [0]


@pytest.mark.parametrize("pid", ["own", "of another namespace"])
async def test_memory_is_kept_for_a_process_without_pidfd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: str
) -> None:
    no_pidfds(monkeypatch)
    if pid != "own":
        monkeypatch.setattr(WriterProcess, "of", lambda _: WriterProcess(None, 0))
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        async with host.engine("other") as (other, _):
            reserved = await ask(scheduler)
            await workers[0].commit(reserved.leases)
            await workers[1].stream.aclose()
            await until_left(host, 5)
            second = await ask(other)
            assert all(second.leases)
            assert not set(second.offsets) & set(reserved.offsets), "this process may still be writing"
        async with host.peer(
            "worker", 1, epoch=host.server.epoch, holding=reserved.leases, client=2
        ) as again:
            assert reservations(host) == [2]
            await again.commit(reserved.leases)
            assert reservations(host) == [0]


async def test_staging_buffers_of_an_engine_that_returns_are_known_to_peers(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        stagings = host.instance.stagings = Stagings(Settings(), NixlSettings(type="nixl"), host.server.cache)
        async with host.peer("scheduler") as scheduler, host.peer("worker", client=1) as worker:
            await worker.send(RequestStaging(""))
            await worker.status()
            await ask(scheduler)
        await until(lambda: not host.server.engines)
        assert host.server.status()["reservations"]["departed_engines"] == 1
        async with (
            host.peer("worker", client=1) as again,
            host.peer("worker", engine="other", client=1) as other,
        ):
            for worker in (again, other):
                await worker.send(RequestStaging(""))
                await worker.status()
            assert "several engines" in stagings.answer(Stage(1, NAMESPACE), "").refusal


def test_exit_is_noticed_without_pidfd() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writer = WriterProcess(None, process.pid)
    assert writer.watched
    assert not writer.exited
    process.communicate()
    assert writer.exited
    assert not WriterProcess(None, 0).watched
    assert not WriterProcess(None, 0).exited


def test_process_that_has_connected_has_a_pidfd() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = open_files()
        writer = WriterProcess.of(ours)
        assert any("[pidfd]" in file for file in set(open_files()) - set(before))
        writer.close()
        assert open_files() == before


@pytest.mark.parametrize("lost", ["before", "with"])
def test_reservations_abandoned_while_the_connection_is_lost_are_freed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """No worker knows of them, so no other call would ever free them."""
    path = tmp_path / "socket"
    start()
    scheduler, _ = connect(path)
    leases = reserve(scheduler, REAL_ROOT, list(REAL_KEYS[:4])).granted
    assert len(leases) == 4
    if lost == "before":
        lose_connection(scheduler)
    else:
        monkeypatch.setattr(UnixConnection, "send", lambda *_: None)
    scheduler.abandon(leases)
    monkeypatch.undo()
    lose_connection(scheduler)
    wait_until(scheduler.ready)
    wait_until(lambda: status(path)["engines"][0]["reservations"] == 0)
    assert all(reserve(scheduler, REAL_ROOT, list(REAL_KEYS[:4])).leases)
