"""The services as systemd starts them: they report their state, and serve on a socket that it has opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.bridge.client import status
from tests.rigs.bridges import KEYS, _close_bridges, store
from tests.rigs.supervisor import DEPLOY, PROGRAM, Supervisor, command, supervisor, unit

__all__ = ["_close_bridges"]

UNITS = ("kvtier.service", "kvtier.socket", "kvtier-controller.service")
SERVICES = UNITS[::2]
SYSTEM_CALLS = ("io_uring_setup", "memfd_create", "pidfd_open", "sched_setattr", "set_mempolicy")
"""What a cache process does without, or worse, if it may not call it."""
NEEDS_SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Supervisor]:
    with supervisor(tmp_path) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvtier.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    """The socket of the socket unit."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))
        opened.listen()
        yield opened


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What the unit sets, with another file of settings."""
    file = tmp_path / "kvtier.yaml"
    disk = {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "64MiB"}
    tiers = [{"name": "ram", "type": "cpu", "capacity": "32MiB"}, disk]
    file.write_text(json.dumps({"chunk_tokens": 64, "drain_timeout": "20s", "tiers": tiers}))  # YAML.
    (variable,) = unit("kvtier.service")["Environment"]
    name, _, _ = variable.partition("=")
    return {name: str(file)}


def test_serves_on_the_socket_of_the_socket_unit(
    systemd: Supervisor, listener: socket.socket, path: Path, environment: dict[str, str]
) -> None:
    first = systemd.start(command("kvtier.service"), environment, listener)
    assert systemd.report() == ["READY=1"]
    assert status(path)["pid"] == first.pid
    store(path, KEYS[:4])
    first.send_signal(signal.SIGTERM)
    assert systemd.report() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=50000000"]
    assert first.wait(60) == 0
    assert path.is_socket(), "it belongs to systemd"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(path))  # Waits for the next process.
        second = systemd.start(command("kvtier.service"), environment, listener)
        assert systemd.report() == ["READY=1"]
    report = status(path)
    assert (report["pid"], report["tiers"][1]["chunks"]) == (second.pid, 4)


def test_engines_are_not_looked_for_elsewhere(
    systemd: Supervisor, listener: socket.socket, path: Path, environment: dict[str, str]
) -> None:
    environment["KVTIER_SOCKET"] = "/run/other.sock"
    process = systemd.start(command("kvtier.service"), environment, listener)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"error: systemd listens on {path}: set `socket` to that, instead of")


def test_socket_of_another_kind_is_refused(systemd: Supervisor, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = systemd.start(command("kvtier.service"), environment, listener)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: systemd listens on no Unix socket: write ListenStream=")


def test_controller_reports_its_state(systemd: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 40)
    line = command("kvtier-controller.service", CREDENTIALS_DIRECTORY=tmp_path, STATE_DIRECTORY=tmp_path)
    line[line.index("--listen") + 1] = "127.0.0.1:0"
    process = systemd.start(line, {})
    assert systemd.report() == ["READY=1"]
    process.send_signal(signal.SIGTERM)
    assert systemd.report() == ["STOPPING=1"]
    assert process.wait(60) == 0
    assert (tmp_path / "controller.sqlite").exists()


@NEEDS_SYSTEMD
def test_units_are_valid(tmp_path: Path) -> None:
    for name in UNITS:
        text = (DEPLOY / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace(PROGRAM, "/bin/true"))
    result = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / name for name in UNITS)],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in result.stderr.splitlines() if "kvtier" in line]
    assert (result.returncode, ours) == (0, []), result.stderr


@NEEDS_SYSTEMD
@pytest.mark.parametrize("name", SERVICES)
def test_units_are_hardened(name: str) -> None:
    analyzed = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", DEPLOY / "systemd" / name]
    result = subprocess.run(analyzed, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@NEEDS_SYSTEMD
def test_needed_system_calls_are_allowed() -> None:
    (filtered,) = unit("kvtier.service")["SystemCallFilter"]
    listed = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True)
    # A set is its name, followed by an indented line for each call, comment and other set.
    sets = {
        name: set(members.split())
        for name, members in re.findall(r"(?m)^(@\S+)\n((?:^ .*\n?)*)", listed.stdout)
    }

    def calls(name: str) -> set[str]:
        return {call for member in sets[name] for call in (calls(member) if member in sets else {member})}

    assert set(SYSTEM_CALLS) <= calls(filtered)


def test_unit_and_settings_name_one_socket() -> None:
    (path,) = unit("kvtier.socket")["ListenStream"]
    (folder,) = unit("kvtier.service")["RuntimeDirectory"]
    assert Path(path).parent == Path("/run") / folder
    assert unit("kvtier.socket")["SocketUser"] == unit("kvtier.service")["User"]
    assert path in (DEPLOY / "Containerfile").read_text()
