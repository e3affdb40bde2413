"""Base class of pool servers for tests: start, kill, pause, corrupt."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from kvtier.errors import KVTierError
from kvtier.memory.keys import ChunkKey

TIMEOUT_SECONDS = 60.0
"""How long a server may take to start or to stop. No test measures it."""
POLL_SECONDS = 0.02
PORTS = (20_000, 32_000)
"""Below Linux' ephemeral ports (ip_local_port_range)."""
TAIL_BYTES = 4000


class ServerError(KVTierError):
    """A server did not start or stop. The message contains the end of its log."""


class Server(ABC):
    """A real server on loopback and a free port. It is empty after each start. Blocks; not thread-safe.

    A subclass implements how to start it (:meth:`_launch`) and whether it is ready (:meth:`_answers`).
    """

    type: ClassVar[str]
    """The tier type that uses this server."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is an empty folder for this server only."""
        self.folder = folder
        """Where it keeps its files."""
        self.log = folder / "server.log"
        """Its output."""
        self._processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return why it cannot be started here, and what to install; ``None`` if it can."""

    @abstractmethod
    def tier(self) -> dict[str, Any]:
        """Return the settings of a tier that uses it, without ``name``."""

    @abstractmethod
    def corrupt(self, key: ChunkKey) -> bool:
        """Corrupt a byte in the middle of a stored chunk, bypassing the backend. ``False``: not found."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes with :meth:`_spawn`. Every start must use the same port."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether the server answers requests."""

    @property
    def pids(self) -> list[int]:
        """The process ids; empty while the server is not running."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start an empty server, and wait until it answers. Raises :class:`ServerError`."""
        self._launch()
        self._wait_until(self._answers)

    def stop(self) -> None:
        """Send SIGTERM, and wait for the processes to exit."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the processes to exit."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, but requests are not answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process with its output in the log."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._processes.append(process)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            exited = [process.args for process in self._processes if process.poll() is not None]
            if exited or time.monotonic() > deadline:
                tail = self.tail()
                self.kill()
                raise ServerError(f"{self.type} {'exited' if exited else 'did not answer'}:\n{tail}")
            time.sleep(POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        self._signal(signal.SIGCONT)  # A stopped process does not handle SIGTERM.
        for process in self._processes:
            process.wait(TIMEOUT_SECONDS)
        self._processes.clear()


def free_port() -> int:
    """Return a free TCP port on loopback, outside the range of ephemeral ports."""
    while True:
        port = random.randrange(*PORTS)  # noqa: S311 - not for secrets
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
