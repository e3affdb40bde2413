"""Servers that are not a Redis or break its protocol, and the messages of `check`."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import pytest

from kvtier.backends.redis import RedisBackend, RedisSettings
from kvtier.errors import TierError
from kvtier.testing.servers import free_port
from tests.rigs import chunks
from tests.rigs.chunks import FAILED, MISS, OK
from tests.rigs.redis_pool import KEYS, Start, assert_unreachable, buffers, info, opened, values
from tests.rigs.servers.redis import HOST, RedisServer
from tests.rigs.tcp_server import serving
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("starts servers")]


@contextmanager
def scripted_server(*replies: bytes, closes: bool = False) -> Iterator[int]:
    """Run a server that sends the next reply, or repeats the last one, for any input. Yield its port."""
    pending = list(replies)

    def converse(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(pending.pop(0) if len(pending) > 1 else pending[0])
            if closes:
                return

    with serving(converse) as port:
        yield port


def opened_on_port(port: int, **given: Any) -> AbstractAsyncContextManager[RedisBackend]:
    settings = {"name": "pool", "type": "redis", "url": f"redis://{HOST}:{port}", "deadline": 0.5, **given}
    return chunks.opened(RedisBackend(RedisSettings(**settings)))


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$99999999999999999999999\r\n",
        b"$-7\r\n",
        b"+" + b"x" * 100_000,
        b"$100\r\n" + b"x" * 101,
        b"*-1\r\n",
        b":1\r\n",
        b"\x00\xff\r\n",
        b"$100\r\nabc",
    ],
)
@pytest.mark.parametrize("closes", [False, True])
async def test_invalid_replies_fail_and_are_logged_once(
    reply: bytes, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_server(reply, closes=closes) as port:
        async with opened_on_port(port) as backend:
            for _ in range(2):
                assert list(await backend.get(buffers(100, KEYS[:2]))) == [FAILED] * 2
            assert list(await backend.put(values(100, KEYS[:2]))) == [FAILED] * 2
            if reply == b":1\r\n":  # A valid reply to these commands.
                assert True in await backend.contains(KEYS)
                await backend.delete(KEYS)
            else:
                await assert_unreachable(backend)
    (warning,) = caplog.messages
    assert f"{HOST}:{port}" in warning


@pytest.mark.parametrize(
    ("replies", "outcomes"),
    [
        ([b"$3\r\nabc\r\n$3\r\nab"], [OK, FAILED]),
        ([b"$3\r\nabc\r\n-ERR what\r\n"], [OK, FAILED]),
        ([b"$3\r\nabc\r\n-WRONGTYPE no\r\n"], [OK, MISS]),
        ([b"$-1\r\n$3\r\nabc\r\n"], [MISS, OK]),
        # A value too long to drain closes the connection, and the second key is requested again.
        ([b"$9000000000\r\nabc", b"$3\r\nabc\r\n"], [MISS, OK]),
        # Surplus data is not taken for the reply to the next request.
        ([b"$-1\r\n$-1\r\n$3\r\nxyz\r\n", b"$3\r\nabc\r\n$-1\r\n"], [MISS, MISS]),
    ],
)
async def test_replies_before_an_invalid_one_are_used(
    replies: Sequence[bytes], outcomes: Sequence[object]
) -> None:
    with scripted_server(*replies) as port:
        async with opened_on_port(port, connections=1) as backend:
            items = buffers(3, KEYS[:2])
            assert list(await backend.get(items)) == outcomes
            for (_, view), outcome in zip(items, outcomes, strict=True):
                assert outcome is not OK or view == b"abc"
            if len(replies) == 2 and outcomes == [MISS, MISS]:
                items = buffers(3, KEYS[:2])
                assert list(await backend.get(items)) == [OK, MISS]
                assert items[0][1] == b"abc"


async def test_check_reports_a_server_of_another_protocol() -> None:
    with scripted_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        async with opened_on_port(port) as backend:
            with pytest.raises(TierError, match=f"{HOST}:{port} sent an unexpected reply"):
                await backend.check()


async def test_check_of_a_closed_port() -> None:
    port = free_port()
    async with opened_on_port(port) as backend:
        with pytest.raises(TierError) as failure:
            await backend.check()
    assert str(failure.value) == f"{HOST}:{port} failed: Connection refused"


async def test_check_of_an_unresolvable_host() -> None:
    async with opened_on_port(1, url="redis://no-such-host.invalid") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match=r"no-such-host\.invalid:6379"):
            await backend.check()
    async with opened_on_port(1, url="redis://a..b") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)


async def test_check_of_a_paused_server(start: Start) -> None:
    server = start()
    async with opened(server, deadline=0.3) as backend:
        assert "no maxmemory" in await backend.check()
        server.pause()
        with pytest.raises(TierError, match="does not answer in time"):
            await backend.check()
        server.resume()
        assert "no maxmemory" in await backend.check()


async def test_check_shows_memory_use_and_eviction_policy(start: Start) -> None:
    server = start(maxmemory="64mb")
    name = {"redis": "Redis", "valkey": "Valkey"}[server.type]
    version = info(server)[f"{server.type}_version"]
    async with opened(server) as backend:
        summary = await backend.check()
    assert summary.startswith(f"{name} {version}, ")
    assert summary.endswith(
        " of 64MiB used, maxmemory-policy noeviction: rejects chunks when full (allkeys-lru evicts)"
    )


async def test_replica_is_read_only(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    primary: RedisServer = start(options=["--repl-diskless-sync-delay", "0"])
    replica: RedisServer = start(options=["--replicaof", HOST, str(primary.port)])
    wait_until(lambda: info(replica)["master_link_status"] == "up")
    async with opened(replica) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="is a read-only replica: set `url` to its primary"):
            await backend.check()
    (warning,) = caplog.messages
    assert "is a read-only replica: set `url` to its primary" in warning


async def test_missing_library_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis.asyncio", None)
    backend = RedisBackend(RedisSettings(name="pool", type="redis", url="redis://cache"))
    with pytest.raises(TierError, match=r"pip install 'kvtier\[redis\]'"):
        await backend.open()
