"""InfiniStore's TCP protocol, spoken here so that bytes go straight between socket and arena.

The client library reads a value into memory of its own, has no time-out, and waits for good where the
server stands still. A request is a header of nine bytes (magic, operation, length of the body) and a body,
most of them FlatBuffers; an answer is a status of four bytes, then what was asked for. All little-endian.

Protocol: https://github.com/bytedance/InfiniStore, ``src/protocol.h``, ``src/infinistore.cpp`` (0.2.35).
FlatBuffers: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from kvtier.backends.wire import Connection

FINISHED, NOT_FOUND, OUT_OF_MEMORY = 200, 404, 507
LONGEST_VALUE = (1 << 31) - 1
"""Bytes; the protocol counts them in a signed integer."""
LONGEST_BODY = 4 << 20
"""Bytes of a request without its value."""
DRAIN_BYTES = 1 << 20
"""A value of an unexpected length is read and dropped up to here; beyond, a new connection is cheaper."""

_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IBI")
_NUMBER = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_EXISTS, _MATCH, _DELETE, _PAYLOAD = b"C", b"M", b"X", b"L"
_PUT, _GET = b"P", b"G"

_PAYLOAD_TABLE = struct.Struct("<I 5H2x iIiB3x")
"""Root, a vtable of three fields, and the table: where its vtable and its key are, a length, an operation."""
_STRINGS_TABLE = struct.Struct("<I 3H2x iI I")
"""Root, a vtable of one field, the table, and the number of strings in the vector that comes next."""


class Refused(ConnectionError):
    """The server answered with a status that says no."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered with status {status}")
        self.status = status


class InfiniStoreConnection(Connection):
    """One connection. Each call blocks until the deadline that is set, at most, and raises ``OSError``.

    After any exception it is out of step with the server and good for nothing but ``close``.
    """

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether there is a value under each name: a round trip for each.

        Never two requests at once: a server that finds the connection closed with two answers still to be
        written ends itself.
        """
        return [self._exists(name) for name in names]

    def matched(self, names: Sequence[bytes]) -> int:
        """How many leading names have a value, as far as a binary search can tell: one round trip."""
        return self._ask(_MATCH, names) + 1

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove the values; a name without one is no error."""
        if names:
            self._ask(_DELETE, names)

    def put(self, name: bytes, value: memoryview | bytes) -> None:
        """Store a value. Raises :class:`Refused`. Nobody may ask for the name before this has returned."""
        self.send([_request(_PAYLOAD, _payload(name, len(value), _PUT)), value])
        self._expect_finished()

    def lacks_room(self, name: bytes, length: int) -> bool:
        """Whether the server refuses a value for want of room, before it has seen it. Then close this.

        It says nothing where it has room: ``TimeoutError``, and the name is one to delete.
        """
        self.send([_request(_PAYLOAD, _payload(name, length, _PUT))])
        return self._number(_NUMBER) == OUT_OF_MEMORY

    def get(self, name: bytes, view: memoryview) -> bool:
        """Fill ``view`` with a value. ``False``: there is none, or one of another length.

        A long one of another length is left unread, and :attr:`in_step` is then false.
        """
        self.send([_request(_PAYLOAD, _payload(name, 0, _GET))])
        status = self._number(_NUMBER)
        if status == NOT_FOUND:
            return False
        if status != FINISHED:
            raise Refused(status)
        length = self._number(_LENGTH)
        if length == len(view):
            self.take(view)
            return True
        if length > DRAIN_BYTES:
            self.in_step = False
        else:
            self.take(memoryview(bytearray(length)))
        return False

    def _exists(self, name: bytes) -> bool:
        self.send([_request(_EXISTS, name)])
        self._expect_finished()
        return self._number(_NUMBER) == 0

    def _ask(self, operation: bytes, names: Sequence[bytes]) -> int:
        self.send([_request(operation, _strings(names))])
        self._expect_finished()
        return self._number(_NUMBER)

    def _expect_finished(self) -> None:
        status = self._number(_NUMBER)
        if status != FINISHED:
            raise Refused(status)

    def _number(self, form: struct.Struct) -> int:
        # The server sends the next part of an answer only when this one is acknowledged, and the kernel would
        # take 40 ms for that. The option holds for a while only: tcp(7).
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        answer = memoryview(bytearray(form.size))
        self.take(answer)
        number: int = form.unpack(answer)[0]
        return number


def _request(operation: bytes, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, operation[0], len(body)) + body


def _payload(name: bytes, length: int, operation: bytes) -> bytes:
    """``TCPPayloadRequest {key: string; value_length: int; op: byte}``."""
    return _PAYLOAD_TABLE.pack(16, 10, 16, 4, 8, 12, 12, 12, length, operation[0]) + _string(name)


def _strings(names: Sequence[bytes]) -> bytes:
    """A table with the one field ``keys: [string]``."""
    strings = [_string(name) for name in names]
    offsets, at = [], _LENGTH.size * len(names)
    for index, string in enumerate(strings):
        offsets.append(at - _LENGTH.size * index)  # From where the offset itself stands.
        at += len(string)
    vector = struct.pack(f"<{len(offsets)}I", *offsets)
    return b"".join([_STRINGS_TABLE.pack(12, 6, 8, 4, 8, 4, len(names)), vector, *strings])


def _string(text: bytes) -> bytes:
    """Its length, itself, a zero at least, and padding to four bytes."""
    return _LENGTH.pack(len(text)) + text + bytes(4 - len(text) % 4)
