"""Two endpoints that are connected by a real socket, and a protocol for them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from kvtier.errors import ChannelError
from kvtier.rpc.endpoint import Endpoint, Handle
from kvtier.rpc.frames import Message, Ping, Pong, Refused, Reply, Request, decoder
from kvtier.rpc.wire import SocketWire


class Hello(Message, frozen=True, array_like=True, tag=1):
    version: int


class Welcome(Message, frozen=True, array_like=True, tag=2):
    version: int


class Ask(Request, frozen=True, array_like=True, tag=10):
    text: str


class Answer(Reply, frozen=True, array_like=True, tag=11):
    text: str


class Note(Message, frozen=True, array_like=True, tag=12):
    data: bytes


decode: Callable[[bytes], Message] = decoder(
    Hello | Welcome | Refused | Ping | Pong | Ask | Answer | Note, "a message of these tests"
)


@dataclass
class Side:
    """One side of a connection, and what its :meth:`Endpoint.run` has returned."""

    endpoint: Endpoint
    wire: SocketWire
    cause: ChannelError | None = None

    async def run(self, handle: Handle | None = None) -> None:
        self.cause = await self.endpoint.run(handle)

    async def ask(self, text: str) -> str:
        return await self.endpoint.call(
            lambda ticket: Ask(ticket, text), Answer, lambda answer: answer.text
        ).reply()

    def send_bytes(self, data: bytes) -> None:
        """Send bytes at once, past the queue."""
        self.wire.frames.socket.sendall(data)


open_wires: list[SocketWire] = []
"""Closed after each test, by ``conftest.py``."""


def sides(**settings: float) -> tuple[Side, Side]:
    wires = [SocketWire(end) for end in socket.socketpair()]
    open_wires.extend(wires)
    ours, theirs = (Side(Endpoint(wire, decode, **settings), wire) for wire in wires)  # type: ignore[arg-type]
    return ours, theirs


@asynccontextmanager
async def connected(handle: Handle | None = None, **settings: float) -> AsyncIterator[tuple[Side, Side]]:
    """Run both sides; ``handle`` is that of the second."""
    ours, theirs = sides(**settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.run)
        tasks.start_soon(theirs.run, handle)
        try:
            yield ours, theirs
        finally:
            tasks.cancel_scope.cancel()
