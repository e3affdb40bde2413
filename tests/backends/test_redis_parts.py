"""Long values, which are read in parts: concurrent changes never yield a mix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from kvtier.backends.base import Outcome
from kvtier.backends.redis import protocol
from kvtier.backends.redis.protocol import Commands
from kvtier.concurrency.sockets.connection import Connection, Operation, Progress
from kvtier.memory.keys import ChunkKey
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.running import running

KEY = ChunkKey(bytes(32))
COMMANDS = Commands("kvtier:", None, in_parts=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(RedisServer, tmp_path_factory) as server:
        yield server


def fetch(server: RedisServer, length: int) -> tuple[Outcome, bytes, bool]:
    view = memoryview(bytearray(length))
    with server.connection() as connection:
        exchange = COMMANDS.get([(KEY, view)])
        (outcome,) = exchange.answers(connection, connection.exchange(exchange.operations))
        in_sync = connection.in_sync
        if in_sync:
            connection.send([protocol.encode(b"PING")])
            assert protocol.read_reply(connection) == b"PONG"
    return outcome, bytes(view), in_sync


@pytest.mark.parametrize(
    "length", [protocol.LONG_BYTES + 1, 3 * protocol.PART_BYTES, 5 * protocol.PART_BYTES + 7]
)
def test_long_value_is_fetched_in_parts(server: RedisServer, length: int) -> None:
    value = os.urandom(length)
    server.command("SET", COMMANDS.name(KEY), value)
    assert fetch(server, length) == (Outcome.OK, value, True)


def test_missing_value_is_a_miss(server: RedisServer) -> None:
    server.command("DEL", COMMANDS.name(KEY))
    outcome, _, in_sync = fetch(server, 2 << 20)
    assert (outcome, in_sync) == (Outcome.MISS, True)


@pytest.mark.parametrize("length", [5, 1 << 20, 3 << 20])
def test_value_of_another_length_is_a_miss(server: RedisServer, length: int) -> None:
    server.command("SET", COMMANDS.name(KEY), bytes(length))
    outcome, _, _ = fetch(server, 2 << 20)
    assert outcome is Outcome.MISS


@pytest.mark.parametrize("change", ["SET", "DEL", "SETRANGE"])
def test_value_changed_during_the_read(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before, after = bytes([1]) * (4 << 20), bytes([2]) * (4 << 20)
    name = COMMANDS.name(KEY)
    server.command("SET", name, before)
    exchange = Connection.exchange

    def interrupted(connection: Connection, operations: Sequence[Operation]) -> Progress:
        first_part = 8
        if len(operations) <= first_part:
            return exchange(connection, operations)
        assert exchange(connection, operations[:first_part]) == Progress(first_part)
        arguments = {"SET": (name, after), "DEL": (name,), "SETRANGE": (name, "0", b"\2")}[change]
        server.command(change, *arguments)
        return exchange(connection, operations[first_part:]).after(-first_part)

    monkeypatch.setattr(Connection, "exchange", interrupted)
    outcome, value, _ = fetch(server, 4 << 20)
    expected = {"SET": after, "DEL": None, "SETRANGE": b"\2" + before[1:]}[change]
    assert outcome is (Outcome.OK if expected else Outcome.MISS)
    assert expected is None or value == expected


@pytest.mark.parametrize("denied", [["-watch"], ["-watch", "-strlen", "-getrange"], ["-multi", "-exec"]])
def test_value_is_fetched_whole_without_permission_for_parts(server: RedisServer, denied: list[str]) -> None:
    value = os.urandom(3 << 20)
    server.command("SET", COMMANDS.name(KEY), value)
    server.command("ACL", "SETUSER", "default", *denied)
    try:
        assert fetch(server, len(value))[:2] == (Outcome.OK, value)
    finally:
        server.command("ACL", "SETUSER", "default", "+@all")
