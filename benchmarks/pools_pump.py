"""A server that stores nothing: it receives bytes, or sends as many as requested.

Prints its port. Exits when its standard input ends, and so together with its parent process.
"""

from __future__ import annotations

import socket
import sys
import threading

BUFFER_BYTES = 1 << 20
REQUEST_BYTES = 20
ANSWER_SHARE = 22
"""Bytes of a lookup request per byte of the answer, as for EXISTS in RESP."""


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        print(listener.getsockname()[1], flush=True)
        sys.stdin.read()


def accept(listener: socket.socket) -> None:
    """Start a thread for each connection."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve(connection: socket.socket) -> None:
    """Serve a connection until the client closes it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while request := connection.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        kind, length = request[:1], int(request[1:])
        if kind == b"G":
            send_bytes(connection, buffer, length)
            continue
        receive_bytes(connection, buffer, length)
        connection.sendall(bytes(length // ANSWER_SHARE) if kind == b"A" else b"!")
    connection.close()


def send_bytes(connection: socket.socket, buffer: memoryview, length: int) -> None:
    while length:
        part = buffer[:length]
        connection.sendall(part)
        length -= len(part)


def receive_bytes(connection: socket.socket, buffer: memoryview, length: int) -> None:
    while length:
        received = connection.recv_into(buffer, min(length, len(buffer)))
        if not received:
            return
        length -= received


if __name__ == "__main__":
    main()
