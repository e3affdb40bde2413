"""Real instances whose chunks have distinct, verifiable contents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvtier import Settings
from kvtier.cache import ModelCache
from kvtier.catalog.catalog import State
from kvtier.fleet.member.served_models import EngineModel
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins

# Imported before the event loop runs: the imports would block it for too long.
import kvtier.fleet.member.controller_client  # isort: skip
import kvtier.fleet.member.tokenizing  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip
from tests.rigs.waiting import until

CHUNK_TOKENS = 16
TOKEN_BYTES = 1024
CHUNK_BYTES = object_bytes(CHUNK_TOKENS * TOKEN_BYTES)
SECRET = "what the instances of these tests know"
MODEL = "llama"
BUILT_IN = Plugins.load([])
TIMEOUT_SECONDS = 60.0


def prompt(chunks: int, number: int = 0) -> list[int]:
    """Return the tokens of ``chunks`` chunks, distinct for each number."""
    return [number * 1_000_000 + index for index in range(chunks * CHUNK_TOKENS)]


def rows(tokens: Sequence[int]) -> bytes:
    """Return substitute KV for tokens, distinct for every token."""
    return b"".join(token.to_bytes(4, "little") * (TOKEN_BYTES // 4) for token in tokens)


def settings_of(
    name: str,
    url: str | list[str],
    *,
    ram: int,
    disk: Path | None = None,
    token: str | None = None,
    listen: str | None = "127.0.0.1:0",
    write: str = "never",
) -> Settings:
    """Return settings with ``ram`` chunks of memory, and a disk that holds only what was moved there."""
    capacity = ram * CHUNK_BYTES
    # Nothing is evicted below the capacity, so the final contents are deterministic.
    tiers: list[dict[str, Any]] = [
        {"name": "ram", "type": "cpu", "capacity": capacity, "high_watermark": 1.0, "low_watermark": 1.0}
    ]
    if disk is not None:
        tiers.append({"name": "ssd", "type": "disk", "path": str(disk), "capacity": 1 << 30, "write": write})
    return Settings(
        chunk_tokens=CHUNK_TOKENS,
        tiers=tiers,
        plugins=[],
        peer={"listen": listen, "secret": SECRET, "lease": "2s", "share": 1.0},
        controller={"url": url, "instance_id": name, "token": token},
    )


class Node:
    """An open instance with one model that an engine serves."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.cache = instance.cache
        self.model: ModelCache = self.cache.model(MODEL, token_bytes=TOKEN_BYTES)
        instance.served.add("engine", self.model.namespace, self.model.layout, EngineModel([MODEL]))

    async def store(self, tokens: Sequence[int]) -> None:
        """Store into memory, like an engine."""
        assert await self.model.store(tokens, rows(tokens)) == len(tokens)

    def held(self, tokens: Sequence[int], tier: int) -> list[ChunkKey]:
        """Return the chunks of a prompt that a tier holds."""
        catalog = self.cache.catalog
        return [key for key in self.model.keys(tokens) if catalog.state(key, tier) is State.READY]

    def is_intact(self, tokens: Sequence[int]) -> bool:
        """Whether memory holds the chunks of a prompt as they were stored. Missing chunks are ignored."""
        for index, key in enumerate(self.model.keys(tokens)):
            lease = self.cache.memory.lease(key)
            if lease is None:
                continue
            found = bytes(lease.view)
            lease.release()
            stored = rows(tokens[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS])
            if (
                ChunkHeader.parse(found[:HEADER_BYTES]).key != key
                or found[HEADER_BYTES:][: len(stored)] != stored
            ):
                return False
        return True

    @property
    def leaked(self) -> int:
        """The number of leases beyond those of stored chunks; 0 when idle."""
        return self.cache.arena.leases - self.cache.catalog.count(0)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in flight and nothing is leased."""
        await until(lambda: not (self.leaked or self.cache.pending_bytes or self.cache.status()["flights"]))


@asynccontextmanager
async def open_node(name: str, url: str, **settings: Any) -> AsyncIterator[Node]:
    """Open a real instance in this process. At its end no lease may be left."""
    async with Instance.open(settings_of(name, url, **settings), plugins=BUILT_IN) as instance:
        node = Node(instance)
        yield node
        await node.wait_until_idle()
