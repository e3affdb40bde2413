"""What systemd and a service say to each other: that it serves or stops, and a socket that is already open.

See sd_notify(3) and sd_listen_fds(3). Another supervisor may do the same.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from kvtier.errors import ChannelError

logger = logging.getLogger("kvtier")

FIRST_DESCRIPTOR = 3


def notify(*states: str) -> None:
    """Report changes of state, such as ``READY=1``. Has no effect if nobody has asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # In the abstract namespace.
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.sendto("\n".join(states).encode(), address)
    except OSError as error:
        logger.warning("cannot report %s to systemd: %s", states[0], error)


def notify_stopping(seconds: float) -> None:
    """Report that this process stops, for which it needs up to so many seconds more."""
    notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def inherited_listener() -> socket.socket | None:
    """Return the Unix socket on which systemd listens for this process; ``None`` if there is none.

    Raises :class:`ChannelError` if it is not one socket of that kind.
    """
    # Of another process if this one has inherited the variables as well.
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    if count != "1":
        raise ChannelError(
            f"systemd passes {count or 'no'} sockets: write one ListenStream= in the socket unit"
        )
    try:
        listener = socket.socket(fileno=FIRST_DESCRIPTOR)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ChannelError(f"what systemd passes is not a socket: {error}") from error
    if listener.family != socket.AF_UNIX or not listens or not listener_path(listener).is_absolute():
        listener.close()
        raise ChannelError("systemd listens on no Unix socket: write ListenStream=/run/kvtier/kvtier.sock")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


def listener_path(listener: socket.socket) -> Path:
    """Return the path of a Unix socket."""
    return Path(os.fsdecode(listener.getsockname()))
