"""Real instances of a test, whose chunks can be told from others byte by byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from kvtier import Settings
from kvtier.agent.served import EngineModel
from kvtier.catalog import State
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.instance import Instance
from kvtier.keys import ChunkKey
from kvtier.model import ModelCache
from kvtier.plugins import Plugins

# Imported here because that takes longer than an event loop may be blocked.
import kvtier.agent.agent  # isort: skip
import kvtier.agent.tokenizing  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip

CHUNK_TOKENS = 16
TOKEN_BYTES = 1024
CHUNK_BYTES = object_bytes(CHUNK_TOKENS * TOKEN_BYTES)
SECRET = "what the instances of these tests know"
MODEL = "llama"
BUILT_IN = Plugins.load([])
PATIENCE = 60.0


def prompt(chunks: int, number: int = 0) -> list[int]:
    """Tokens of so many chunks; other ones for another number."""
    return [number * 1_000_000 + at for at in range(chunks * CHUNK_TOKENS)]


def rows(tokens: Sequence[int]) -> bytes:
    """What stands for the KV of these tokens: every token has its own."""
    return b"".join(token.to_bytes(4, "little") * (TOKEN_BYTES // 4) for token in tokens)


def settings_of(
    name: str,
    url: str,
    *,
    ram: int,
    disk: Path | None = None,
    token: str | None = None,
    listen: str | None = "127.0.0.1:0",
    write: str = "never",
) -> Settings:
    """An instance whose memory holds ``ram`` chunks, and whose disk what was moved there."""
    capacity = ram * CHUNK_BYTES
    # Nothing is evicted below its capacity, and what is there in the end can be foretold.
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


class Holder:
    """One open instance, and one model in it that an engine serves."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.cache = instance.cache
        self.model: ModelCache = self.cache.model(MODEL, token_bytes=TOKEN_BYTES)
        instance.served.came("engine", self.model._namespace, self.model._layout, EngineModel([MODEL]))

    async def store(self, tokens: Sequence[int]) -> None:
        """As an engine does, into memory."""
        assert await self.model.store(tokens, rows(tokens)) == len(tokens)

    def held(self, tokens: Sequence[int], tier: int) -> list[ChunkKey]:
        """The chunks of a prompt that a tier holds."""
        catalog = self.cache.hierarchy.catalog
        return [key for key in self.model.keys(tokens) if catalog.state(key, tier) is State.READY]

    def intact(self, tokens: Sequence[int]) -> bool:
        """Whether whatever memory holds of a prompt is what was stored."""
        for index, key in enumerate(self.model.keys(tokens)):
            lease = self.cache.hierarchy.memory.lease(key)
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
        """Leases that nobody should have when all is quiet."""
        return self.cache.arena.leases - self.cache.hierarchy.catalog.count(0)

    async def at_rest(self) -> None:
        """Wait until nothing is under way, and check that nothing is leased."""
        with anyio.fail_after(PATIENCE):
            while self.leaked or self.cache.pending_bytes or self.cache.status()["flights"]:
                await anyio.sleep(0.01)


@asynccontextmanager
async def holding(name: str, url: str, **settings: Any) -> AsyncIterator[Holder]:
    """A real instance in this process, registered; at its end nothing of it is leased."""
    async with Instance.open(settings_of(name, url, **settings), plugins=BUILT_IN) as instance:
        holder = Holder(instance)
        yield holder
        await holder.at_rest()
