"""What a service reports to systemd, and which sockets it takes over."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.concurrency import systemd
from kvtier.errors import ChannelError


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listening Unix socket that was passed to this process."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        # Taken over, and closed with that socket.
        monkeypatch.setattr(systemd, "FIRST_DESCRIPTOR", os.dup(listener.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        yield listener


def test_socket_is_taken_over(passed: socket.socket, tmp_path: Path) -> None:
    listener = systemd.inherited_listener()
    assert listener is not None
    with listener:
        assert systemd.listener_path(listener) == tmp_path / "socket"
        assert not listener.get_inheritable()
        assert listener.gettimeout() == 0


@pytest.mark.parametrize("process", [None, "1"])
def test_socket_of_another_process_is_not(
    passed: socket.socket, monkeypatch: pytest.MonkeyPatch, process: str | None
) -> None:
    if process is None:
        monkeypatch.delenv("LISTEN_PID")
    else:
        monkeypatch.setenv("LISTEN_PID", process)
    assert systemd.inherited_listener() is None
    os.close(systemd.FIRST_DESCRIPTOR)


@pytest.mark.parametrize("count", ["0", "2", ""])
def test_other_numbers_of_sockets_are_refused(
    passed: socket.socket, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    monkeypatch.setenv("LISTEN_FDS", count)
    with pytest.raises(ChannelError, match="write one ListenStream= in the socket unit"):
        systemd.inherited_listener()
    os.close(systemd.FIRST_DESCRIPTOR)


def test_file_is_refused(passed: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(systemd.FIRST_DESCRIPTOR)
    with Path(os.devnull).open() as file:
        monkeypatch.setattr(systemd, "FIRST_DESCRIPTOR", file.fileno())
        with pytest.raises(ChannelError, match="is not a socket"):
            systemd.inherited_listener()


@pytest.mark.parametrize("abstract", [False, True])
def test_states_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@kvtier-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind(name.replace("@", "\0") if abstract else name)
        reports.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        systemd.notify("READY=1")
        systemd.notify_stopping(1.5)
        assert [reports.recv(100) for _ in range(2)] == [
            b"READY=1",
            b"STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000",
        ]


def test_nobody_asks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify("READY=1")
    assert not caplog.records


def test_service_runs_on_if_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING):
        systemd.notify("READY=1")
    assert "cannot report READY=1 to systemd" in caplog.text
