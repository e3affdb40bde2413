"""``kvtier serve`` in its own process."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.cli import terminal
from kvtier.memory.host import memory_info
from kvtier.settings import Settings
from kvtier.testing.servers import free_port
from kvtier.units import format_size

from .conftest import Kvtier, fork, spawn

TIERS = json.dumps([{"name": "ram", "type": "cpu", "capacity": "1MiB"}])


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "kvtier.sock"


@pytest.fixture
def serving(address: Path) -> Iterator[subprocess.Popen[str]]:
    """A cache process that has logged that it serves."""
    process = spawn("serve", "--socket", address, KVTIER_TIERS=TIERS)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert f"serving ram (cpu) on {address}" in line, line + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def refusal(address: Path, tiers: str) -> str:
    """Run a cache process that does not start, and return its message."""
    process = fork("serve", "--socket", address, KVTIER_TIERS=tiers)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
    return errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(serving: subprocess.Popen[str], address: Path, number: signal.Signals) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(address))
    serving.send_signal(number)
    _, errors = serving.communicate(timeout=60)
    assert serving.returncode == 0
    assert f"INFO kvtier: {number.name}: shutting down" in errors
    assert not address.exists()


def test_second_process_on_the_same_socket_is_refused(serving: subprocess.Popen[str], address: Path) -> None:
    message = f"error: process {serving.pid} already serves on {address}"
    assert refusal(address, TIERS).startswith(message)


def test_unwritable_path(tmp_path: Path, address: Path) -> None:
    (tmp_path / "file").touch()
    disk = {"name": "ssd", "type": "disk", "capacity": "1MiB", "path": str(tmp_path / "file" / "disk")}
    message = f"error: tier 'ssd': path {tmp_path}/file/disk cannot be used (Not a directory)"
    assert refusal(address, json.dumps([*json.loads(TIERS), disk])).startswith(message)


def test_pool_that_cannot_be_reached_is_named(address: Path) -> None:
    pool = {"name": "pool", "type": "redis", "url": f"redis://127.0.0.1:{free_port()}"}
    process = spawn("serve", "--socket", address, KVTIER_TIERS=json.dumps([*json.loads(TIERS), pool]))
    assert process.stderr is not None
    try:
        lines = [process.stderr.readline() for _ in range(2)]
    finally:
        process.kill()
        process.communicate()
    place = pool["url"].removeprefix("redis://")
    assert any(f"WARNING kvtier: tier pool: {place} failed: Connection refused" in line for line in lines)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Sequence[tuple[Settings, dict[str, Any]]]:
    """The arguments that the cache process would have been started with."""
    calls: list[tuple[Settings, dict[str, Any]]] = []

    def run(function: partial[None]) -> None:
        calls.append((function.args[0], function.keywords))

    monkeypatch.setattr(anyio, "run", run)
    monkeypatch.setattr(terminal.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("kvtier"), "level", logging.WARNING)
    return calls


def test_options_override_the_file(
    kvtier: Kvtier, served: Sequence[tuple[Settings, dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "kvtier.yaml"
    recording = "recording: {files: 2, path: /a}"
    file.write_text(f"{{socket: /run/a.sock, log_level: ERROR, chunk_tokens: 64, {recording}}}")
    options = ("--socket", "/run/b.sock", "--log-level", "debug", "--record", "/b")
    assert kvtier("serve", "-c", file, *options).status == 0
    ((settings, keywords),) = served
    assert (settings.recording.path, settings.recording.files) == (Path("/b"), 2)
    assert (settings.socket, settings.log_level, settings.chunk_tokens) == (Path("/run/b.sock"), "DEBUG", 64)
    assert keywords["listener"] is None
    assert logging.getLogger("kvtier").level == logging.DEBUG


def test_invalid_option_names_the_setting(kvtier: Kvtier) -> None:
    result = kvtier("serve", "--log-level", "loud")
    assert result.status == 1
    assert result.errors.startswith("error: log_level (set on the command line, ")


def test_more_memory_than_the_host_has_is_refused(address: Path) -> None:
    tiers = json.dumps([{"name": "ram", "type": "cpu", "capacity": "1000TiB"}])
    memory = format_size(memory_info()["MemTotal"] - memory_info()["Hugetlb"])
    assert refusal(address, tiers) == (
        f"error: the `capacity` of tier 'ram' is 1000TiB, and this host has {memory} of memory: lower it\n"
    )
