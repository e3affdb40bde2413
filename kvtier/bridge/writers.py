"""Processes that may write to the arena, and whether they have exited."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable

import anyio

SO_PEERPIDFD = 77
"""Of Linux 6.5. Unlike ``SO_PEERCRED``, it also works for a process in another PID namespace."""
_UCRED = struct.Struct("=iII")


class WriterProcess:
    """The process at the other end of a Unix socket. Created with :meth:`of`."""

    def __init__(self, fd: int | None, pid: int) -> None:
        """Takes ownership of the pidfd; ``None`` without one. ``pid``: 0 in another PID namespace."""
        self._fd = fd
        self._pid = pid
        self.client = 0
        """See :class:`~kvtier.bridge.protocol.Hello`."""
        self._first, self._filling = 0, frozenset[int]()

    @classmethod
    def of(cls, connected: socket.socket) -> WriterProcess:
        """Return the process that has connected."""
        pid, _, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        try:
            return cls(connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD), pid)
        except OSError:  # An older kernel, no file descriptor, or it has exited.
            try:
                return cls(os.pidfd_open(pid), pid)
            except OSError:
                return cls(None, pid)

    def welcomed(self, client: int, first: int, filling: Iterable[int]) -> None:
        """Note what it may write to: reservations from ``first`` on, and those that it is ``filling``."""
        self.client, self._first, self._filling = client, first, frozenset(filling)

    def may_fill(self, number: int) -> bool:
        """Whether it may write to a reservation that was granted before the end of its connection."""
        return number >= self._first or number in self._filling

    @property
    def watched(self) -> bool:
        """Whether its exit will be noticed."""
        return self._fd is not None or self._pid > 0

    @property
    def exited(self) -> bool:
        """Whether the process has exited: its memory is unmapped, and its devices have stopped."""
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            # With another process that has its PID meanwhile, it counts as running.
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    async def wait_exited(self) -> None:
        """Wait until the process has exited; forever without a pidfd."""
        if self._fd is None:
            await anyio.sleep_forever()
        else:
            await anyio.wait_readable(self._fd)

    def close(self) -> None:
        """Stop watching."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
