"""A whole controller in the test's own process, and scripted instances that do what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from kvtier.agent.protocol import (
    CONNECT_PATH,
    Cancel,
    Changed,
    Command,
    Delete,
    DeleteAll,
    Done,
    Failed,
    Fetch,
    InStep,
    Model,
    Pin,
    Progress,
    Serves,
    Tokenize,
    Unpin,
    Welcome,
    decode_from_controller,
)
from kvtier.controller.models import Models
from kvtier.controller.serve import Controller, controlling
from kvtier.controller.settings import service_settings
from kvtier.keys import ChunkKey, join_keys, split_keys
from tests.controller.registering import DISK, MODEL, PATIENCE, RAM, TIERS, RegisteringInstance, heartbeat

CHUNK = MODEL.layout.chunk_tokens
TOKENS = list(range(4 * CHUNK + 44))
"""Four whole chunks and a part of one."""
KEYS = list(Models().prompt(MODEL, TOKENS).keys)
LENGTHS = list(Models().prompt(MODEL, TOKENS).lengths)


WHOLE = 4 * CHUNK
A_TO_B = {"old_position": ["a", "ram"], "new_position": ["b", "ram"], "tokens": TOKENS}
B_TO_A = {"old_position": ["b", "ram"], "new_position": ["a", "ram"], "tokens": TOKENS}


class Gate:
    """Holds up commands of some kind until it is opened."""

    def __init__(self, kind: type[Command] = Fetch) -> None:
        self.reached, self.opened = anyio.Event(), anyio.Event()
        self._kind = kind

    async def __call__(self, command: Command) -> None:
        if isinstance(command, self._kind):
            self.reached.set()
            await self.opened.wait()


class World:
    """Scripted instances, by the address at which others reach them."""

    def __init__(self) -> None:
        self.instances: dict[str, ObedientInstance] = {}


class ObedientInstance(RegisteringInstance):
    """Keeps book of keys in tiers, and does to it what the controller says."""

    name: str
    world: World

    def begin(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.held: list[dict[ChunkKey, None]] = [{}, {}, {}]
        self.pinned: dict[ChunkKey, float | None] = {}
        self.commands: list[Command] = []
        self.before: Callable[[Command], Awaitable[None]] | None = None
        """Awaited before a command is carried out."""
        self.refuse: str | None = None
        self.room: int | None = None
        """How many chunks its memory takes."""
        self.cancelled: list[int] = []
        world.instances[f"{name}:8200"] = self

    async def store(self, tier: int, keys: Sequence[ChunkKey]) -> None:
        self.held[tier].update(dict.fromkeys(keys))
        await self.tell(keys, tier)

    async def obey(self, tasks: TaskGroup) -> None:
        """Take commands until the connection ends."""
        while True:
            try:
                body = await self.websocket.recv()
            except ConnectionClosed:
                return
            assert isinstance(body, bytes)
            message = decode_from_controller(body)
            if isinstance(message, Cancel):
                self.cancelled.append(message.ticket)
            elif isinstance(message, Command):
                tasks.start_soon(self._obey_one, message)

    async def _obey_one(self, command: Command) -> None:
        self.commands.append(command)
        try:
            if self.before is not None:
                await self.before(command)
            if self.refuse is not None:
                await self.say(Failed(command.ticket, self.refuse))
            else:
                await self.say(await self._carry_out(command))
        except ConnectionClosed:
            return

    async def _carry_out(self, command: Command) -> Done:
        match command:
            case Fetch():
                return await self._fetch(command)
            case Delete():
                keys = [key for key in split_keys(command.keys) if key in self.held[command.tier]]
                await self._remove(command.tier, keys)
                return Done(command.ticket, join_keys(keys), len(keys), 100 * len(keys))
            case DeleteAll():
                tiers = range(len(self.held)) if command.tier is None else [command.tier]
                gone = {key for tier in tiers for key in self.held[tier]}
                for tier in tiers:
                    await self._remove(tier, list(self.held[tier]))
                return Done(command.ticket, b"", len(gone), 100 * len(gone))
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
        raise AssertionError(command)

    async def _fetch(self, command: Fetch) -> Done:
        keys, fetched, reason = split_keys(command.keys), 0, None
        for count, key in enumerate(keys):
            if key in self.held[command.tier]:
                continue
            other = self.world.instances.get(command.peer or "")
            here = any(key in held for held in self.held)
            if not here and (other is None or not any(key in held for held in other.held)):
                reason = "the peer has it not"
                break
            if command.tier == RAM and self.room is not None and len(self.held[RAM]) >= self.room:
                reason = "no room"
                break
            if not here and other is not None and key not in other.held[RAM]:
                await other.store(RAM, [key])  # As a peer does that must read it from its disk.
            await self.store(command.tier, [key])
            fetched += 1
            await self.say(Progress(command.ticket, count + 1, 100 * fetched))
        there = [key for key in keys if key in self.held[command.tier]]
        return Done(command.ticket, join_keys(there), len(there), 100 * fetched, reason)

    async def _remove(self, tier: int, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held[tier].pop(key, None)
        await self.say(Changed(tier, b"", join_keys(keys)))


class RunningController:
    """One that runs in this process, and who asks it over HTTP."""

    def __init__(self, controller: Controller, client: httpx.AsyncClient, token: str | None) -> None:
        self.controller = controller
        self.client = client
        self.registry = controller.registry
        self.events = controller.operations.events
        self.token = token
        self.world = World()

    @property
    def url(self) -> str:
        host, port = self.controller.address
        return f"http://{host}:{port}"

    async def ask(self, path: str, **body: Any) -> Any:
        """POST; the answer of one that succeeds."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, status: int, **body: Any) -> Any:
        """POST; what one that fails in this way says."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ended(self, accepted: Any) -> Any:
        """The event, when it has ended."""
        event = await self.get(f"/events/{accepted['event_id']}", wait=PATIENCE)
        assert event["state"] in ("done", "failed"), event
        return event

    async def done(self, path: str, **body: Any) -> Any:
        """POST, and the event when it is done."""
        event = await self.ended(await self.ask(path, **body))
        assert event["state"] == "done", event
        return event

    async def held(self, **body: Any) -> dict[str, dict[str, int]]:
        """By instance and tier: how many leading tokens of the prompt it holds."""
        found: dict[str, dict[str, int]] = (await self.ask("/lookup", **({"tokens": TOKENS} | body)))[
            "instances"
        ]
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(PATIENCE):
            while not condition():
                await anyio.sleep(0.005)

    @asynccontextmanager
    async def instance(
        self,
        name: str,
        *,
        ram: Sequence[ChunkKey] = (),
        disk: Sequence[ChunkKey] = (),
        models: Sequence[Model] = (MODEL,),
        **changes: Any,
    ) -> AsyncIterator[ObedientInstance]:
        """A scripted one that has registered, has told all that it holds, and obeys."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        url = self.url.replace("http", "ws") + CONNECT_PATH
        async with (
            connect(
                url, additional_headers=headers, compression=None, proxy=None, close_timeout=1
            ) as websocket,
            anyio.create_task_group() as tasks,
        ):
            instance = ObedientInstance(websocket)
            instance.begin(name, self.world)
            welcome = await instance.register(name, **changes)
            assert isinstance(welcome, Welcome)
            tasks.start_soon(instance.obey, tasks)
            await instance.say(Serves(list(models)))
            await instance.store(RAM, ram)
            await instance.store(DISK, disk)
            states = heartbeat().tiers[: len(changes.get("tiers", TIERS))]
            await instance.say(InStep(), msgspec.structs.replace(heartbeat(), tiers=states))
            await self.until(lambda: name in self.registry.members and self.registry.find(name).heartbeat)
            try:
                yield instance
            finally:
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def running_controller(folder: Path, **changes: Any) -> AsyncIterator[RunningController]:
    """A controller on a free port; afterwards every event has ended."""
    given = {"listen": "127.0.0.1:0", "state": folder / "controller.sqlite", "silence": 60} | changes
    settings = service_settings(**given)
    token = settings.token.get_secret_value() if settings.token is not None else None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with controlling(settings) as controller:
        host, port = controller.address
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", headers=headers, timeout=30, trust_env=False
        ) as client:
            yield RunningController(controller, client, token)
    assert controller.operations.events.unfinished == 0


def tokens_of(chunks: int) -> list[int]:
    """The tokens of so many leading chunks of the prompt."""
    return TOKENS[: chunks * CHUNK]
