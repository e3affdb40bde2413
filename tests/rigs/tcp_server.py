"""TCP servers on loopback, of which a test scripts each connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from kvtier.concurrency.sockets.connection import Connection, Deadline

HOST = "127.0.0.1"
MAX_CONNECTIONS = 100
LONG_SECONDS = 100.0
"""Longer than any test."""


@contextmanager
def connected(seconds: float | Deadline = LONG_SECONDS) -> Iterator[tuple[Connection, socket.socket]]:
    """Open a connection with a deadline, and the server's end of it."""
    connection = Connection(socket.AF_INET)
    deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds)
    with ExitStack() as stack:
        stack.callback(connection.close)
        listener = stack.enter_context(socket.create_server((HOST, 0)))
        with Deadline(LONG_SECONDS).bounds(connection):
            connection.connect(listener.getsockname())
        stack.enter_context(deadline.bounds(connection))
        yield connection, stack.enter_context(listener.accept()[0])


@contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """Call ``serve`` for each connection, in a thread of its own, and then close it. Yield the port.

    Connections that are still open at the end of the block are shut down.
    """
    connections: list[socket.socket] = []

    def serve_one(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            serve(connection)

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0)))
        threads = stack.enter_context(ThreadPoolExecutor(MAX_CONNECTIONS))

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    threads.submit(serve_one, connections[-1])

        accepting = threads.submit(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.result()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
