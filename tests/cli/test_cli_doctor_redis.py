"""`kvtier doctor --backend` on a real Redis: healthy, down, paused, refusing access, full."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.cli import checks
from tests.rigs.servers.redis import RedisServer

from .conftest import RAM, Kvtier

DEADLINE_SECONDS = 1.0

Examine = Callable[..., dict[str, str]]


@pytest.fixture
def examine(kvtier: Kvtier, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Run the doctor on the pool, with settings that override those of the server, and return the check."""
    monkeypatch.setattr(checks, "check_machine", lambda _: [])

    def run(*, status: int, **settings: Any) -> dict[str, str]:
        pool = {"name": "pool", **server.tier(), "deadline": DEADLINE_SECONDS, **settings}
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, pool]))
        result = kvtier("doctor", "--backend", "pool", "--json")
        assert result.status == status, result
        assert result.errors == ""
        check: dict[str, str] = json.loads(result.output)["checks"][-1]
        assert check["name"] == "backend pool (redis)"
        assert check["status"] == ("fail" if status else "ok")
        return check

    return run


def make_user(server: RedisServer, *rules: str) -> None:
    server.command("ACL", "SETUSER", "kvtier", "on", ">secret", *rules)


def test_healthy_server_is_left_unchanged(examine: Examine, server: RedisServer) -> None:
    found = examine(status=0)["found"]
    times = r"written in \S+ \(\S+ [GM]B/s\), read in \S+ \(\S+ [GM]B/s\), looked up in \S+"
    assert re.fullmatch(rf"Redis [\d.]+.*; 4MiB {times}", found)
    assert server.command("DBSIZE") == 0


def test_server_is_down(examine: Examine, server: RedisServer) -> None:
    server.kill()
    check = examine(status=1)
    assert str(server.port) in check["found"]
    assert "check that it runs and is reachable" in check["remedy"]
    server.start()
    examine(status=0)


def test_server_is_paused(examine: Examine, server: RedisServer) -> None:
    server.pause()
    try:
        assert str(server.port) in examine(status=1)["found"]
    finally:
        server.resume()
    examine(status=0)


def test_wrong_password(examine: Examine, server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "open-sesame")
    for wrong, remedy in (({}, "set `password`"), ({"password": "letmein"}, "check `user` and `password`")):
        check = examine(status=1, **wrong)
        assert check["remedy"] == remedy
        assert remedy not in check["found"]
        assert "letmein" not in check["found"]
    examine(status=0, password="open-sesame")


def test_short_password_does_not_garble_the_message(examine: Examine, server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "open-sesame")
    found = examine(status=1, password="e")["found"]
    assert found == f"127.0.0.1:{server.port} rejects the user or password"


@pytest.mark.parametrize("rules", ["~* -@all +info", "~other* +@all", "~* +@all -info"])
def test_missing_rule_of_the_user(examine: Examine, server: RedisServer, rules: str) -> None:
    make_user(server, *rules.split())
    check = examine(status=1, user="kvtier", password="secret")
    assert check["found"].endswith("denies its user the commands that kvtier needs")
    assert check["remedy"].startswith("allow GET, SET, EXISTS and UNLINK on keys that begin with `prefix`")
    assert "ACL SETUSER `user`" in check["remedy"]


def test_rule_that_is_missing_for_writes(examine: Examine, server: RedisServer) -> None:
    make_user(server, "~*", "+@all", "-set")
    check = examine(status=1, user="kvtier", password="secret")
    assert "allow GET, SET, EXISTS and UNLINK" in check["found"]
    assert check["remedy"] == "", "not that it may not run"


def test_tls_to_a_plain_port(examine: Examine, server: RedisServer) -> None:
    check = examine(status=1, url=server.tier()["url"].replace("redis:", "rediss:"))
    assert check["remedy"].endswith("does `url` match its TLS?")


def test_server_is_full(examine: Examine, server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1mb")
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "it has no room for a chunk of 4MiB" in examine(status=1)["found"]


def test_user_without_the_permission_to_delete(examine: Examine, server: RedisServer) -> None:
    make_user(server, "~*", "+@all", "-del", "-unlink", "-expire", "-pexpire")
    found = examine(status=1, user="kvtier", password="secret")["found"]
    assert "it still holds a chunk" in found
