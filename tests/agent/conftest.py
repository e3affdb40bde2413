"""Instances with small tiers, registered with a controller of the test's own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import ModelCache, Settings
from kvtier.agent.protocol import Command, Fetch
from kvtier.catalog import State
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.instance import Instance
from kvtier.keys import ChunkKey, join_keys
from tests.agent.controlling import BUILT_IN, TOKEN, Controller
from tests.cache.conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows

# Imported here because that takes longer than an event loop may be blocked.
import kvtier.agent.agent  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip
import anyio.lowlevel

SECRET = "a secret that these tests share"


class Home:
    """An instance, and one model in it."""

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
        """Store a prompt of so many chunks, be it longer than memory, also in the tiers below; its keys."""
        tokens = prompt(chunks, seed)
        keys = self.model.keys(tokens)
        values = rows(tokens)
        payload = CHUNK_TOKENS * TOKEN_BYTES
        for at, key in enumerate(keys):
            parent = keys[at - 1] if at else self.model._root
            header = ChunkHeader(key, parent, self.model._namespace, payload)
            while self.cache.hierarchy.catalog.state(key, 0) is State.ABSENT:
                reservation = self.cache.reserve(header)
                if reservation is not None:
                    reservation.lease.view[HEADER_BYTES : HEADER_BYTES + payload] = values[at * payload :][
                        :payload
                    ]
                    self.cache.commit([reservation])
                await anyio.lowlevel.checkpoint()
        assert await self.cache.drain(10)
        return keys

    async def is_whole(self, chunks: int, seed: int = 0) -> bool:
        """Whether a prompt comes back, every byte of it right."""
        tokens = prompt(chunks, seed)
        out = bytearray(len(tokens) * TOKEN_BYTES)
        return await self.model.retrieve(tokens, out) == len(tokens) and out == rows(tokens)

    def holds(self, keys: list[ChunkKey], tier: int) -> list[int]:
        catalog = self.cache.hierarchy.catalog
        return [at for at, key in enumerate(keys) if catalog.state(key, tier) is State.READY]

    def held(self) -> dict[int, set[ChunkKey]]:
        """What the tiers of this host hold, and nothing for those that hold nothing."""
        catalog = self.cache.hierarchy.catalog
        ready = {
            tier.index: {key for key in catalog.keys(tier.index) if tier.index in catalog.tiers(key)}
            for tier in self.cache.hierarchy.tiers
            if not tier.shared
        }
        return {tier: keys for tier, keys in ready.items() if keys}

    async def at_rest(self) -> None:
        """Wait until nothing is on its way, and nothing is leased but what memory holds."""
        with anyio.fail_after(30):
            while (
                self.cache.pending_bytes
                or self.cache.status()["flights"]
                or self.cache.arena.leases != self.cache.hierarchy.catalog.count(0)
            ):
                await anyio.sleep(0.005)


OpenHome = Callable[..., AbstractAsyncContextManager[Home]]


@pytest.fixture
def home(tmp_path: Path) -> OpenHome:
    """``async with home(controller, ram=64, ssd=0, peer={...}) as home``: nothing is leased at its end."""

    @asynccontextmanager
    async def open_home(
        controller: Controller | str, /, *, name: str = "one", ram: int = 64, ssd: int = 0, **more: Any
    ) -> AsyncIterator[Home]:
        tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES}]
        disk = more.pop("disk", {})
        if ssd:
            folder = str(tmp_path / f"{name}-ssd")
            capacity = ssd * CHUNK_OBJECT_BYTES
            tiers.append({"name": "ssd", "type": "disk", "path": folder, "capacity": capacity, **disk})
        url = controller if isinstance(controller, str) else controller.url
        chosen = {"url": url, "token": TOKEN, "instance_id": name, **more.pop("controller", {})}
        settings = Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, controller=chosen, **more)
        async with Instance.open(settings, plugins=BUILT_IN) as instance:
            home = Home(instance)
            yield home
            await home.at_rest()

    return open_home


def prompt(chunks: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=chunks * CHUNK_TOKENS)


def fetch(
    keys: Sequence[ChunkKey],
    tier: int,
    peer: str | None = None,
    *,
    home: Home | None = None,
    seconds: float | None = None,
    length: int = CHUNK_OBJECT_BYTES,
) -> Callable[[int], Command]:
    namespace = bytes(32) if home is None else home.model._namespace
    lengths = [length] * len(keys)
    return lambda ticket: Fetch(ticket, tier, peer, namespace, join_keys(keys), lengths, seconds)


def address_of(home: Home) -> str:
    assert home.instance.server is not None
    return f"127.0.0.1:{home.instance.server.address[1]}"
