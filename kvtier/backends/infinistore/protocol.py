"""InfiniStore's TCP protocol, reimplemented to transfer bytes directly between socket and arena.

The client library reads values into its own memory, has no timeout, and hangs forever with a hanging
server. A request is a header of nine bytes (magic, operation, body length) and a body, usually a
FlatBuffer; a reply is a status of four bytes, followed by the result. All integers are little-endian.

An InfiniStore (0.2.35) that has data to send on a closed connection frees it twice and crashes, for all its
clients. So a connection whose caller has timed out is not closed: a :class:`Drain` reads the pending reply to
its end first.

Protocol: https://github.com/bytedance/InfiniStore, ``src/protocol.h``, ``src/infinistore.cpp`` (0.2.35).
FlatBuffers: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from threading import Lock, Thread

from kvtier.concurrency.sockets.connection import Connection

TIMEOUT_SECONDS = 600.0
"""A connection to a server that hangs longer than this is closed anyway."""
MAX_CONNECTIONS = 256
SCRATCH_BYTES = 256 << 10
POLL_SECONDS = 0.05
"""Maximum delay until a new connection is polled."""
FINISHED, NOT_FOUND, OUT_OF_MEMORY = 200, 404, 507
MAX_VALUE_BYTES = (1 << 31) - 1
"""The protocol has a signed 32-bit length."""
NAMES_PER_ROUND_TRIP = 64
"""Number of pipelined existence queries; more would not be faster."""
DRAIN_BYTES = 1 << 20
"""A value of unexpected length is read and discarded up to this size; above, reconnecting is cheaper."""

_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IBI")
HEAD = struct.Struct("<ii")
"""The status, and a number or the value length."""
_STATUS = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_EXISTS, _MATCH, _DELETE, _PAYLOAD = b"C", b"M", b"X", b"L"
_PUT, _GET = b"P", b"G"
_PAYLOAD_TABLE = struct.Struct("<I 5H2x iIiB3x")
"""Root, vtable of three fields, and the table: offsets of its vtable and its key, length, operation."""
_STRINGS_TABLE = struct.Struct("<I 3H2x iI I")
"""Root, vtable of one field, the table, and the number of strings in the vector that follows."""


class Drain:
    """Drains any number of connections in one thread, which ends with the last of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._until: dict[InfiniStoreConnection, float] = {}
        self._close_at = float("inf")
        self._thread: Thread | None = None

    def add(self, connection: InfiniStoreConnection) -> None:
        """Read the rest of the reply, then close ``connection``. Does not block."""
        with self._lock:
            if len(self._until) < MAX_CONNECTIONS:
                self._until[connection] = time.monotonic() + TIMEOUT_SECONDS
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="kvtier-drain", daemon=True)
                    self._thread.start()
                return
        connection.hang_up()

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for pending replies, then close all connections. Blocks. Must be last."""
        with self._lock:
            self._close_at = time.monotonic() + seconds
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        while connections := self._pending():
            poll = select.poll()
            for descriptor in connections:
                poll.register(descriptor, select.POLLIN)
            ended = [
                connections[descriptor]
                for descriptor, _ in poll.poll(1000 * POLL_SECONDS)
                if connections[descriptor].discard(scratch)
            ]
            now = time.monotonic()
            with self._lock:
                ended += [
                    connection
                    for connection, until in self._until.items()
                    if now > min(until, self._close_at) and connection not in ended
                ]
                for connection in ended:
                    del self._until[connection]
            for connection in ended:
                connection.hang_up()

    def _pending(self) -> dict[int, InfiniStoreConnection]:
        """Return the connections by descriptor. If empty, the thread must end; ``add`` starts another one."""
        with self._lock:
            if not self._until:
                self._thread = None
            return {connection.fileno(): connection for connection in self._until}


class Answer:
    """Tracks how much of a reply has arrived, to know when the server has nothing left to send.

    ``length`` is in bytes. ``None`` means a value, which begins with its own length. An error reply is only
    a status.
    """

    def __init__(self, length: int | None = None) -> None:
        self.head = b""
        """The first bytes of the reply, at most :data:`HEAD`."""
        self._length = length
        self._received = 0

    def note(self, part: memoryview) -> None:
        """Record that ``part`` has arrived."""
        self.head += part[: HEAD.size - len(self.head)]
        self._received += len(part)

    @property
    def has_head(self) -> bool:
        """Whether the status has arrived, and after a success also the number."""
        return len(self.head) == HEAD.size or (len(self.head) >= _STATUS.size and self.status != FINISHED)

    @property
    def status(self) -> int:
        """The status."""
        status: int = _STATUS.unpack_from(self.head)[0]
        return status

    @property
    def number(self) -> int:
        """The number after the status."""
        number: int = HEAD.unpack(self.head)[1]
        return number

    @property
    def is_complete(self) -> bool:
        """Whether the whole reply has arrived."""
        if self.has_head and self.status != FINISHED:
            return True
        if self._length is not None:
            return self._received >= self._length
        return self.has_head and self._received >= HEAD.size + self.number


class InfiniStoreConnection(Connection):
    """One connection. Calls block, at most until the current deadline, and raise ``OSError``.

    After any exception the connection is out of sync and must be closed. ``close`` passes it to ``drain``
    if the server may still be sending.
    """

    def __init__(self, family: int, drain: Drain | None = None) -> None:
        super().__init__(family)
        self._drain = drain
        self._answer: Answer | None = None

    def exist(self, names: Sequence[bytes]) -> Iterator[bool]:
        """Yield whether each name exists. One round trip per :data:`NAMES_PER_ROUND_TRIP` names."""
        for start in range(0, len(names), NAMES_PER_ROUND_TRIP):
            part = names[start : start + NAMES_PER_ROUND_TRIP]
            self.send([b"".join([_request(_EXISTS, name) for name in part])])
            answers = memoryview(bytearray(HEAD.size * len(part)))
            self._answer = Answer(len(answers))
            self._enable_quick_ack()
            self.take(answers)
            for status, number in HEAD.iter_unpack(answers):
                _check(status)
                yield number == 0

    def matched(self, names: Sequence[bytes]) -> int:
        """Return an upper bound for the number of leading names that exist, in one round trip.

        The server looks for the first missing name with a binary search, which can miss it if an earlier
        value was evicted before later ones.
        """
        return min(self._query(_MATCH, names) + 1, len(names))

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove the values, ignoring missing names.

        The server crashes if a value is partly written: :meth:`put` another value there first.
        """
        if names:
            self._query(_DELETE, names)

    def put(self, name: bytes, value: memoryview | bytes) -> None:
        """Store a value. The name must not be read before this returns."""
        self.send([_request(_PAYLOAD, _payload(name, len(value), _PUT)), value])
        _check(self._status())

    def lacks_room(self, name: bytes, length: int) -> bool:
        """Return whether the server rejects a value for lack of memory, before receiving its bytes.

        If it has room it sends nothing: raises ``TimeoutError``, and the caller must delete the name. Close
        the connection afterwards.
        """
        self.send([_request(_PAYLOAD, _payload(name, length, _PUT))])
        return self._status() == OUT_OF_MEMORY

    def get(self, name: bytes, view: memoryview) -> bool:
        """Fill ``view`` with a value. ``False``: there is no value, or its length differs.

        A long value of another length is not read, and :attr:`in_sync` is then false.
        """
        self.send([_request(_PAYLOAD, _payload(name, 0, _GET))])
        answer = self._read_head(Answer())
        if answer.status == NOT_FOUND:
            return False
        _check(answer.status)
        if answer.number == len(view):
            self.take(view)
            return True
        if 0 <= answer.number <= DRAIN_BYTES:
            self.take(memoryview(bytearray(answer.number)))
        else:
            self.in_sync = False
        return False

    def close(self) -> None:
        """Close the socket, now or once the server has sent the rest of its reply. Does not block."""
        if self._drain is None or self._answer is None or self._answer.is_complete:
            self.hang_up()
        else:
            self._drain.add(self)

    # For Drain, once a pending reply is no longer needed.

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def discard(self, scratch: memoryview) -> bool:
        """Read available data into ``scratch`` without blocking. Return whether the reply is complete."""
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
        """Close the socket immediately."""
        super().close()

    def _query(self, operation: bytes, names: Sequence[bytes]) -> int:
        self.send([_request(operation, _strings(names))])
        answer = self._read_head(Answer(HEAD.size))
        _check(answer.status)
        return answer.number

    def _read_head(self, answer: Answer) -> Answer:
        self._answer = answer
        head = memoryview(bytearray(HEAD.size))
        while not answer.has_head:
            self._enable_quick_ack()
            self._receive_some([head[len(answer.head) :]], 0)
        return answer

    def _status(self) -> int:
        answer = self._answer = Answer(_STATUS.size)
        self.take(memoryview(bytearray(_STATUS.size)))
        return answer.status

    def _receive_some(self, views: Sequence[memoryview], flags: int) -> int:
        received = super()._receive_some(views, flags)
        if self._answer is not None:
            self._answer.note(views[0][:received])
        return received

    def _enable_quick_ack(self) -> None:
        # The server sends the next part of a reply only when this one is acknowledged, which the kernel would
        # delay by 40 ms. The kernel resets the option after a while: tcp(7).
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _check(status: int) -> None:
    """Raise ``ConnectionError`` for the status of an error."""
    if status != FINISHED:
        raise ConnectionError(f"the server replied with status {status}")


def _request(operation: bytes, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, operation[0], len(body)) + body


def _payload(name: bytes, length: int, operation: bytes) -> bytes:
    """Encode ``TCPPayloadRequest {key: string; value_length: int; op: byte}``."""
    return _PAYLOAD_TABLE.pack(16, 10, 16, 4, 8, 12, 12, 12, length, operation[0]) + _string(name)


def _strings(names: Sequence[bytes]) -> bytes:
    """Encode a table with the single field ``keys: [string]``."""
    strings = [_string(name) for name in names]
    offsets, at = [], _LENGTH.size * len(names)
    for index, string in enumerate(strings):
        offsets.append(at - _LENGTH.size * index)  # Relative to the position of the offset itself.
        at += len(string)
    vector = struct.pack(f"<{len(offsets)}I", *offsets)
    return b"".join([_STRINGS_TABLE.pack(12, 6, 8, 4, 8, 4, len(names)), vector, *strings])


def _string(text: bytes) -> bytes:
    """Encode length, text, at least one zero byte, and padding to four bytes."""
    return _LENGTH.pack(len(text)) + text + bytes(4 - len(text) % 4)
