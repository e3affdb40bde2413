"""A server that holds nothing: it takes bytes in, or gives as many as it is asked for.

Prints its port, and ends when its standard input does: with whoever has started it, however that ended.
"""

from __future__ import annotations

import socket
import sys
import threading

BUFFER_BYTES = 1 << 20
QUESTION_BYTES = 20
ANSWER_SHARE = 22
"""A question of so many bytes is answered with one: that of RESP's EXISTS."""


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        print(listener.getsockname()[1], flush=True)
        sys.stdin.read()


def accept(listener: socket.socket) -> None:
    """A thread for each connection."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve(connection: socket.socket) -> None:
    """Until the other end closes the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while question := connection.recv(QUESTION_BYTES, socket.MSG_WAITALL):
        kind, length = question[:1], int(question[1:])
        if kind == b"G":
            give(connection, buffer, length)
            continue
        take(connection, buffer, length)
        connection.sendall(bytes(length // ANSWER_SHARE) if kind == b"A" else b"!")
    connection.close()


def give(connection: socket.socket, buffer: memoryview, length: int) -> None:
    while length:
        part = buffer[:length]
        connection.sendall(part)
        length -= len(part)


def take(connection: socket.socket, buffer: memoryview, length: int) -> None:
    while length:
        received = connection.recv_into(buffer, min(length, len(buffer)))
        if not received:
            return
        length -= received


if __name__ == "__main__":
    main()
