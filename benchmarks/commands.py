"""A process that answers commands, such as one that runs LMCache in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Self

STOP_SECONDS = 10


class CommandProcess:
    """A process that writes a line of JSON when it is ready, and one for each line that it reads."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Start it, and wait until it is ready. Raises :class:`SystemExit` if it exits."""
        self.name = name
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, *command: str | int) -> float:
        """Run a command; return its result, mostly seconds."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin)
        return float(self._receive())

    def close(self) -> None:
        """End the process, which exits when nothing more can be read."""
        try:
            self._process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} exited; see its output above")
        return str(json.loads(line))
