"""A registry behind a real server on loopback, and instances whose messages a test chooses."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from blake3 import blake3
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from kvtier.concurrency.tasks import open_tasks
from kvtier.fleet.controller import connection
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import (
    CONNECT_PATH,
    VERSION,
    Changed,
    FromController,
    Heartbeat,
    Hello,
    Model,
    Serves,
    TierDescription,
    TierState,
    UpToDate,
    Welcome,
    decode_from_controller,
    decode_from_instance,
)
from kvtier.http import serving
from kvtier.memory.keys import KEY_BYTES, ChunkKey, join_keys, split_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import MAX_FRAME_BYTES, Message, Refused, encode_body
from kvtier.rpc.websocket import ServerWire
from tests.rigs.waiting import until

TIMEOUT_SECONDS = 60.0
"""Upper bound for whatever a test waits for."""
RAM, DISK, POOL = 0, 1, 2
TIERS = [
    TierDescription("ram", "cpu", 1 << 30, False),
    TierDescription("ssd", "disk", 1 << 40, False),
    TierDescription("pool", "redis", None, True),
]
LAYOUT = ChunkLayout(256, (GroupLayout(32, (1024, 1024)),))
MODEL = Model(["meta/llama", "llama"], namespace("meta/llama", LAYOUT), LAYOUT, True)

_incarnations = itertools.count(1)


def keys_of(name: str, count: int) -> list[ChunkKey]:
    """Return ``count`` keys, distinct for each name."""
    return split_keys(blake3(name.encode()).digest(KEY_BYTES * count))


def hello(instance: str = "one", **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "version": VERSION,
        "instance": instance,
        "incarnation": next(_incarnations),
        "kvtier": "0.1.0",
        "host": "test-host",
        "process": 4242,
        "peer": f"{instance}:8200",
        "transport": "tcp",
        "tiers": TIERS,
    }
    return Hello(**{**fields, **changes})


def heartbeat(used: int = 0, looked_up: int = 0, found: int = 0) -> Heartbeat:
    """Return a heartbeat. All chunks that were looked up and found have one token."""
    tiers = [TierState(used, used // 4096, True, found, found)] * len(TIERS)
    return Heartbeat(tiers, looked_up, ["engine"], 0, 0, looked_up)


def unconnected() -> Endpoint:
    """Return an endpoint that queues what is sent to it."""
    websocket = WebSocket({"type": "websocket"}, None, None)  # type: ignore[arg-type]
    return Endpoint(ServerWire(websocket), decode_from_instance)


class RegisteringInstance:
    """The instance's end of one connection."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket

    async def send(self, *messages: Message) -> None:
        for message in messages:
            await self.websocket.send(encode_body(message))

    async def receive(self) -> FromController:
        with anyio.fail_after(TIMEOUT_SECONDS):
            body = await self.websocket.recv()
        assert isinstance(body, bytes)
        return decode_from_controller(body)

    async def register(self, instance: str = "one", **changes: Any) -> Welcome:
        await self.send(hello(instance, **changes))
        answer = await self.receive()
        assert isinstance(answer, Welcome), answer
        return answer

    async def report(
        self, stored: Sequence[ChunkKey], tier: int = RAM, removed: Sequence[ChunkKey] = ()
    ) -> None:
        await self.send(Changed(tier, join_keys(stored), join_keys(removed)))

    async def refusal(self) -> str:
        """Return the reason of the controller's refusal, once it has closed the connection."""
        while not isinstance(answer := await self.receive(), Refused):
            pass
        await self.wait_closed()
        return answer.reason

    async def wait_closed(self) -> None:
        with anyio.fail_after(TIMEOUT_SECONDS):
            try:
                while True:
                    await self.websocket.recv()
            except ConnectionClosed:
                return


class RunningRegistry:
    """A registry behind a real server."""

    def __init__(self, registry: Registry, port: int) -> None:
        self.registry = registry
        self.port = port

    @asynccontextmanager
    async def instance(self, name: str | None = None, **changes: Any) -> AsyncIterator[RegisteringInstance]:
        """Connect an instance, and register it if it has a name."""
        url = f"ws://127.0.0.1:{self.port}{CONNECT_PATH}"
        async with connect(url, compression=None, proxy=None, close_timeout=1) as websocket:
            instance = RegisteringInstance(websocket)
            if name is not None:
                await instance.register(name, **changes)
            yield instance

    @asynccontextmanager
    async def instance_holding(
        self, name: str, keys: Sequence[ChunkKey], tier: int = RAM, **changes: Any
    ) -> AsyncIterator[RegisteringInstance]:
        """Connect an instance that serves a model, and has reported the chunks that it holds."""
        async with self.instance(name, **changes) as instance:
            await instance.send(Serves([MODEL]))
            await instance.report(keys, tier)
            await instance.send(UpToDate(), heartbeat())
            await self.wait_until(lambda: self.member(name).heartbeat is not None)
            yield instance

    def member(self, name: str = "one") -> Member:
        return self.registry.find(name)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        await until(lambda: condition())


@asynccontextmanager
async def running_registry(port: int = 0, **settings: Any) -> AsyncIterator[RunningRegistry]:
    """Run a registry that accepts instances, by default on a free port."""
    registry = Registry(**settings)

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        await connection.serve(registry, websocket)

    app = Starlette(routes=[WebSocketRoute(CONNECT_PATH, endpoint)])
    async with open_tasks() as tasks:
        tasks.start_soon(registry.run)
        async with serving(app, ("127.0.0.1", port), ws_max_size=MAX_FRAME_BYTES) as (_, bound):
            yield RunningRegistry(registry, bound)
        tasks.cancel_scope.cancel()
