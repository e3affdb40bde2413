"""Instances with small tiers, registered with a controller that the test runs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import ModelCache, Settings
from kvtier.catalog.catalog import State
from kvtier.fleet.member.protocol import Command, Fetch
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey, join_keys, root_key
from tests.cache.conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows
from tests.rigs.scripted_controller import (
    BUILT_IN,
    TOKEN,
    Conversation,
    ScriptedController,
    scripted_controller,
)

# Imported before the event loop runs: the imports would block it for too long.
import kvtier.fleet.member.controller_client  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip
import anyio.lowlevel

from tests.rigs.waiting import until

SECRET = "a secret that these tests share"


class Node:
    """An instance with one model."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.cache = instance.cache
        self.model: ModelCache = self.cache.model("llama", token_bytes=TOKEN_BYTES)

    @property
    def status(self) -> dict[str, Any]:
        status = self.instance.status()["controller"]
        assert isinstance(status, dict)
        return status

    async def store(self, chunks: int, seed: int = 0) -> list[ChunkKey]:
        """Store a prompt, which may exceed memory, in all tiers, and return its keys."""
        tokens = prompt(chunks, seed)
        keys = self.model.keys(tokens)
        values = rows(tokens)
        payload = CHUNK_TOKENS * TOKEN_BYTES
        for index, key in enumerate(keys):
            parent = keys[index - 1] if index else root_key(self.model.namespace)
            header = ChunkHeader(key, parent, self.model.namespace, payload)
            while self.cache.catalog.state(key, 0) is State.ABSENT:
                reservation = self.cache.reserve(header)
                if reservation is not None:
                    reservation.lease.view[HEADER_BYTES : HEADER_BYTES + payload] = values[index * payload :][
                        :payload
                    ]
                    self.cache.commit([reservation])
                await anyio.lowlevel.checkpoint()
        assert await self.cache.drain(10)
        return keys

    async def is_intact(self, chunks: int, seed: int = 0) -> bool:
        """Whether a prompt is retrieved completely and unchanged."""
        tokens = prompt(chunks, seed)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        return await self.model.retrieve(tokens, out) == len(tokens) and out == rows(tokens)

    def holds(self, keys: list[ChunkKey], tier: int) -> list[int]:
        """Return the indexes of the keys that a tier holds."""
        catalog = self.cache.catalog
        return [index for index, key in enumerate(keys) if catalog.state(key, tier) is State.READY]

    def held(self) -> dict[int, set[ChunkKey]]:
        """Return what the tiers of this host hold, without empty tiers."""
        catalog = self.cache.catalog
        ready = {
            tier.index: {key for key in catalog.keys(tier.index) if tier.index in catalog.tiers(key)}
            for tier in self.cache.tiers
            if not tier.shared
        }
        return {tier: keys for tier, keys in ready.items() if keys}

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in flight, and the stored chunks hold the only leases on memory."""
        await until(
            lambda: (
                not (
                    self.cache.pending_bytes
                    or self.cache.status()["flights"]
                    or self.cache.arena.leases != self.cache.catalog.count(0)
                )
            )
        )


OpenNode = Callable[..., AbstractAsyncContextManager[Node]]
Registered = Callable[..., AbstractAsyncContextManager[tuple[Conversation, Node]]]
BothRegistered = Callable[
    [dict[str, Any], dict[str, Any]], AbstractAsyncContextManager[tuple[Conversation, Node, Node]]
]


@pytest.fixture
def open_node(tmp_path: Path) -> OpenNode:
    """Open an instance: ``async with open_node(controller, ram=64, ssd=0, peer={...}) as node``.

    No lease may be left at its end.
    """

    @asynccontextmanager
    async def open_(
        controller: ScriptedController | str,
        /,
        *,
        name: str = "one",
        ram: int = 64,
        ssd: int = 0,
        **more: Any,
    ) -> AsyncIterator[Node]:
        tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES}]
        disk = more.pop("disk", {})
        if ssd:
            folder = str(tmp_path / f"{name}-ssd")
            capacity = ssd * CHUNK_OBJECT_BYTES
            tiers.append({"name": "ssd", "type": "disk", "path": folder, "capacity": capacity, **disk})
        url = controller if isinstance(controller, str) else controller.url
        controller_settings = {"url": url, "token": TOKEN, "instance_id": name, **more.pop("controller", {})}
        settings = Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, controller=controller_settings, **more)
        async with Instance.open(settings, plugins=BUILT_IN) as instance:
            node = Node(instance)
            yield node
            await node.wait_until_idle()

    return open_


@pytest.fixture
def registered(open_node: OpenNode) -> Registered:
    """Open an instance and its controller: ``async with registered(ssd=64) as (conversation, one)``."""

    @asynccontextmanager
    async def registered_(**settings: Any) -> AsyncIterator[tuple[Conversation, Node]]:
        async with scripted_controller() as controller, open_node(controller, **settings) as one:
            yield await controller.up_to_date(), one

    return registered_


@pytest.fixture
def both_registered(open_node: OpenNode) -> BothRegistered:
    """Open two instances: ``async with both_registered({...}, {...}) as (conversation_of_one, one, two)``."""

    @asynccontextmanager
    async def both(
        first: dict[str, Any], second: dict[str, Any]
    ) -> AsyncIterator[tuple[Conversation, Node, Node]]:
        async with scripted_controller() as controller, open_node(controller, **first) as one:
            conversation = await controller.up_to_date()
            async with open_node(controller, name="two", **second) as two:
                await controller.up_to_date(1)
                yield conversation, one, two

    return both


def prompt(chunks: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=chunks * CHUNK_TOKENS)


def fetch(
    keys: Sequence[ChunkKey],
    tier: int,
    peer: str | None = None,
    *,
    node: Node | None = None,
    seconds: float | None = None,
    length: int = CHUNK_OBJECT_BYTES,
) -> Callable[[int], Command]:
    namespace = bytes(32) if node is None else node.model.namespace
    lengths = [length] * len(keys)
    return lambda ticket: Fetch(ticket, tier, peer, namespace, join_keys(keys), lengths, seconds)


def address_of(node: Node) -> str:
    assert node.instance.server is not None
    return f"127.0.0.1:{node.instance.server.address[1]}"
