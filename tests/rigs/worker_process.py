"""A worker in a process of its own, which disconnects on command and lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier.bridge.protocol import Hello
from kvtier.rpc.frames import encode

PROGRAM = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(sys.argv[1])
    connected.sendall(bytes.fromhex(sys.argv[2]))
    connected.recv(65536)
    print("connected", flush=True)
    sys.stdin.readline()
print("disconnected", flush=True)
sys.stdin.readline()
"""


class WorkerProcess:
    """Connects to a cache process. Its methods block: call them in a thread if that is in this event loop."""

    def __init__(self, path: Path, hello: Hello) -> None:
        command = [sys.executable, "-c", PROGRAM, str(path), encode(hello).hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def await_connected(self) -> None:
        """Wait until the cache process has welcomed it."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "connected\n"

    def disconnect(self) -> None:
        """Close its connection."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "disconnected\n"
