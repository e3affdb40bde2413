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
from collections.abc import Iterator, Sequence

from kvtier.backends.infinistore.drain import Drain
from kvtier.sockets.connection import Connection

FINISHED, NOT_FOUND, OUT_OF_MEMORY = 200, 404, 507
LONGEST_VALUE = (1 << 31) - 1
"""Bytes; the protocol counts them in a signed integer."""
NAMES_AT_ONCE = 64
"""So many are asked for together; more would not be faster."""
DRAIN_BYTES = 1 << 20
"""A value of an unexpected length is read and dropped up to here; beyond, a new connection is cheaper."""

_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IBI")
HEAD = struct.Struct("<ii")
"""The status, and a number or the length of a value."""
_STATUS = struct.Struct("<i")
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


class Answer:
    """How much has come of an answer, so that one knows when the server has nothing left to send.

    Of ``length`` bytes; ``None``: it is a value, which begins with a length of its own. A refusal is a status
    alone.
    """

    def __init__(self, length: int | None = None) -> None:
        self.head = b""
        """The first bytes of it, :data:`HEAD` at most."""
        self._length = length
        self._received = 0

    def note(self, part: memoryview) -> None:
        """``part`` has come."""
        self.head += part[: HEAD.size - len(self.head)]
        self._received += len(part)

    @property
    def has_head(self) -> bool:
        """Whether there is a status, and what comes with one that is not a refusal."""
        return len(self.head) == HEAD.size or (len(self.head) >= _STATUS.size and self.status != FINISHED)

    @property
    def status(self) -> int:
        """What the server says to the request."""
        status: int = _STATUS.unpack_from(self.head)[0]
        return status

    @property
    def number(self) -> int:
        """What follows the status."""
        number: int = HEAD.unpack(self.head)[1]
        return number

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        if self.has_head and self.status != FINISHED:
            return True
        if self._length is not None:
            return self._received >= self._length
        return self.has_head and self._received >= HEAD.size + self.number


class InfiniStoreConnection(Connection):
    """One connection. Each call blocks until the deadline that is set, at most, and raises ``OSError``.

    After any exception it is out of step with the server and good for nothing but ``close``, which leaves it
    to ``drain`` where the server may still be sending.
    """

    def __init__(self, family: int, drain: Drain | None = None) -> None:
        super().__init__(family)
        self._drain = drain
        self._answer: Answer | None = None

    def exist(self, names: Sequence[bytes]) -> Iterator[bool]:
        """Whether there is a value under each name: a round trip for each :data:`NAMES_AT_ONCE`."""
        for start in range(0, len(names), NAMES_AT_ONCE):
            part = names[start : start + NAMES_AT_ONCE]
            self.send([b"".join([_request(_EXISTS, name) for name in part])])
            answers = memoryview(bytearray(HEAD.size * len(part)))
            self._answer = Answer(len(answers))
            self._hurry()
            self.take(answers)
            for status, number in HEAD.iter_unpack(answers):
                if status != FINISHED:
                    raise Refused(status)
                yield number == 0

    def matched(self, names: Sequence[bytes]) -> int:
        """The leading names that have a value are no more than these: one round trip.

        The server looks for the first that has none by a binary search, which finds another one where a value
        before others was evicted.
        """
        return min(self._ask(_MATCH, names) + 1, len(names))

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove the values; a name without one is no error.

        The server ends itself where one was not written to its end: :meth:`put` something else there first.
        """
        if names:
            self._ask(_DELETE, names)

    def put(self, name: bytes, value: memoryview | bytes) -> None:
        """Store a value. Raises :class:`Refused`. Nobody may ask for the name before this has returned."""
        self.send([_request(_PAYLOAD, _payload(name, len(value), _PUT)), value])
        status = self._status()
        if status != FINISHED:
            raise Refused(status)

    def lacks_room(self, name: bytes, length: int) -> bool:
        """Whether the server refuses a value for want of room, before it has seen it. Then close this.

        It says nothing where it has room: ``TimeoutError``, and the name is one to delete.
        """
        self.send([_request(_PAYLOAD, _payload(name, length, _PUT))])
        return self._status() == OUT_OF_MEMORY

    def get(self, name: bytes, view: memoryview) -> bool:
        """Fill ``view`` with a value. ``False``: there is none, or one of another length.

        A long one of another length is left unread, and :attr:`in_step` is then false.
        """
        self.send([_request(_PAYLOAD, _payload(name, 0, _GET))])
        answer = self._read_head(Answer())
        if answer.status == NOT_FOUND:
            return False
        if answer.status != FINISHED:
            raise Refused(answer.status)
        if answer.number == len(view):
            self.take(view)
            return True
        if 0 <= answer.number <= DRAIN_BYTES:
            self.take(memoryview(bytearray(answer.number)))
        else:
            self.in_step = False
        return False

    def close(self) -> None:
        """Let go of the socket, now or when the server has sent what it still sends. Does not block."""
        if self._drain is None or self._answer is None or self._answer.is_complete:
            self.hang_up()
        else:
            self._drain.add(self)

    # What a drain needs.

    def fileno(self) -> int:
        """See :class:`~kvtier.backends.infinistore.drain.Leaving`."""
        return self._socket.fileno()

    def discard(self, scratch: memoryview) -> bool:
        """See :class:`~kvtier.backends.infinistore.drain.Leaving`."""
        assert self._answer is not None
        try:
            received = self._socket.recv_into(scratch, len(scratch), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._answer.note(scratch[:received])
        return not received or self._answer.is_complete

    def hang_up(self) -> None:
        """See :class:`~kvtier.backends.infinistore.drain.Leaving`."""
        super().close()

    def _ask(self, operation: bytes, names: Sequence[bytes]) -> int:
        self.send([_request(operation, _strings(names))])
        answer = self._read_head(Answer(HEAD.size))
        if answer.status != FINISHED:
            raise Refused(answer.status)
        return answer.number

    def _read_head(self, answer: Answer) -> Answer:
        self._answer = answer
        head = memoryview(bytearray(HEAD.size))
        while not answer.has_head:
            self._hurry()
            self._receive_some(head[len(answer.head) :], 0)
        return answer

    def _status(self) -> int:
        answer = self._answer = Answer(_STATUS.size)
        self.take(memoryview(bytearray(_STATUS.size)))
        return answer.status

    def _receive_some(self, view: memoryview, flags: int) -> int:
        received = super()._receive_some(view, flags)
        if self._answer is not None:
            self._answer.note(view[:received])
        return received

    def _hurry(self) -> None:
        # The server sends the next part of an answer only when this one is acknowledged, and the kernel would
        # take 40 ms for that. The option holds for a while only: tcp(7).
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


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
