"""What answers there is no Redis, or one that speaks nonsense; and what `check` says of those that are."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier.backends.redis import RedisBackend, RedisSettings
from kvtier.errors import TierError
from kvtier.testing.servers.base import free_port
from kvtier.testing.servers.redis import HOST, RedisServer

from .redis_groups import wait_until
from .redis_pool import (
    FAILED,
    KEYS,
    MISS,
    OK,
    Start,
    assert_says_nothing,
    info,
    opened,
    room,
    values,
    warnings,
)

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("it starts servers")]


@contextlib.contextmanager
def impostor(*answers: bytes, closes: bool = False) -> Iterator[int]:
    """The port of something that gives the next answer, or the last one, for whatever it is sent."""
    left = list(answers)
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as stack:

        def converse(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                while connection.recv(1 << 16):
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])
                    if closes:
                        return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                talk = threading.Thread(target=converse, args=[connection])
                talk.start()
                stack.callback(talk.join)
                stack.callback(end, connection)

        def end(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


@contextlib.asynccontextmanager
async def talking_to(port: int, **given: Any):
    settings = {"name": "pool", "type": "redis", "url": f"redis://{HOST}:{port}", "deadline": 0.5, **given}
    backend = RedisBackend(RedisSettings(**settings))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize(
    "answer",
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
async def test_nonsense_fails_and_is_said_once(
    answer: bytes, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with impostor(answer, closes=closes) as port:
        async with talking_to(port) as backend:
            for _ in range(2):
                assert list(await backend.get(room(100, KEYS[:2]))) == [FAILED] * 2
            assert list(await backend.put(values(100, KEYS[:2]))) == [FAILED] * 2
            if answer == b":1\r\n":  # Which is no nonsense here.
                assert True in await backend.contains(KEYS)
                await backend.delete(KEYS)
            else:
                await assert_says_nothing(backend)
    (warning,) = warnings(caplog)
    assert f"{HOST}:{port}" in warning


@pytest.mark.parametrize(
    ("answers", "outcomes"),
    [
        ([b"$3\r\nabc\r\n$3\r\nab"], [OK, FAILED]),
        ([b"$3\r\nabc\r\n-ERR what\r\n"], [OK, FAILED]),
        ([b"$3\r\nabc\r\n-WRONGTYPE no\r\n"], [OK, MISS]),
        ([b"$-1\r\n$3\r\nabc\r\n"], [MISS, OK]),
        # A value that is too long to be read out costs the connection, and the second is asked for again.
        ([b"$9000000000\r\nabc", b"$3\r\nabc\r\n"], [MISS, OK]),
        # What came besides what was asked for is not the answer to the next question.
        ([b"$-1\r\n$-1\r\n$3\r\nxyz\r\n", b"$3\r\nabc\r\n$-1\r\n"], [MISS, MISS]),
    ],
)
async def test_what_was_answered_before_the_nonsense_counts(
    answers: Sequence[bytes], outcomes: Sequence[object]
) -> None:
    with impostor(*answers) as port:
        async with talking_to(port, connections=1) as backend:
            items = room(3, KEYS[:2])
            assert list(await backend.get(items)) == outcomes
            for (_, view), outcome in zip(items, outcomes, strict=True):
                assert outcome is not OK or view == b"abc"
            if len(answers) == 2 and outcomes == [MISS, MISS]:
                items = room(3, KEYS[:2])
                assert list(await backend.get(items)) == [OK, MISS]
                assert items[0][1] == b"abc"


async def test_check_of_something_else() -> None:
    with impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        async with talking_to(port) as backend:
            with pytest.raises(TierError, match=f"{HOST}:{port} does not answer as it should"):
                await backend.check()


async def test_check_of_nothing() -> None:
    port = free_port()
    async with talking_to(port) as backend:
        with pytest.raises(TierError) as failure:
            await backend.check()
    assert str(failure.value) == f"{HOST}:{port} fails: Connection refused"


async def test_check_of_a_name_that_is_none() -> None:
    async with talking_to(1, url="redis://no-such-host.invalid") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match=r"no-such-host\.invalid:6379"):
            await backend.check()
    async with talking_to(1, url="redis://a..b") as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)


async def test_check_of_one_that_stands_still(start: Start) -> None:
    server = start()
    async with opened(server, deadline=0.3) as backend:
        assert "no maxmemory" in await backend.check()
        server.pause()
        with pytest.raises(TierError, match="does not answer in time"):
            await backend.check()
        server.resume()
        assert "no maxmemory" in await backend.check()


async def test_check_says_how_full_it_is_and_what_goes(start: Start) -> None:
    server = start(maxmemory="64mb")
    name = {"redis": "Redis", "valkey": "Valkey"}[server.type]
    version = info(server)[f"{server.type}_version"]
    async with opened(server) as backend:
        said = await backend.check()
    assert said.startswith(f"{name} {version}, ")
    assert said.endswith(
        " of 64MiB used, maxmemory-policy noeviction: once full it refuses chunks (allkeys-lru makes room)"
    )


async def test_a_replica_is_read_only(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    primary: RedisServer = start(options=["--repl-diskless-sync-delay", "0"])
    replica: RedisServer = start(options=["--replicaof", HOST, str(primary.port)])
    wait_until(lambda: info(replica)["master_link_status"] == "up")
    async with opened(replica) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="is a read-only replica: name its primary"):
            await backend.check()
    (warning,) = warnings(caplog)
    assert "is a read-only replica: name its primary" in warning


async def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis.asyncio", None)
    backend = RedisBackend(RedisSettings(name="pool", type="redis", url="redis://cache"))
    with pytest.raises(TierError, match=r"pip install 'kvtier\[redis\]'"):
        await backend.open()
