"""A controller for tests: a real WebSocket server that records messages, and sends what a test wants."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from kvtier.fleet.member.protocol import (
    CONNECT_PATH,
    VERSION,
    Changed,
    Command,
    Done,
    Failed,
    FromInstance,
    Heartbeat,
    HeldBy,
    Hello,
    Lost,
    Model,
    Progress,
    ServedAt,
    Serves,
    UpToDate,
    Welcome,
    WhatIf,
    WhoHolds,
    WhoServes,
    decode_from_instance,
)
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.plugins import Plugins
from kvtier.rpc.frames import MAX_FRAME_BYTES, Message, Ping, Pong, Refused, encode_body
from tests.rigs.waiting import until

TOKEN = "a token of these tests"
BUILT_IN = Plugins.load([])
"""Loaded at import, because importing every backend would block an event loop for too long."""
Greeting = Callable[["Conversation"], Awaitable[bool]]


class Conversation:
    """One connection of an instance, and what it has reported."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.hello: Hello | None = None
        self.models: list[Model] = []
        self.heartbeats: list[Heartbeat] = []
        self.what_ifs: list[WhatIf] = []
        self.held: dict[int, set[ChunkKey]] = {}
        self.up_to_date = False
        self.lost = 0
        self.questions: list[WhoHolds] = []
        self.holders: tuple[list[str], list[int]] | None = ([], [])
        """The reply to ``WhoHolds``; ``None`` to send no reply."""
        self.served: list[str] = []
        """The addresses at which instances serve peers."""
        self.asked: list[str] = []
        """The addresses that ``WhoServes`` has asked for."""
        self.progress: list[Progress] = []
        self.answers: dict[int, Done | Failed] = {}
        self.refusal: str | None = None
        """Why the instance has ended the connection, if it sent a reason."""
        self.pings = 0
        self._tickets = itertools.count(1)

    async def send(self, message: Message | bytes | str) -> None:
        await self.socket.send(encode_body(message) if isinstance(message, Message) else message)

    async def start_command(self, make: Callable[[int], Command]) -> int:
        ticket = next(self._tickets)
        await self.send(make(ticket))
        return ticket

    async def wait_for_answer(self, ticket: int) -> Done | Failed:
        await until(lambda: ticket in self.answers)
        return self.answers.pop(ticket)

    async def run_command(self, make: Callable[[int], Command]) -> Done | Failed:
        return await self.wait_for_answer(await self.start_command(make))

    async def done(self, make: Callable[[int], Command]) -> Done:
        answer = await self.run_command(make)
        assert isinstance(answer, Done), answer
        return answer

    async def failed(self, make: Callable[[int], Command]) -> str:
        answer = await self.run_command(make)
        assert isinstance(answer, Failed), answer
        return answer.reason

    async def listen(self) -> None:
        async for body in self.socket:
            assert isinstance(body, bytes)
            await self._receive(decode_from_instance(body))

    async def _receive(self, message: FromInstance) -> None:
        match message:
            case Changed():
                held = self.held.setdefault(message.tier, set())
                held.difference_update(split_keys(message.removed))
                held.update(split_keys(message.stored))
            case Lost():
                self.held.clear()
                self.up_to_date = False
                self.lost += 1
            case UpToDate():
                self.up_to_date = True
            case Serves():
                self.models = message.models
            case Heartbeat():
                self.heartbeats.append(message)
            case WhatIf():
                self.what_ifs.append(message)
            case Progress():
                self.progress.append(message)
            case Done() | Failed():
                assert message.ticket not in self.answers
                self.answers[message.ticket] = message
            case WhoHolds():
                self.questions.append(message)
                if self.holders is not None:
                    await self.send(HeldBy(message.ticket, *self.holders))
            case WhoServes():
                self.asked += message.addresses
                await self.send(
                    ServedAt(message.ticket, [at for at in message.addresses if at in self.served])
                )
            case Ping():
                self.pings += 1
                await self.send(Pong(message.ticket))
            case Refused():
                self.refusal = message.reason
            case Hello() | Pong():
                raise AssertionError(message)


class ScriptedController:
    """Accepts instances, with one conversation per connection. Can be killed and restarted."""

    def __init__(self, heartbeat: float = 0.05, idle_timeout: float = 5.0) -> None:
        self.welcome = Welcome(VERSION, heartbeat, idle_timeout)
        self.conversations: list[Conversation] = []
        self.attempts = 0
        self.token: str | None = TOKEN
        self.greeting: Greeting | None = None
        """Called before the welcome. Returns whether to continue."""
        self._server: Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self._port,
            process_request=self._check,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,
            close_timeout=0.2,
        )
        self._port = next(iter(self._server.sockets)).getsockname()[1]

    async def kill(self) -> None:
        """Abort all connections and stop listening."""
        server, self._server = self._server, None
        if server is not None:
            for connection in list(server.connections):
                connection.transport.abort()
            server.close()
            await server.wait_closed()

    async def conversation(self, number: int = 0) -> Conversation:
        """Return a conversation that has received its ``Hello``, by the order of connection."""
        await until(lambda: len(self.conversations) > number and self.conversations[number].hello)
        return self.conversations[number]

    async def up_to_date(self, number: int = 0) -> Conversation:
        conversation = await self.conversation(number)
        await until(lambda: conversation.up_to_date)
        return conversation

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        self.attempts += 1
        if request.path != CONNECT_PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, "not here\n")
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no\n")
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        conversation = Conversation(socket)
        try:
            hello = decode_from_instance(await socket.recv(decode=False))
            assert isinstance(hello, Hello)
            conversation.hello = hello
            if self.greeting is not None and not await self.greeting(conversation):
                return
            self.conversations.append(conversation)
            await conversation.send(self.welcome)
            await conversation.listen()
        except ConnectionClosed:
            pass


@asynccontextmanager
async def scripted_controller(**options: Any) -> AsyncIterator[ScriptedController]:
    controller = ScriptedController(**options)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.kill()
