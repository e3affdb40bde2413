"""A cache process that is scripted message by message, for what a real one cannot be made to do."""

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
    """Listens on a path, and does nothing but what the test says."""

    def __init__(self, path: Path, epoch: int = 7) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._epoch = epoch
        self._connection: socket.socket | None = None
        self._reader = FrameReader()
        self._heard: list[FromEngine] = []

    def accept(self) -> None:
        """Take in a connection that waits, without a greeting."""
        if self._connection is not None:
            self._connection.close()
        self._listening.settimeout(10)
        self._connection, _ = self._listening.accept()
        self._connection.settimeout(10)
        self._reader = FrameReader()

    def greet(self) -> None:
        """Accept, and answer ``Hello``."""
        self.accept()
        self.hear(Hello)
        self.welcome()

    def welcome(self) -> None:
        assert self._connection is not None
        fd = os.memfd_create("arena")
        os.ftruncate(fd, ARENA_BYTES)
        welcome = Welcome(protocol.VERSION, self._epoch, ARENA_BYTES, ["ram", "ssd"], ["cpu", "disk"], None)
        socket.send_fds(self._connection, [encode(welcome)], [fd])
        os.close(fd)

    def hear(self, kind: type[MessageT]) -> MessageT:
        """The next message, which is one of ``kind``."""
        assert self._connection is not None
        while not self._heard:
            bodies = self._reader.feed(self._connection.recv(1 << 16))
            self._heard += [protocol.decode_from_engine(body) for body in bodies]
        message = self._heard.pop(0)
        assert isinstance(message, kind), message
        return message

    def nothing(self) -> bool:
        """Whether no message waits to be heard."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)  # type: ignore[arg-type]
        return not self._heard and not poll.poll(0)

    def is_left(self) -> bool:
        """Whether the other side closes, without another message; waits for it."""
        assert self._connection is not None
        return not self._heard and not self._connection.recv(1)

    def say(self, *messages: Message) -> None:
        assert self._connection is not None
        self._connection.sendall(b"".join(map(encode, messages)))

    def hang_up(self) -> None:
        assert self._connection is not None
        self._connection.close()

    def close(self) -> None:
        self._listening.close()
        if self._connection is not None:
            self._connection.close()


@contextmanager
def scheduler_of(path: Path) -> Iterator[tuple[ScriptedCache, SchedulerBridge]]:
    """A scripted cache process, and a scheduler that is connected to it."""
    bridge = SchedulerBridge(hello("scheduler"), path)
    with connected(path, bridge) as there:
        yield there, bridge


@contextmanager
def worker_of(path: Path) -> Iterator[tuple[ScriptedCache, WorkerBridge]]:
    """A scripted cache process, and a worker that is connected to it."""
    bridge = WorkerBridge(hello("worker"), path)
    with connected(path, bridge) as there:
        yield there, bridge


@contextmanager
def connected(path: Path, bridge: SchedulerBridge | WorkerBridge) -> Iterator[ScriptedCache]:
    there = ScriptedCache(path)
    try:
        assert not bridge.ready(), "it does not wait for the greeting"
        there.greet()
        wait_until(bridge.ready)
        yield there
    finally:
        bridge.close()
        there.close()
