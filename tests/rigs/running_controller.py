"""A complete controller in the test process, and instances whose messages a test chooses or scripts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup
from blake3 import blake3
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.serve import Controller, run_controller
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.member.protocol import (
    CONNECT_PATH,
    VERSION,
    Cancel,
    Changed,
    Command,
    Counters,
    Delete,
    DeleteAll,
    Done,
    Explain,
    ExplainPrompt,
    Failed,
    Fetch,
    FromController,
    Heartbeat,
    Hello,
    Model,
    Pin,
    Progress,
    Serves,
    TierDescription,
    TierState,
    Tokenize,
    Unpin,
    UpToDate,
    Welcome,
    decode_from_controller,
    decode_from_instance,
)
from kvtier.memory.keys import KEY_BYTES, ChunkKey, join_keys, split_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.observability.requests import PromptReport, WhyReport
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message, Ping, Pong, Refused, encode_body
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
CHUNK = MODEL.layout.chunk_tokens
REST = 32
TOKENS = list(range(4 * CHUNK + REST))
"""Four whole chunks and a partial one of a whole block."""
KEYS = list(PromptChunks.of(MODEL, TOKENS).keys)
LENGTHS = list(PromptChunks.of(MODEL, TOKENS).lengths)


WHOLE = 4 * CHUNK
A_TO_B = {"old_position": ["a", "ram"], "new_position": ["b", "ram"], "tokens": TOKENS}
B_TO_A = {"old_position": ["b", "ram"], "new_position": ["a", "ram"], "tokens": TOKENS}


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


def heartbeat(
    used: int = 0, looked_up: int = 0, found: int = 0, counters: Counters | None = None
) -> Heartbeat:
    """Return a heartbeat. All chunks that were looked up and found have one token."""
    tiers = [TierState(used, used // 4096, True, found, found)] * len(TIERS)
    return Heartbeat(tiers, looked_up, ["engine"], 0, 0, looked_up, counters)


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


class Gate:
    """Blocks commands of one type until it is opened."""

    def __init__(self, kind: type[Command] = Fetch) -> None:
        self.reached, self.opened = anyio.Event(), anyio.Event()
        self._kind = kind

    async def __call__(self, command: Command) -> None:
        if isinstance(command, self._kind):
            self.reached.set()
            await self.opened.wait()


class Network:
    """Scripted instances, by their peer addresses."""

    def __init__(self) -> None:
        self.instances: dict[str, ScriptedInstance] = {}


class ScriptedInstance(RegisteringInstance):
    """Tracks keys by tier, and applies the controller's commands to them."""

    def __init__(self, websocket: ClientConnection, name: str, network: Network) -> None:
        super().__init__(websocket)
        self.name = name
        self.network = network
        self.held: list[dict[ChunkKey, None]] = [{}, {}, {}]
        self.pinned: dict[ChunkKey, float | None] = {}
        self.commands: list[Command] = []
        self.before: Callable[[Command], Awaitable[None]] | None = None
        """Awaited before a command is executed."""
        self.refuse: str | None = None
        self.capacity: int | None = None
        """Capacity of its memory in chunks."""
        self.cancelled: list[int] = []
        self.report_why = WhyReport([], [])
        self.prompts: list[PromptReport] = []
        network.instances[f"{name}:8200"] = self

    async def store(self, tier: int, keys: Sequence[ChunkKey]) -> None:
        self.held[tier].update(dict.fromkeys(keys))
        await self.report(keys, tier)

    async def run(self, tasks: TaskGroup) -> None:
        """Execute commands until the connection ends."""
        while True:
            try:
                body = await self.websocket.recv()
            except ConnectionClosed:
                return
            assert isinstance(body, bytes)
            message = decode_from_controller(body)
            if isinstance(message, Cancel):
                self.cancelled.append(message.ticket)
            elif isinstance(message, Ping):
                await self.send(Pong(message.ticket))
            elif isinstance(message, Command):
                tasks.start_soon(self._run_command, message)

    async def _run_command(self, command: Command) -> None:
        self.commands.append(command)
        try:
            if self.before is not None:
                await self.before(command)
            if self.refuse is not None:
                await self.send(Failed(command.ticket, self.refuse))
            else:
                await self.send(await self._execute(command))
        except ConnectionClosed:
            return

    async def _execute(self, command: Command) -> Done:
        match command:
            case Fetch():
                return await self._fetch(command)
            case Delete():
                keys = [key for key in split_keys(command.keys) if key in self.held[command.tier]]
                await self.remove(command.tier, keys)
                return Done(command.ticket, join_keys(keys), len(keys), 100 * len(keys))
            case DeleteAll():
                tiers = range(len(self.held)) if command.tier is None else [command.tier]
                removed = {key for tier in tiers for key in self.held[tier]}
                for tier in tiers:
                    await self.remove(tier, list(self.held[tier]))
                return Done(command.ticket, b"", len(removed), 100 * len(removed))
            case Pin():
                keys = [key for key in split_keys(command.keys) if any(key in held for held in self.held)]
                self.pinned.update(dict.fromkeys(keys, command.seconds))
                return Done(command.ticket, join_keys(keys), len(keys), 0)
            case Unpin():
                keys = split_keys(command.keys)
                for key in keys:
                    self.pinned.pop(key, None)
                return Done(command.ticket, join_keys(keys), len(keys), 0)
            case Tokenize():
                return Done(command.ticket, b"", 0, 0, tokens=list(command.prompt.encode()))
            case Explain():
                return Done(command.ticket, b"", 0, 0, report=self.report_why)
            case ExplainPrompt():
                return Done(command.ticket, b"", 0, 0, prompts=self.prompts)
        raise AssertionError(command)

    async def _fetch(self, command: Fetch) -> Done:
        keys, fetched, reason = split_keys(command.keys), 0, None
        for count, key in enumerate(keys):
            if key in self.held[command.tier]:
                continue
            other = self.network.instances.get(command.peer or "")
            is_local = any(key in held for held in self.held)
            if not is_local and (other is None or not any(key in held for held in other.held)):
                reason = "the peer does not hold it"
                break
            if command.tier == RAM and self.capacity is not None and len(self.held[RAM]) >= self.capacity:
                reason = "no room"
                break
            if not is_local and other is not None and key not in other.held[RAM]:
                await other.store(RAM, [key])  # Like a peer that reads the chunk from its disk first.
            await self.store(command.tier, [key])
            fetched += 1
            await self.send(Progress(command.ticket, count + 1, 100 * fetched))
        held = [key for key in keys if key in self.held[command.tier]]
        return Done(command.ticket, join_keys(held), len(held), 100 * fetched, reason)

    async def remove(self, tier: int, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held[tier].pop(key, None)
        await self.send(Changed(tier, b"", join_keys(keys)))


class RunningController:
    """A controller in this process, and an HTTP client of it."""

    def __init__(self, controller: Controller, client: httpx.AsyncClient, token: str | None) -> None:
        self.controller = controller
        self.client = client
        self.registry = controller.registry
        self.events = controller.operations.events
        self.token = token
        self.network = Network()

    @property
    def url(self) -> str:
        host, port = self.controller.address
        return f"http://{host}:{port}"

    @property
    def port(self) -> int:
        return self.controller.address[1]

    async def post(self, path: str, **body: Any) -> Any:
        """Send a POST that succeeds, and return the response."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post_refused(self, path: str, status: int, **body: Any) -> Any:
        """Send a POST that fails with ``status``, and return the response."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def wait_for_end(self, accepted: Any) -> Any:
        """Wait for the end of an event, and return it."""
        event = await self.get(f"/events/{accepted['event_id']}", wait=TIMEOUT_SECONDS)
        assert event["state"] in ("done", "failed"), event
        return event

    async def error_of(self, accepted: Any) -> str:
        """Wait until an event has failed, and return the reason."""
        event = await self.wait_for_end(accepted)
        assert event["state"] == "failed", event
        error: str = event["error"]
        return error

    async def failed(self, path: str, **body: Any) -> str:
        """Send a POST, wait until its event has failed, and return the reason."""
        return await self.error_of(await self.post(path, **body))

    async def post_held(
        self, path: str, at: ScriptedInstance, kind: type[Command] = Fetch, **body: Any
    ) -> tuple[Any, Gate]:
        """Send a POST, and hold its first command of a type at an instance until the gate is opened."""
        gate = at.before = Gate(kind)
        accepted = await self.post(path, **body)
        await gate.reached.wait()
        return accepted, gate

    async def done(self, path: str, **body: Any) -> Any:
        """Send a POST, wait until its event is done, and return the event."""
        event = await self.wait_for_end(await self.post(path, **body))
        assert event["state"] == "done", event
        return event

    async def held(self, **body: Any) -> dict[str, dict[str, int]]:
        """Look the prompt up: the number of leading tokens by instance and tier."""
        found: dict[str, dict[str, int]] = (await self.post("/lookup", **({"tokens": TOKENS} | body)))[
            "instances"
        ]
        return found

    async def wait_until(self, condition: Callable[[], object]) -> None:
        await until(lambda: condition())

    def member(self, name: str = "one") -> Member:
        return self.registry.find(name)

    @asynccontextmanager
    async def connect(self, name: str | None = None, **changes: Any) -> AsyncIterator[RegisteringInstance]:
        """Connect an instance, and register it if it has a name."""
        async with self._connection() as websocket:
            instance = RegisteringInstance(websocket)
            if name is not None:
                await instance.register(name, **changes)
            yield instance

    @asynccontextmanager
    async def holding(
        self,
        name: str,
        keys: Sequence[ChunkKey],
        tier: int = RAM,
        state: Heartbeat | None = None,
        **changes: Any,
    ) -> AsyncIterator[RegisteringInstance]:
        """Connect an instance that serves a model, and has reported the chunks that it holds."""
        async with self.connect(name, **changes) as instance:
            await instance.send(Serves([MODEL]))
            await instance.report(keys, tier)
            await instance.send(UpToDate(), state or heartbeat())
            await until(lambda: self.member(name).heartbeat)
            yield instance

    @asynccontextmanager
    async def instance(
        self,
        name: str,
        *,
        ram: Sequence[ChunkKey] = (),
        disk: Sequence[ChunkKey] = (),
        models: Sequence[Model] = (MODEL,),
        before: Callable[[Command], Awaitable[None]] | None = None,
        **changes: Any,
    ) -> AsyncIterator[ScriptedInstance]:
        """Run a scripted instance that has registered and reported everything that it holds."""
        async with self._connection() as websocket, anyio.create_task_group() as tasks:
            instance = ScriptedInstance(websocket, name, self.network)
            instance.before = before
            await instance.register(name, **changes)
            tasks.start_soon(instance.run, tasks)
            await instance.send(Serves(list(models)))
            await instance.store(RAM, ram)
            await instance.store(DISK, disk)
            states = heartbeat().tiers[: len(changes.get("tiers", TIERS))]
            await instance.send(UpToDate(), msgspec.structs.replace(heartbeat(), tiers=states))
            await until(lambda: name in self.registry.members and self.member(name).heartbeat)
            try:
                yield instance
            finally:
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[ClientConnection]:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        url = self.url.replace("http", "ws") + CONNECT_PATH
        async with connect(
            url, additional_headers=headers, compression=None, proxy=None, close_timeout=1
        ) as websocket:
            yield websocket


@asynccontextmanager
async def running_controller(folder: Path, **changes: Any) -> AsyncIterator[RunningController]:
    """Run a controller on a free port. At its end every event must have ended, or be left to the next one."""
    values = {
        "listen": "127.0.0.1:0",
        "state": folder / "controller.sqlite",
        "instance_timeout": 60,
    } | changes
    settings = ServiceSettings.of(**values)
    token = settings.token.get_secret_value() if settings.token is not None else None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with run_controller(settings) as controller:
        host, port = controller.address
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", headers=headers, timeout=30, trust_env=False, verify=False
        ) as client:
            yield RunningController(controller, client, token)
    events = controller.operations.events
    assert events.closed or events.unfinished == 0


def tokens_of(chunks: int) -> list[int]:
    """Return the tokens of the leading chunks of the prompt."""
    return TOKENS[: chunks * CHUNK]
