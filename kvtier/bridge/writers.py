"""Processes that may write to the arena, and whether they have exited."""

from __future__ import annotations

import os
import select
import socket
import struct

import anyio

SO_PEERPIDFD = 77
"""Of Linux 6.5. Unlike ``SO_PEERCRED``, it also works for a process in another PID namespace."""
_UCRED = struct.Struct("=iII")


class WriterProcess:
    """The process at the other end of a Unix socket. Created with :meth:`of`."""

    def __init__(self, fd: int, pid: int) -> None:
        """Takes ownership of the pidfd."""
        self._fd = fd
        self.pid = pid
        """0 if it is in another PID namespace."""

    @classmethod
    def of(cls, connected: socket.socket) -> WriterProcess | None:
        """Return the process that has connected; ``None`` if it has exited, or cannot be watched."""
        pid, _, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        try:
            return cls(connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD), pid)
        except OSError:  # An older kernel, or it has exited: then its PID may be that of another process.
            try:
                return cls(os.pidfd_open(pid), pid)
            except OSError:
                return None

    @property
    def exited(self) -> bool:
        """Whether the process has exited: its memory is unmapped, and its devices have stopped."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    async def wait_exited(self) -> None:
        """Wait until the process has exited."""
        await anyio.wait_readable(self._fd)

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)
