"""What a server of a shared pool can be told in a test: start, die, stand still, hold a wrong byte."""

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
from kvtier.keys import ChunkKey

PATIENCE_SECONDS = 60.0
"""How long a server may take to start or to end; nothing is judged by it."""
POLL_SECONDS = 0.02
PORTS = (20_000, 32_000)
"""Below those that Linux gives to outgoing connections (ip_local_port_range)."""
TAIL_BYTES = 4000


class ServerError(KVTierError):
    """A server did not start or did not end; the message holds the end of its log."""


class Server(ABC):
    """One real server on loopback and a free port, each time it starts empty. Blocks; not thread-safe.

    A subclass says how it is started (:meth:`_launch`) and whether it answers (:meth:`_answers`).
    """

    type: ClassVar[str]
    """The tier type that it serves."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is empty and the server's own."""
        self.folder = folder
        self.log = folder / "server.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it cannot be started here, and what to install; ``None`` where it can."""

    @abstractmethod
    def tier(self) -> dict[str, Any]:
        """The settings of a tier that uses it, but for its name."""

    @abstractmethod
    def corrupt(self, key: ChunkKey) -> bool:
        """Flip one byte in the middle of a stored chunk, behind the backend's back; ``False``: it cannot."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes with :meth:`_spawn`, on the same port every time."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it does what it is asked, now."""

    @property
    def pids(self) -> list[int]:
        """The process ids, none while it does not run."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start it, empty, and wait until it answers. Raises :class:`ServerError`."""
        self._launch()
        self._wait_until(self._answers, "did not answer")

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """The inverse of :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start one process, which writes to the log."""
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

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                tail = self.tail()
                self.kill()
                raise ServerError(f"{self.type} {'has ended' if ended else otherwise}:\n{tail}")
            time.sleep(POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        self._signal(signal.SIGCONT)  # A process that stands still does not see SIGTERM.
        for process in self._processes:
            process.wait(PATIENCE_SECONDS)
        self._processes.clear()


def free_port() -> int:
    """A TCP port of loopback that nobody uses at present, and that no outgoing connection will take."""
    while True:
        port = random.randrange(*PORTS)  # noqa: S311 - not for secrets
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
