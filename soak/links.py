"""The connections of engines to cache processes, and how to cut one without the engine's help."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""Its number on every architecture. Python's ``os`` does not have it."""
_libc = ctypes.CDLL(None, use_errno=True)


def record(folder: Path, role: str, path: Path, connected: socket.socket) -> None:
    """Note in ``folder`` that this process, as ``role``, has connected to the cache process on ``path``."""
    number = connected.fileno()
    line = json.dumps([role, str(path), number, os.fstat(number).st_ino])
    with _file(folder, os.getpid()).open("a") as output:
        output.write(line + "\n")


def cut(folder: Path, pid: int, role: str, path: Path) -> int | None:
    """Shut down the last connection of a process to ``path`` as ``role``.

    Return what identifies the connection; ``None`` without one.
    """
    with suppress(OSError):  # It has exited, or not connected yet.
        lines = _file(folder, pid).read_text().splitlines()
        found = [line[2:] for line in map(json.loads, lines) if line[:2] == [role, str(path)]]
        if not found:
            return None
        number, inode = found[-1]
        process = os.pidfd_open(pid)
        try:
            # Unlike a descriptor opened in /proc, a duplicate of it can be shut down.
            duplicate = _libc.syscall(_PIDFD_GETFD, process, number, 0)
        finally:
            os.close(process)
        if duplicate < 0:
            return None
        try:
            if os.fstat(duplicate).st_ino == inode:
                with socket.socket(fileno=os.dup(duplicate)) as connected:
                    connected.shutdown(socket.SHUT_RDWR)
                return int(inode)
        finally:
            os.close(duplicate)
    return None


def _file(folder: Path, pid: int) -> Path:
    return folder / f"links-{pid}"
