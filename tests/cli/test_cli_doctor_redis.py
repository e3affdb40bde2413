"""`kvtier doctor --backend` on a real Redis: well, gone, standing still, closed to us, full."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import checks
from kvtier.testing.servers.redis import RedisServer

from .conftest import Kvtier

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
DEADLINE_SECONDS = 1.0

Examine = Callable[..., dict[str, str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    missing = RedisServer.missing()
    if missing:
        pytest.skip(missing)
    folder = tmp_path / "server"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server


@pytest.fixture
def examine(kvtier: Kvtier, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """What the doctor says of the pool, whose settings may be others than the server's."""
    monkeypatch.setattr(checks, "check_machine", lambda _: [])

    def run(*, status: int, **settings: Any) -> dict[str, str]:
        pool = {"name": "pool", **server.tier(), "deadline": DEADLINE_SECONDS, **settings}
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, pool]))
        result = kvtier("doctor", "--backend", "pool", "--json")
        assert result.status == status, result
        assert result.errors == ""
        told: dict[str, str] = json.loads(result.output)["checks"][-1]
        assert told["name"] == "backend pool (redis)"
        assert told["status"] == ("fail" if status else "ok")
        return told

    return run


def tell(server: RedisServer, *commands: str) -> str:
    """What the server answers to the last of some commands, in one line."""
    with (
        socket.create_connection(("127.0.0.1", server.port)) as connection,
        connection.makefile("rw") as stream,
    ):
        for command in commands:
            stream.write(f"{command}\r\n")
            stream.flush()
            answer = stream.readline().strip()
        return answer


def test_a_server_that_is_well_and_left_as_it_was(examine: Examine, server: RedisServer) -> None:
    found = examine(status=0)["found"]
    times = r"written in \S+ \(\S+ [GM]B/s\), read in \S+ \(\S+ [GM]B/s\), looked up in \S+"
    assert re.fullmatch(rf"Redis [\d.]+.*; 4MiB {times}", found)
    assert tell(server, "DBSIZE") == ":0"


def test_a_server_that_is_gone(examine: Examine, server: RedisServer) -> None:
    server.kill()
    assert str(server.port) in examine(status=1)["found"]
    server.start()
    examine(status=0)


def test_a_server_that_stands_still(examine: Examine, server: RedisServer) -> None:
    server.pause()
    try:
        assert str(server.port) in examine(status=1)["found"]
    finally:
        server.resume()
    examine(status=0)


def test_a_wrong_password(examine: Examine, server: RedisServer) -> None:
    tell(server, "CONFIG SET requirepass open-sesame")
    for wrong in ({}, {"password": "letmein"}):
        found = examine(status=1, **wrong)["found"]
        assert "`password`" in found
        assert "letmein" not in found
    examine(status=0, password="open-sesame")


def test_a_server_that_is_full(examine: Examine, server: RedisServer) -> None:
    tell(server, "CONFIG SET maxmemory-policy noeviction", "CONFIG SET maxmemory 1mb")
    assert "it has no room for a chunk of 4MiB" in examine(status=1)["found"]


def test_a_user_who_may_not_delete(examine: Examine, server: RedisServer) -> None:
    tell(server, "ACL SETUSER kvtier on >secret ~* +@all -del -unlink -expire -pexpire")
    found = examine(status=1, user="kvtier", password="secret")["found"]
    assert "it still holds a chunk" in found
