"""A Redis that dies, hangs, restarts empty, is full, or rejects the client: outcomes and messages."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from kvtier.backends.base import Outcome
from kvtier.backends.redis import protocol
from kvtier.backends.redis.errors import describe_refusal
from kvtier.backends.redis.protocol import DRAIN_BYTES, ErrorReply, encode
from kvtier.backends.redis.settings import Endpoint
from kvtier.errors import TierError
from kvtier.testing.backend import is_poisoned, make_key, poison
from tests.rigs.chunks import FAILED, FULL, MISS, OK
from tests.rigs.open_files import open_files
from tests.rigs.redis_pool import (
    KEYS,
    MIB,
    Start,
    assert_rejected,
    assert_unreachable,
    assert_works,
    buffers,
    info,
    opened,
    values,
)
from tests.rigs.servers.redis import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("starts, pauses and queries servers")]

LONG_DEADLINE_SECONDS = 10_000.0
"""A deadline beyond the duration of any test."""


@pytest.fixture
def server(start: Start) -> RedisServer:
    return start()


async def test_backend_waits_for_a_server_that_starts_later(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await anyio.to_thread.run_sync(server.kill)
    async with opened(server) as backend:
        for _ in range(3):
            await assert_unreachable(backend)
            assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
            assert list(await backend.get(buffers(100))) == [FAILED] * len(KEYS)
        (warning,) = caplog.messages
        assert warning == f"pool: 127.0.0.1:{server.port} failed: Connection refused"
        await anyio.to_thread.run_sync(server.start)
        await assert_works(backend)


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_restarted_server_is_empty_and_used_immediately(server: RedisServer, end: str) -> None:
    async with opened(server) as backend:
        await assert_works(backend)
        getattr(server, end)()
        await anyio.to_thread.run_sync(server.start)
        assert list(await backend.contains(KEYS)) == [False] * len(KEYS)
        assert list(await backend.get(buffers(MIB))) == [MISS] * len(KEYS)
        await assert_works(backend)


@pytest.mark.parametrize("method", ["put", "get"])
async def test_server_killed_during_a_batch(server: RedisServer, method: str) -> None:
    size = 8 * MIB
    async with opened(server, connections=2) as backend:
        await assert_works(backend, size)
        items = values(size) if method == "put" else buffers(size)
        outcomes: Sequence[Outcome] = []

        async def run_batch() -> None:
            nonlocal outcomes
            outcomes = await getattr(backend, method)(items * 20)

        traffic = "total_net_input_bytes" if method == "put" else "total_net_output_bytes"
        before = info(server)[traffic]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_batch)
            # After a quarter, the first replies have been read, even on a busy machine.
            quarter = len(items) * 20 * size // 4
            await anyio.to_thread.run_sync(wait_for_traffic, server, traffic, before + quarter)
            await anyio.to_thread.run_sync(server.kill)
        assert outcomes[0] is OK
        assert outcomes[-1] is FAILED
        assert set(outcomes) == {OK, FAILED}
        await anyio.to_thread.run_sync(server.start)
        await assert_works(backend)


async def test_paused_server_fails_by_the_deadline(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, deadline=0.3) as backend:
        await assert_works(backend)
        server.pause()
        assert list(await backend.get(buffers(MIB))) == [FAILED] * len(KEYS)
        assert list(await backend.put(values(64 * MIB, KEYS[:1]))) == [FAILED]
        await assert_unreachable(backend)
        (warning,) = caplog.messages
        assert warning == f"pool: 127.0.0.1:{server.port} failed: no answer in time"
        server.resume()
    async with opened(server) as backend:
        await assert_works(backend)


async def test_late_replies_are_discarded(server: RedisServer) -> None:
    """The server replies after the deadline, on a connection that is closed by then."""
    async with opened(server, deadline=0.3) as hasty, opened(server) as backend:
        await assert_works(backend)
        server.pause()
        items = buffers(MIB)
        assert list(await hasty.get(items)) == [FAILED] * len(KEYS)
        for _, view in items:
            poison(view)
        server.resume()
        await assert_works(backend)
        assert all(is_poisoned(view) for _, view in items)


@pytest.mark.parametrize("method", ["put", "get", "contains"])
async def test_cancelled_while_the_server_is_paused(server: RedisServer, method: str) -> None:
    """Cancellation shuts down the sockets; otherwise the call would last until the deadline."""
    async with opened(server, deadline=LONG_DEADLINE_SECONDS) as backend:
        await assert_works(backend)
        server.pause()
        arguments: Any = {"put": values(64 * MIB, KEYS[:2]), "get": buffers(MIB), "contains": KEYS}[method]
        with anyio.move_on_after(0.05) as scope:
            await getattr(backend, method)(arguments)
        assert scope.cancelled_caught
        server.resume()
        await assert_works(backend)


async def test_cancelled_while_calls_wait_for_a_connection(server: RedisServer) -> None:
    async with opened(server, deadline=LONG_DEADLINE_SECONDS, connections=1) as backend:
        await assert_works(backend)
        server.pause()
        with anyio.move_on_after(0.05):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(backend.get, buffers(MIB))
        server.resume()
        await assert_works(backend)


async def test_full_server_is_logged_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(maxmemory="40mb")
    async with opened(server, connections=1) as backend:
        outcomes = await backend.put(values(8 * MIB))
        assert set(outcomes) == {OK, FULL}
        assert list(await backend.put(values(8 * MIB, KEYS[-1:]))) == [FULL]
        assert list(await backend.contains(KEYS)) == [outcome is OK for outcome in outcomes]
        (warning,) = caplog.messages
        assert "raise its maxmemory, or set its maxmemory-policy to allkeys-lru" in warning
        await backend.delete(KEYS)
        assert list(await backend.put(values(8 * MIB, KEYS[:1]))) == [OK]


async def test_evicting_server_is_never_full(start: Start) -> None:
    server = start(options=["--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru"])
    async with opened(server, connections=1) as backend:
        for _ in range(3):
            assert list(await backend.put(values(8 * MIB))) == [OK] * len(KEYS)
        assert True in await backend.contains(KEYS)
        assert "maxmemory-policy allkeys-lru" in await backend.check()


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ({"password": "wr{}ong"}, "rejects the user or password: check `user` and `password`"),
        ({"user": "unknown"}, "rejects the user or password: check `user` and `password`"),
        ({"password": None}, "requires a password: set `password`"),
    ],
)
async def test_rejected_password_is_reported_with_its_setting(
    start: Start, credentials: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(password="sesame")
    async with opened(server) as backend:
        await assert_works(backend)
    async with opened(server, **credentials) as backend:
        await assert_rejected(backend, f"127.0.0.1:{server.port} {message}", caplog)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{}://127.0.0.1:{}/99", "has no database of this number: check the end of `url`"),
        ("{}+sentinel://127.0.0.1:{}/main", "is not a sentinel: use its own form of `url`"),
        ("{}+cluster://127.0.0.1:{}", "is not a cluster node: use a `url` without +cluster"),
    ],
)
async def test_url_that_does_not_fit_the_server(
    server: RedisServer, url: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, url=url.format(server.type, server.port)) as backend:
        with pytest.raises(ConnectionError, match=f"no server answers: .* {re.escape(message)}"):
            await backend.contains(KEYS)
        await assert_rejected(backend, message, caplog)


async def test_password_for_a_server_without_one(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, password="hunter2", user="me") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
    async with opened(server, password="hunter2") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
    assert "hunter2" not in caplog.text
    assert len(caplog.messages) == 2


async def test_user_without_permission_reads_but_does_not_write(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(options=["--user", "reader", "on", ">sesame", "~kvtier:*", "+get", "+exists", "+unlink"])
    async with opened(server) as backend:
        await assert_works(backend)
    async with opened(server, user="reader", password="sesame") as reader:
        assert list(await reader.get(buffers(MIB))) == [OK] * len(KEYS)
        assert list(await reader.put(values(100))) == [FAILED] * len(KEYS)
        assert "allow GET, SET, EXISTS and UNLINK" in "".join(caplog.messages)
        with pytest.raises(TierError, match="denies its user the commands that kvtier needs"):
            await reader.check()


async def test_databases_and_prefixes_are_separate(server: RedisServer) -> None:
    async with (
        opened(server) as first,
        opened(server, url=server.tier()["url"] + "/1") as second,
        opened(server, prefix="other{tag}:") as third,
    ):
        await assert_works(first)
        for backend in (second, third):
            assert list(await backend.contains(KEYS)) == [False] * len(KEYS)
            await assert_works(backend)
            await backend.delete(KEYS)
        await assert_works(first)
    async with opened(server, url=server.tier()["url"] + "/99") as backend:
        await assert_unreachable(backend)


async def test_server_expires_chunks_after_the_ttl(server: RedisServer) -> None:
    async with opened(server, ttl=0.05) as backend:
        assert backend.ttl == 0.05
        assert list(await backend.put(values(MIB))) == [OK] * len(KEYS)
        while True in await backend.contains(KEYS):
            await anyio.sleep(0.01)
        assert list(await backend.get(buffers(MIB))) == [MISS] * len(KEYS)
    async with opened(server, ttl="1h") as backend:
        await assert_works(backend)
    assert 3_000_000 < int(server.command("PTTL", "kvtier:" + KEYS[0].hex())) <= 3_600_000


async def test_foreign_value_is_a_miss_and_is_replaced(server: RedisServer) -> None:
    names = ["kvtier:" + key.hex() for key in KEYS]
    async with opened(server) as backend:
        server.command("RPUSH", names[0], "a", "b")
        server.command("SET", names[1], bytes(DRAIN_BYTES + 1))
        server.command("SET", names[2], "")
        server.command("SET", names[3], bytes(1000))
        outcomes = await backend.get(buffers(1000))
        assert list(outcomes) == [MISS, MISS, MISS, OK, *[MISS] * 4]
        await assert_works(backend, 1000)


async def test_value_larger_than_the_server_accepts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(options=["--proto-max-bulk-len", "1mb"])
    async with opened(server) as backend:
        assert list(await backend.put(values(8 * MIB, KEYS[:1]))) == [FAILED]
        assert "raise its proto-max-bulk-len, or lower `chunk_tokens`" in "".join(caplog.messages)
        await assert_works(backend, 1000)


async def test_full_server_names_the_setting_of_its_clients(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(options=["--maxclients", "1"])
    with server.connection() as connection:
        connection.send([encode(b"PING")])
        assert protocol.read_reply(connection) == b"PONG"
        async with opened(server) as backend:
            assert list(await backend.put(values(100, KEYS[:1]))) == [FAILED]
    (warning,) = caplog.messages
    assert "raise its maxclients, or lower `connections`" in warning


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            "ERR max number of clients reached",
            "HOST:1 has reached its client limit: raise its maxclients",
        ),
        ("LOADING Redis is loading", "HOST:1 is still loading its data"),
        ("ERR SELECT is not allowed in cluster mode", "HOST:1 is a cluster node: use a +cluster:// `url`"),
        ("MOVED 1 b:2", "HOST:1 is a cluster node: use a +cluster:// `url`"),
        ("READONLY You can't", "HOST:1 is a read-only replica: set `url` to its primary"),
        ("ERR {0} \x1b[31m" + "x" * 500, "HOST:1 replied: ERR {0} ?[31m" + "x" * 287),
    ],
)
def test_describe_refusal(reply: str, message: str) -> None:
    described = str(describe_refusal(ErrorReply(reply.partition(" ")[0], reply), Endpoint("HOST", 1)))
    assert described.startswith(message)
    assert len(described) < 400


async def test_connections_and_threads_are_bounded(server: RedisServer) -> None:
    before = len(open_files())
    async with opened(server, connections=3) as backend:
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(backend.put, values(300_000))
                tasks.start_soon(backend.get, buffers(300_000))
                tasks.start_soon(backend.contains, KEYS)
        # Three for chunks, one for lookups, and the one that runs INFO.
        assert info(server)["connected_clients"] <= 5
        for _ in range(20):
            await backend.put(values(100))
        assert info(server)["connected_clients"] <= 5
    assert len(open_files()) == before
    assert threading.active_count() < 20


async def test_thousands_of_keys_are_one_batch(server: RedisServer) -> None:
    keys = [make_key(number) for number in range(5000)]
    async with opened(server) as backend:
        assert set(await backend.put(values(100, keys[::2]))) == {OK}
        assert list(await backend.contains(keys)) == [True, False] * 2500
        items = buffers(100, keys[:200])
        assert list(await backend.get(items)) == [OK, MISS] * 100
        await backend.delete(keys)
        assert True not in await backend.contains(keys)


def wait_for_traffic(server: RedisServer, field: str, minimum: int) -> None:
    while info(server)[field] < minimum:
        time.sleep(0.002)
