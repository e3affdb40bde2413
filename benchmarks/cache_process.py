"""Cache processes of benchmarks: ``kvtier serve``, or the one that vLLM starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from kvtier.bridge.client import status
from kvtier.errors import ChannelError
from kvtier.lab.demo.server import POLL_SECONDS, Server, start_cache

READY_SECONDS = 60
STOP_SECONDS = 60


@contextmanager
def serving(
    socket: Path,
    variables: Mapping[str, str],
    program: Sequence[str] = ("-m", "kvtier", "serve", "--log-level", "WARNING"),
) -> Iterator[None]:
    """Run ``kvtier serve``, or another Python program that does the same, until the end of the block."""
    environment = {**os.environ, **variables, "KVTIER_SOCKET": str(socket)}
    process = subprocess.Popen([sys.executable, *program], env=environment)
    try:
        while not is_ready(socket):
            assert process.poll() is None, "the cache process did not start"
            time.sleep(POLL_SECONDS)
        yield
    finally:
        process.terminate()
        process.wait()


def is_ready(socket: Path) -> bool:
    """Whether a cache process serves a socket."""
    try:
        return bool(status(socket))
    except ChannelError:
        return False


class CacheProcess:
    """A cache process with its settings file and socket below ``folder``, which needs a short path."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, serve: bool) -> None:
        """Write the settings. ``serve``: run ``kvtier serve``, before vLLM starts."""
        self._folder = folder
        self._server: Server | None = None
        self._serve = serve
        self.config = folder / "kvtier.yaml"
        socket = {"socket": str(folder / "socket")} if serve else {}
        self.config.write_text(yaml.safe_dump({**settings, **socket}))
        self.variables = {"KVTIER_CONFIG_FILE": str(self.config), "XDG_RUNTIME_DIR": str(folder)}
        """Environment of the vLLM server."""

    @property
    def socket(self) -> Path:
        """The socket: of a process that vLLM starts, below the folder that ``XDG_RUNTIME_DIR`` names."""
        if self._serve:
            return self._folder / "socket"
        return next(self._folder.glob("kvtier-*/*.sock"), self._folder / "none")

    def start(self) -> None:
        """Start ``kvtier serve`` and wait until it serves; do nothing if vLLM starts the process."""
        if self._serve:
            self._server = start_cache(self.config, self._folder / "cache.log")
            self._server.wait_until(self.socket.exists, READY_SECONDS)

    def stop(self) -> None:
        """Send SIGTERM and wait: pending writes complete."""
        if self._server is not None:
            self._server.stop()
        elif not self._serve:
            self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process with SIGKILL. Harmless if it has exited."""
        if self._server is not None:
            self._server.kill()
        elif not self._serve:
            self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        with suppress(ChannelError, ProcessLookupError):
            pid = status(self.socket)["pid"]
            os.kill(pid, number)
            deadline = time.monotonic() + STOP_SECONDS
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
