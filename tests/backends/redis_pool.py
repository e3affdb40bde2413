"""What the tests of Redis and Valkey share: an open backend, and values to put there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from kvtier.backends.base import Backend, Outcome
from kvtier.backends.redis import RedisBackend, RedisSettings
from kvtier.backends.valkey import ValkeyBackend, ValkeySettings
from kvtier.keys import ChunkKey
from kvtier.testing.backend import blank, make_key, noise, same
from kvtier.testing.servers.redis import RedisServer

OK, MISS, FULL, FAILED = Outcome.OK, Outcome.MISS, Outcome.FULL, Outcome.FAILED
MIB = 1 << 20
KEYS = [make_key(number) for number in range(8)]

Start = Callable[..., RedisServer]
"""Starts a server, with options of ``RedisServer``."""


def backend_on(server: RedisServer, **settings: Any) -> RedisBackend:
    """A backend that is not open yet; ``settings`` beside or instead of the server's own."""
    given = {"name": "pool", **server.tier(), **settings}
    if given["type"] == "valkey":
        return ValkeyBackend(ValkeySettings(**given))
    return RedisBackend(RedisSettings(**given))


@asynccontextmanager
async def opened(server: RedisServer, **settings: Any) -> AsyncIterator[RedisBackend]:
    """An open backend."""
    backend = backend_on(server, **settings)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def values(size: int, keys: Sequence[ChunkKey] = KEYS) -> list[tuple[ChunkKey, memoryview]]:
    """Something to put under each key."""
    return [(key, memoryview(bytearray(noise(key, size)))) for key in keys]


def room(size: int, keys: Sequence[ChunkKey] = KEYS) -> list[tuple[ChunkKey, memoryview]]:
    """Memory to get each key's value into."""
    return [(key, blank(size)) for key in keys]


def asked(server: RedisServer, *words: str) -> Any:
    """What a server answers, as its client library understands it."""
    import redis  # Not by all who find the fixtures: it is an extra.

    with closing(redis.Redis(port=server.port, protocol=2, decode_responses=True)) as client:
        return client.execute_command(*words)


def info(server: RedisServer) -> dict[str, Any]:
    """What a server says of itself."""
    told: dict[str, Any] = asked(server, "INFO")
    return told


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of so far."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def assert_says_nothing(backend: Backend) -> None:
    """Nothing can be looked up or deleted, which is raised."""
    for ask in (backend.contains, backend.delete):
        with pytest.raises(ConnectionError, match="no server answers"):
            await ask(KEYS)


async def assert_works(backend: Backend, size: int = MIB) -> None:
    """Everything can be put, found and got."""
    assert list(await backend.put(values(size))) == [OK] * len(KEYS)
    assert list(await backend.contains(KEYS)) == [True] * len(KEYS)
    items = room(size)
    assert list(await backend.get(items)) == [OK] * len(KEYS)
    assert all(same(view, noise(key, size)) for key, view in items)
