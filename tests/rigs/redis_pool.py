"""Helpers of the Redis and Valkey tests: backends and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing
from functools import lru_cache
from typing import Any

import pytest

from kvtier.backends.base import Backend
from kvtier.backends.redis import RedisBackend, RedisSettings
from kvtier.backends.valkey import ValkeyBackend, ValkeySettings
from kvtier.errors import TierError
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import blank, make_key, noise, same
from tests.rigs import chunks
from tests.rigs.chunks import FAILED, OK
from tests.rigs.servers.redis import HOST, RedisServer

MIB = 1 << 20
KEYS = [make_key(number) for number in range(8)]

Start = Callable[..., RedisServer]
"""Start a server, with the options of ``RedisServer``."""


def backend_on(server: RedisServer, **settings: Any) -> RedisBackend:
    """Return a backend that is not open yet. ``settings`` override those of the server."""
    merged = {"name": "pool", **server.tier(), **settings}
    if merged["type"] == "valkey":
        return ValkeyBackend(ValkeySettings(**merged))
    return RedisBackend(RedisSettings(**merged))


def opened(server: RedisServer, **settings: Any) -> AbstractAsyncContextManager[RedisBackend]:
    """Open a backend on a server within the block."""
    return chunks.opened(backend_on(server, **settings))


@lru_cache(maxsize=2 * len(KEYS))
def content(key: ChunkKey, size: int) -> bytes:
    """Return a value's bytes. They are kept, because tests write and read the same values again and again."""
    return noise(key, size)


def values(size: int, keys: Sequence[ChunkKey] = KEYS) -> list[tuple[ChunkKey, memoryview]]:
    """Return a value of ``size`` bytes for each key."""
    return [(key, memoryview(bytearray(content(key, size)))) for key in keys]


def buffers(size: int, keys: Sequence[ChunkKey] = KEYS) -> list[tuple[ChunkKey, memoryview]]:
    """Return a buffer of ``size`` bytes for each key."""
    return [(key, blank(size)) for key in keys]


def execute(server: RedisServer, *arguments: str) -> Any:
    """Execute a command with the server's client library, and return its reply."""
    import redis  # Imported here, because it is an optional dependency.

    tier = server.tier()
    tls = {"ssl": True, "ssl_ca_certs": tier["ca_file"]} if "ca_file" in tier else {}
    options = {"protocol": 2, "decode_responses": True, "password": tier.get("password"), **tls}
    with closing(redis.Redis(HOST, server.port, **options)) as client:
        return client.execute_command(*arguments)


def info(server: RedisServer) -> dict[str, Any]:
    """Return the server's INFO."""
    reply: dict[str, Any] = execute(server, "INFO")
    return reply


async def assert_rejected(backend: Backend, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that all calls fail, and that the log (once) and ``check`` contain the message."""
    assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
    await assert_unreachable(backend)
    (warning,) = caplog.messages
    assert message in warning
    with pytest.raises(TierError, match=re.escape(message)):
        await backend.check()


async def assert_unreachable(backend: Backend) -> None:
    """Assert that lookups and deletions raise ConnectionError."""
    for call in (backend.contains, backend.delete):
        with pytest.raises(ConnectionError, match="no server answers"):
            await call(KEYS)


async def assert_works(backend: Backend, size: int = MIB) -> None:
    """Assert that all keys can be put, found and read."""
    assert list(await backend.put(values(size))) == [OK] * len(KEYS)
    assert list(await backend.contains(KEYS)) == [True] * len(KEYS)
    items = buffers(size)
    assert list(await backend.get(items)) == [OK] * len(KEYS)
    assert all(same(view, content(key, size)) for key, view in items)
