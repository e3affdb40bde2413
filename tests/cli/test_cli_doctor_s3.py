"""`kvtier doctor --backend` on a real S3 server: healthy, and what it says of each mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.cli import checks
from tests.rigs.servers.running import running
from tests.rigs.servers.s3 import READER_KEY, SECRET_KEY, S3Server

from .conftest import RAM, Kvtier


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(S3Server, tmp_path_factory) as server:
        yield server


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({}, "s3://.*/chunks at .*: an object was written.*; 4MiB written in .*, read in .*", ""),
        (
            {"url": "s3://nothing/chunks"},
            "s3://nothing/chunks at .* has no such bucket",
            "set url to another",
        ),
        ({"secret_access_key": "hunter2"}, "refuses these credentials", "check credentials"),
        ({"access_key_id": READER_KEY}, "refuses these credentials", "check credentials"),
        ({"endpoint": "http://127.0.0.1:1"}, "cannot be reached", "check url and endpoint"),
    ],
)
def test_doctor_names_the_setting(
    kvtier: Kvtier,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    found: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(checks, "check_machine", lambda _: [])
    tier = s3.tier()
    credentials = {name: settings.get(name, value) for name, value in tier["credentials"].items()}
    changed = {name: value for name, value in settings.items() if name not in credentials}
    pool = {"name": "pool", **tier, "deadline": 4, **changed, "credentials": credentials}
    monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, pool]))
    result = kvtier("doctor", "--backend", "pool", "--json")
    check = json.loads(result.output)["checks"][-1]
    assert check["name"] == "backend pool (s3)"
    assert check["status"] == ("fail" if remedy else "ok")
    assert re.search(found, check["found"])
    assert remedy in (check.get("remedy") or "")
    assert "hunter2" not in result.output + result.errors
    assert SECRET_KEY not in result.output + result.errors
    assert s3.objects("chunks") == []
