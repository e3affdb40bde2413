"""A cache process scripted message by message, for behaviour that a real one cannot be made to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Welcome
from tests.rigs.waiting import wait_until
from tests.rpc.scripted_server import ScriptedServer

from .conftest import hello

ARENA_BYTES = 1 << 20


class ScriptedCache(ScriptedServer):
    """A scripted cache process. Its arena is not written to."""

    def __init__(self, path: Path, epoch: int = 7) -> None:
        super().__init__(path, protocol.decode_from_engine)
        self._epoch = epoch

    def greet(self) -> None:
        """Accept a connection, and answer its ``Hello``."""
        self.accept()
        self.receive(Hello)
        self.welcome()

    def welcome(self) -> None:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, ARENA_BYTES)
        welcome = Welcome(protocol.VERSION, self._epoch, ARENA_BYTES, ["ram", "ssd"], ["cpu", "disk"], None)
        self.send(welcome, fds=[fd])
        os.close(fd)


@contextmanager
def scheduler_of(path: Path) -> Iterator[tuple[ScriptedCache, SchedulerBridge]]:
    """Open a scripted cache process, and a scheduler connected to it."""
    bridge = SchedulerBridge(hello("scheduler"), path)
    with connected(path, bridge) as cache:
        yield cache, bridge


@contextmanager
def worker_of(path: Path) -> Iterator[tuple[ScriptedCache, WorkerBridge]]:
    """Open a scripted cache process, and a worker connected to it."""
    bridge = WorkerBridge(hello("worker"), path)
    with connected(path, bridge) as cache:
        yield cache, bridge


@contextmanager
def connected(path: Path, bridge: SchedulerBridge | WorkerBridge) -> Iterator[ScriptedCache]:
    cache = ScriptedCache(path)
    try:
        assert not bridge.ready(), "it waited for the welcome"
        cache.greet()
        wait_until(bridge.ready)
        yield cache
    finally:
        bridge.close()
        cache.close()
