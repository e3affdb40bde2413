"""`kvtier bench`: its output, files, cleanup and errors."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import options
from kvtier.memory import host
from tests.cli.conftest import RAM, Kvtier, spawn, store
from tests.rigs.servers.redis import RedisServer

SMALL = ("--size", "64KiB", "--chunks", "3", "--in-flight", "2", "--turns", "2")
TIMEOUT_SECONDS = 60

Configure = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    def tiers(*lower: dict[str, Any]) -> None:
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, *lower]))

    return tiers


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_default_measures_memory_disk_and_tcp(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    result = kvtier("bench", *SMALL, "--output", tmp_path / "out.json")
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
        assert (row["lookups_per_s"] is None) is (name == "tcp")
    assert list(scratch.iterdir()) == []


def test_tier_by_name_or_type(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    configure({"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "1GiB"})
    for tier in ("ssd", "disk"):
        assert kvtier("bench", *SMALL, "--tier", tier, "--output", tmp_path / "out.json").status == 0
        assert list(rows_of(tmp_path / "out.json")) == ["ssd"]


def test_unknown_tier_is_named_beside_the_known_ones(kvtier: Kvtier, configure: Configure) -> None:
    configure()
    result = kvtier("bench", "--tier", "rma")
    assert result.status == 2
    assert "rma" in result.errors
    assert "(cpu)" in result.errors


@pytest.mark.parametrize("size", ["0", "2GiB", "much"])
def test_invalid_size_names_the_option(kvtier: Kvtier, size: str) -> None:
    result = kvtier("bench", "--size", size)
    assert result.status == 2
    assert "--size" in result.errors


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("--output", "missing/file", "there is no folder"),
        ("--plot", "missing/file.png", "there is no folder"),
        ("--output", "", "is a folder"),
        ("--plot", "plot.pdf", "does not end with .png"),
    ],
)
def test_output_that_cannot_be_written_is_refused_at_once(
    kvtier: Kvtier, option: str, name: str, reason: str, tmp_path: Path
) -> None:
    result = kvtier("bench", option, tmp_path / name)
    assert result.status == 2
    assert reason in result.message


def test_chunks_of_a_disk_are_kept(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    held = store(folder, 1)
    configure({"name": "ssd", "type": "disk", "path": str(folder), "capacity": "1GiB"})
    before = {path: path.stat().st_mtime for path in tmp_path.rglob("*")}
    content = held.read_bytes()
    assert kvtier("bench", *SMALL, "--tier", "ssd").status == 0
    assert held.read_bytes() == content
    assert set(before) == set(tmp_path.rglob("*"))


def test_failing_tier_is_reported_and_others_are_measured(
    kvtier: Kvtier, configure: Configure, tmp_path: Path
) -> None:
    configure(
        {"name": "pool", "type": "redis", "url": "redis://:hidden@127.0.0.1:1", "deadline": "2s"},
        {"name": "ssd", "type": "disk", "path": "/dev/null/ssd", "capacity": "1GiB"},
    )
    result = kvtier("bench", *SMALL, "--output", tmp_path / "out.json")
    assert result.status == 1
    rows = rows_of(tmp_path / "out.json")
    assert rows["ram"]["error"] is None
    assert "Connection refused" in rows["pool"]["error"]
    assert "/dev/null is not a folder" in rows["ssd"]["error"]
    assert "pool: " in result.output
    assert "hidden" not in result.output + result.errors


def test_too_little_memory_names_the_options_to_lower(
    kvtier: Kvtier, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure()
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 20)
    result = kvtier("bench", *SMALL)
    assert result.status == 1
    assert "1MiB are free: use a smaller --size or --chunks" in result.output


def test_plot_without_matplotlib_names_what_to_install(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    result = kvtier("bench", "--plot", tmp_path / "out.png")
    assert result.status == 1
    assert "pip install 'kvtier[bench]'" in result.errors


def test_plot_is_saved_as_png(kvtier: Kvtier, configure: Configure, tmp_path: Path) -> None:
    configure()
    assert kvtier("bench", *SMALL, "--plot", tmp_path / "out.png").status == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_pool_is_left_unchanged(kvtier: Kvtier, configure: Configure, server: RedisServer) -> None:
    configure({"name": "pool", **server.tier()})
    result = kvtier("bench", *SMALL, "--tier", "pool")
    assert result.status == 0, result
    assert "raw socket" in result.output
    assert "Redis" in result.output
    assert server.command("DBSIZE") == 1
    assert server.command("STRLEN", "others") == len("value")


def start_bench(server: RedisServer) -> subprocess.Popen[str]:
    """Start a long run, and wait until it stores chunks in the server."""
    tiers = json.dumps([RAM, {"name": "pool", **server.tier(), "deadline": "2s"}])
    options = ("--tier", "pool", "--size", "1MiB", "--chunks", "16", "--turns", "100000")
    process = spawn("bench", *options, KVTIER_TIERS=tiers, PYTHONFAULTHANDLER="1")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while server.command("DBSIZE") == 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the output of a run that is to end soon. If it does not, the test fails with its stacks."""
    try:
        return process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        pytest.fail(f"it has not ended: {process.communicate(timeout=TIMEOUT_SECONDS)}")
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_nothing_behind(server: RedisServer, number: signal.Signals) -> None:
    process = start_bench(server)
    process.send_signal(number)
    end_of(process)
    assert process.returncode not in (0, -signal.SIGKILL)
    assert server.command("DBSIZE") == 1


@pytest.mark.parametrize("fault", ["kill", pytest.param("pause", marks=pytest.mark.slow)])
def test_server_outage_during_a_run(server: RedisServer, fault: str) -> None:
    process = start_bench(server)
    getattr(server, fault)()
    output, errors = end_of(process)
    assert process.returncode == 1, errors
    assert "failed" in output
    assert "pool: " in output
    assert "Traceback" not in errors
