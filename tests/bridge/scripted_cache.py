"""A cache process scripted message by message, for behaviour that a real one cannot be made to show."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import FromEngine, Hello, Welcome
from kvtier.sockets.frames import FrameReader, Message, encode

from .conftest import hello, wait_until

ARENA_BYTES = 1 << 20
MessageT = TypeVar("MessageT")


class ScriptedCache:
    """Listens on a socket path. The test scripts every message."""

    def __init__(self, path: Path, epoch: int = 7) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._epoch = epoch
        self._connection: socket.socket | None = None
        self._reader = FrameReader()
        self._received: list[FromEngine] = []

    def accept(self) -> None:
        """Accept a pending connection, without a welcome."""
        if self._connection is not None:
            self._connection.close()
        self._listener.settimeout(10)
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(10)
        self._reader = FrameReader()

    def greet(self) -> None:
        """Accept a connection, and answer its ``Hello``."""
        self.accept()
        self.receive(Hello)
        self.welcome()

    def welcome(self) -> None:
        assert self._connection is not None
        fd = os.memfd_create("arena")
        os.ftruncate(fd, ARENA_BYTES)
        welcome = Welcome(protocol.VERSION, self._epoch, ARENA_BYTES, ["ram", "ssd"], ["cpu", "disk"], None)
        socket.send_fds(self._connection, [encode(welcome)], [fd])
        os.close(fd)

    def receive(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must be a ``kind``."""
        assert self._connection is not None
        while not self._received:
            bodies = self._reader.feed(self._connection.recv(1 << 16))
            self._received += [protocol.decode_from_engine(body) for body in bodies]
        message = self._received.pop(0)
        assert isinstance(message, kind), message
        return message

    def nothing_received(self) -> bool:
        """Whether no message is pending."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)  # type: ignore[arg-type]
        return not self._received and not poll.poll(0)

    def is_disconnected(self) -> bool:
        """Wait for the client to disconnect; ``False`` if it sends a message instead."""
        assert self._connection is not None
        return not self._received and not self._connection.recv(1)

    def send(self, *messages: Message) -> None:
        assert self._connection is not None
        self._connection.sendall(b"".join(map(encode, messages)))

    def disconnect(self) -> None:
        assert self._connection is not None
        self._connection.close()

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


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
