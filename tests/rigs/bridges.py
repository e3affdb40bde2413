"""A real ``kvtier serve`` for each test, and engine stand-ins that use the clients of the bridge.

A module that uses a fixture imports it: ``start``, and ``_close_bridges`` with :func:`store`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from kvtier.bridge import protocol
from kvtier.bridge.client import Bridge, SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello, Run
from kvtier.errors import ChannelClosed, ChannelError
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.calls import Call
from kvtier.rpc.client import UnixConnection
from tests.rigs.waiting import wait_until

CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (65_536,)),))
NAMESPACE = bytes(32)
ROOT = root_key(NAMESPACE)
KEYS = chunk_keys(ROOT, list(range(CHUNK_TOKENS * 40)), CHUNK_TOKENS)

ResultT = TypeVar("ResultT")
Start = Callable[..., subprocess.Popen[str]]


def is_serving(socket: Path) -> bool:
    try:
        return bool(status(socket))
    except ChannelError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a cache process on ``tmp_path/socket``, and wait until it serves or has exited."""
    socket = tmp_path / "socket"
    config = {
        "chunk_tokens": CHUNK_TOKENS,
        "socket": str(socket),
        "linger": "300ms",
        "tiers": [
            {"name": "ram", "type": "cpu", "capacity": "32MiB"},
            {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "64MiB"},
        ],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    processes: list[subprocess.Popen[str]] = []

    def run(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvtier", "serve", "--config", str(tmp_path / "config.yaml")]
        process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        wait_until(lambda: process.poll() is not None or is_serving(socket))
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


_bridges: list[SchedulerBridge | WorkerBridge] = []


@pytest.fixture(autouse=True)
def _close_bridges() -> Iterator[None]:
    yield
    while _bridges:
        _bridges.pop().close()


def hello(role: protocol.Role, engine: str = "engine") -> Hello:
    return Hello(protocol.VERSION, engine, role, 0, LAYOUT, NAMESPACE)


def connect(socket: Path, engine: str = "engine") -> tuple[SchedulerBridge, WorkerBridge]:
    """Connect the scheduler and the worker of an engine, until the end of the test."""
    scheduler = SchedulerBridge(hello("scheduler", engine), socket)
    worker = WorkerBridge(hello("worker", engine), socket)
    for bridge in (worker, scheduler):
        bridge.connect()
        _bridges.append(bridge)
    assert worker.arena is not None
    return scheduler, worker


def lose_connection(bridge: Bridge) -> None:
    """Let the connection of a bridge fail."""

    def fail(*_: object) -> None:
        raise ChannelClosed("cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnixConnection, "receive", fail)
        bridge.poll()
    assert not bridge.connected


def wait_for_reply(bridge: Bridge, call: Call[ResultT] | None) -> ResultT:
    """Block until a request is answered. Hooks of the connector never block this way."""
    assert call is not None, "the request was not sent"
    wait_until(lambda: (bridge.poll(0.1), call.settled)[1])
    assert call.result is not None, "the connection was lost"
    return call.result


def reserve(
    scheduler: SchedulerBridge, parent: ChunkKey, keys: list[ChunkKey], last_tokens: int = CHUNK_TOKENS
) -> protocol.Reserved:
    return wait_for_reply(scheduler, scheduler.reserve([Run(parent, join_keys(keys), last_tokens)]))


def confirm(worker: WorkerBridge, leases: list[int]) -> bool:
    return wait_for_reply(worker, worker.confirm(leases))


def store(socket: Path, keys: list[ChunkKey]) -> tuple[SchedulerBridge, WorkerBridge]:
    """Store chunks filled with their keys, and keep the engine connected."""
    scheduler, worker = connect(socket)
    assert worker.arena is not None
    reserved = reserve(scheduler, ROOT, keys)
    assert all(reserved.leases)
    for key, offset in zip(keys, reserved.offsets, strict=True):
        payload = LAYOUT.payload_bytes(CHUNK_TOKENS)
        worker.arena.view(offset + HEADER_BYTES, payload)[:] = key * (payload // len(key))
    worker.commit(reserved.leases)
    wait_until(lambda: status(socket)["counts"].get("stored", 0) >= len(keys))
    return scheduler, worker
