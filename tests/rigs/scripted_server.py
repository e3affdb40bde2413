"""Servers on a Unix socket, scripted message by message: they show what a real one cannot be made to show."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Welcome
from kvtier.rpc.frames import FrameReader, Message, encode
from tests.rigs.bridges import hello
from tests.rigs.waiting import wait_until

MessageT = TypeVar("MessageT")


class ScriptedServer:
    """Listens on a socket path, and has one connection at a time. The test scripts every message."""

    def __init__(self, path: Path, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._reader = FrameReader()
        self._received: list[Any] = []
        self.outcomes: list[protocol.Outcome] = []
        """What the engine has reported of its requests, between its other messages."""
        self.ended: list[protocol.AnswerEnded] = []
        """The ends of answers that it has reported."""

    def accept(self) -> None:
        """Accept a pending connection, without a welcome."""
        if self._connection is not None:
            self._connection.close()
        self._listener.settimeout(10)
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(10)
        self._reader = FrameReader()

    def receive(self, kind: type[MessageT]) -> MessageT:
        """Return the next message that is no outcome. It must be a ``kind``."""
        assert self._connection is not None
        while not self._received:
            self._add(self._connection.recv(1 << 16))
        message = self._received.pop(0)
        assert isinstance(message, kind), message
        return message

    def nothing_received(self) -> bool:
        """Whether no message is pending."""
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._received and poll.poll(0) and (data := self._connection.recv(1 << 16)):
            self._add(data)
        return not self._received

    def is_disconnected(self) -> bool:
        """Wait for the client to disconnect; ``False`` if it sends a message instead."""
        assert self._connection is not None
        while not self._received and (data := self._connection.recv(1 << 16)):
            self._add(data)
        return not self._received

    def _add(self, data: bytes) -> None:
        for message in map(self._decode, self._reader.feed(data)):
            if isinstance(message, protocol.Outcomes):
                self.outcomes += message.requests
                self.ended += message.ended
            else:
                self._received.append(message)

    def send(self, *messages: Message, fds: Sequence[int] = ()) -> None:
        assert self._connection is not None
        data = b"".join(map(encode, messages))
        if fds:
            assert socket.send_fds(self._connection, [data], fds) == len(data)
        else:
            self._connection.sendall(data)

    def disconnect(self) -> None:
        assert self._connection is not None
        self._connection.close()

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


ARENA_BYTES = 1 << 20


class ScriptedCache(ScriptedServer):
    """A scripted cache process. Its arena is not written to."""

    def __init__(self, path: Path, epoch: int = 7) -> None:
        super().__init__(path, protocol.decode_from_engine)
        self.epoch = epoch

    def greet(self) -> Hello:
        """Accept a connection, and answer its ``Hello``, which is returned."""
        self.accept()
        greeting = self.receive(Hello)
        self.welcome()
        return greeting

    def welcome(self) -> None:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, ARENA_BYTES)
        welcome = Welcome(protocol.VERSION, self.epoch, ARENA_BYTES, ["ram", "ssd"], ["cpu", "disk"], None)
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
