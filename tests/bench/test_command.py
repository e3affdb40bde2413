"""`kvtier bench` from the command line: what it prints, writes, leaves behind and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench import plot
from kvtier.cli import bench
from kvtier.testing.servers.redis import RedisServer
from tests.cli.conftest import Kvtier, spawn, store

SMALL = ("--size", "64KiB", "--chunks", "3", "--in-flight", "2", "--turns", "2")
RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
PATIENCE_SECONDS = 60

Configure = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    def tiers(*lower: dict[str, Any]) -> None:
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, *lower]))

    return tiers


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_without_settings_memory_a_disk_and_tcp(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    result = kvtier("bench", *SMALL, "--json", tmp_path / "out.json")
    assert result.status == 0, result
    rows = rows_of(tmp_path / "out.json")
    assert {name: row["limit"] for name, row in rows.items()} == {
        "ram": "memcpy",
        "disk": "raw O_DIRECT",
        "tcp": "raw socket pair",
    }
    for name, row in rows.items():
        assert name in result.output
        for direction in ("put", "get"):
            figures = row[direction]
            assert figures["gb_s"] > 0
            assert 0 < figures["p50_ms"] <= figures["p99_ms"]
            assert figures["ratio"]["lowest"] <= figures["ratio"]["median"] <= figures["ratio"]["highest"]
        assert (row["look_ups_per_s"] is None) is (name == "tcp")
    assert list(scratch.iterdir()) == []


def test_one_tier_by_its_name_or_its_type(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    configure({"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "1GiB"})
    for asked in ("ssd", "disk"):
        assert kvtier("bench", *SMALL, "--tier", asked, "--json", tmp_path / "out.json").status == 0
        assert list(rows_of(tmp_path / "out.json")) == ["ssd"]


def test_a_name_of_nothing(kvtier: Kvtier, configure: Configure) -> None:
    configure()
    result = kvtier("bench", "--tier", "rma")
    assert result.status == 2
    assert "rma" in result.errors
    assert "(cpu)" in result.errors


@pytest.mark.parametrize("size", ["0", "2GiB", "much"])
def test_a_wrong_size(kvtier: Kvtier, size: str) -> None:
    result = kvtier("bench", "--size", size)
    assert result.status == 2
    assert "--size" in result.errors


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_in_a_folder_that_is_not_there(kvtier: Kvtier, option: str, tmp_path: Path) -> None:
    result = kvtier("bench", option, tmp_path / "missing" / "file")
    assert result.status == 2
    assert "there is no folder" in result.errors


def test_a_disk_keeps_what_it_holds(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    held = store(folder, 1)
    configure({"name": "ssd", "type": "disk", "path": str(folder), "capacity": "1GiB"})
    before = {path: path.stat().st_mtime for path in tmp_path.rglob("*")}
    content = held.read_bytes()
    assert kvtier("bench", *SMALL, "--tier", "ssd").status == 0
    assert held.read_bytes() == content
    assert set(before) == set(tmp_path.rglob("*"))


def test_a_tier_that_fails_says_why_and_the_others_are_measured(
    kvtier: Kvtier, configure: Configure, tmp_path: Path
) -> None:
    configure(
        {"name": "pool", "type": "redis", "url": "redis://:hidden@127.0.0.1:1", "deadline": "2s"},
        {"name": "ssd", "type": "disk", "path": "/dev/null/ssd", "capacity": "1GiB"},
    )
    result = kvtier("bench", *SMALL, "--json", tmp_path / "out.json")
    assert result.status == 1
    rows = rows_of(tmp_path / "out.json")
    assert rows["ram"]["error"] is None
    assert "Connection refused" in rows["pool"]["error"]
    assert "/dev/null/ssd cannot be written" in rows["ssd"]["error"]
    assert "pool: " in result.output
    assert "hidden" not in result.output + result.errors


def test_too_little_memory(kvtier: Kvtier, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure()
    monkeypatch.setattr(bench, "available_bytes", lambda: 1 << 20)
    result = kvtier("bench", *SMALL)
    assert result.status == 1
    assert "1MiB are free: choose a smaller --size or --chunks" in result.output


def test_a_plot_without_matplotlib(kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    result = kvtier("bench", "--plot", tmp_path / "out.png")
    assert result.status == 1
    assert "pip install 'kvtier[bench]'" in result.errors


def test_a_plot(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    configure()
    assert kvtier("bench", *SMALL, "--plot", tmp_path / "out.png").status == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_pool_is_left_as_it_was(kvtier: Kvtier, configure: Configure, server: RedisServer) -> None:
    configure({"name": "pool", **server.tier()})
    result = kvtier("bench", *SMALL, "--tier", "pool")
    assert result.status == 0, result
    assert "raw socket" in result.output
    assert "Redis" in result.output
    assert server.tell("DBSIZE") == 1
    assert server.tell("STRLEN", "others") == len("value")


def under_way(server: RedisServer) -> subprocess.Popen[str]:
    """A command that stores chunks there, and would for long."""
    tiers = json.dumps([RAM, {"name": "pool", **server.tier(), "deadline": "2s"}])
    options = ("--tier", "pool", "--size", "1MiB", "--chunks", "16", "--turns", "100000")
    process = spawn("bench", *options, KVTIER_TIERS=tiers)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.tell("DBSIZE") == 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_leaves_nothing_behind(server: RedisServer, number: signal.Signals) -> None:
    process = under_way(server)
    try:
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert server.tell("DBSIZE") == 1


@pytest.mark.parametrize("fault", ["kill", pytest.param("pause", marks=pytest.mark.slow)])
def test_a_server_that_goes_away_meanwhile(server: RedisServer, fault: str) -> None:
    process = under_way(server)
    try:
        getattr(server, fault)()
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert "failed" in output
    assert "pool: " in output
    assert "Traceback" not in errors
