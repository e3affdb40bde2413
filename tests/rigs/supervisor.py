"""Play systemd: read a unit, pass a socket, and receive what a service reports."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.cache_process import START_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = "/opt/kvtier/bin/kvtier"
WITH_SOCKET = 'exec 3<&"$SOCKET"; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"'
"""The process id is known only in the process itself."""


def unit(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit, each with its values in their order."""
    settings: dict[str, list[str]] = {}
    text = (DEPLOY / "systemd" / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            settings.setdefault(key, []).append(value)
    return settings


def command(name: str, **variables: str | Path) -> list[str]:
    """Return the command of a unit, with this Python, and these values for its variables."""
    (line,) = unit(name)["ExecStart"]
    for variable, value in variables.items():
        line = line.replace(f"${{{variable}}}", str(value))
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    return [sys.executable, "-m", "kvtier", *arguments]


class Supervisor:
    """Starts services, and receives what they report."""

    def __init__(self, folder: Path, reports: socket.socket) -> None:
        self._address = folder / "notify"
        self._reports = reports
        self._processes: list[subprocess.Popen[str]] = []
        reports.bind(str(self._address))
        reports.settimeout(START_SECONDS)

    def start(
        self, command: list[str], environment: Mapping[str, str], listener: socket.socket | None = None
    ) -> subprocess.Popen[str]:
        """Start a service, with a socket or without."""
        variables = {**os.environ, "NOTIFY_SOCKET": str(self._address), **environment}
        descriptors: list[int] = []
        if listener is not None:
            variables["SOCKET"] = str(listener.fileno())
            command = ["bash", "-c", WITH_SOCKET, "bash", *command]
            descriptors = [listener.fileno()]
        process = subprocess.Popen(
            command,
            env=variables,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def report(self) -> list[str]:
        """Wait for the next report."""
        return self._reports.recv(4096).decode().splitlines()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def supervisor(folder: Path) -> Iterator[Supervisor]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        running = Supervisor(folder, reports)
        try:
            yield running
        finally:
            running.close()
