from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from soak import links

ENGINE = """
import socket, sys
from pathlib import Path
from soak import links
connections = []
for role in ("worker", "scheduler"):
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(sys.argv[1])
    links.record(Path(sys.argv[2]), role, Path(sys.argv[1]), connected)
    connections.append(connected)
input()
"""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[int, dict[str, socket.socket]]]:
    """The id of a process with two connections, and our ends of them, by role."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        command = [sys.executable, "-c", ENGINE, str(tmp_path / "socket"), str(tmp_path)]
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])
        try:
            accepted = {role: listener.accept()[0] for role in ("worker", "scheduler")}
            while (tmp_path / f"links-{engine.pid}").read_bytes().count(b"\n") < 2:
                assert engine.poll() is None
            yield engine.pid, accepted
            for connected in accepted.values():
                connected.close()
        finally:
            engine.kill()
            engine.communicate()


@pytest.mark.parametrize(("role", "other"), [("scheduler", "worker"), ("worker", "scheduler")])
def test_only_the_connection_of_a_role_is_cut(
    tmp_path: Path, ends: tuple[int, dict[str, socket.socket]], role: str, other: str
) -> None:
    pid, accepted = ends
    assert links.cut(tmp_path, pid, role, tmp_path / "another") is None
    assert (first := links.cut(tmp_path, pid, role, tmp_path / "socket")) is not None
    assert accepted[role].recv(1) == b""
    with pytest.raises(BlockingIOError):
        accepted[other].recv(1, socket.MSG_DONTWAIT)
    # The engine has not noticed yet: it is the same connection.
    assert links.cut(tmp_path, pid, role, tmp_path / "socket") == first


def test_descriptor_that_was_used_again_is_not_cut(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near, far:
        links.record(tmp_path, "worker", Path("socket"), near)
        other, another = socket.socketpair()
        with other, another:
            os.dup2(other.fileno(), near.fileno())
            assert links.cut(tmp_path, os.getpid(), "worker", Path("socket")) is None
            another.sendall(b"x")
            assert other.recv(1) == b"x"


def test_process_that_has_exited_has_no_connection(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as exited:
        exited.wait()
    assert links.cut(tmp_path, exited.pid, "worker", Path("socket")) is None
