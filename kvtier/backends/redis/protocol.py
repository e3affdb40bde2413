"""What is sent to a Redis server for chunks, and how its replies are read: RESP2, client side.

One value per chunk, and many commands per round trip. Most replies are expected byte for byte
(:mod:`kvtier.concurrency.sockets.connection`); functions of this module parse the others. They block, raise
what the connection raises, and raise :class:`~kvtier.concurrency.sockets.connection.ProtocolViolation` for
malformed replies. Lengths from the wire are never trusted.

A long value is fetched in parts, up to three times as fast as in one GET: GET copies the value into freshly
allocated memory, and for many MiB the page faults cost more than sending the data. Parts of 512 KiB reuse
memory that the server already has. WATCH, and an empty transaction after the last part, verify that all parts
belong to the same value.

RESP: https://redis.io/docs/latest/develop/reference/protocol-spec/
Transactions: https://redis.io/docs/latest/develop/using-commands/transactions/
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.concurrency.sockets.connection import (
    BUFFER_BYTES,
    EXPECT,
    RECEIVE,
    SEND,
    Buffer,
    Connection,
    Operation,
    Progress,
    ProtocolViolation,
)
from kvtier.memory.keys import KEY_BYTES, ChunkKey

DRAIN_BYTES = 1 << 20
"""A value of unexpected length is read and discarded up to this size; above, reconnecting is cheaper."""
LONG_BYTES = 1 << 20
"""Values longer than this are fetched in parts."""
PART_BYTES = 512 << 10
PARTS_AHEAD = 2
"""Parts requested ahead of the first reply. More would exceed the server's CPU caches."""
MAX_DIGITS = 19

AnswerT_co = TypeVar("AnswerT_co", covariant=True)

_CRLF = b"\r\n"
_USUAL_REPLIES: dict[bytes, bytes | int] = {b"+OK": b"OK", b":0": 0, b":1": 1}
"""A fast path: a long prompt gets thousands of these."""
_STORED = b"+OK\r\n"
_STORED_BYTES = BUFFER_BYTES // len(_STORED) * len(_STORED)
"""Bytes of consecutive ``+OK`` replies that one ``EXPECT`` operation covers."""
_COUNT_BYTES = len(b":1\r\n")
_MAX_COUNTS = BUFFER_BYTES // _COUNT_BYTES


class ErrorReply(NamedTuple):
    """An error reply to one command: ``-CODE message``."""

    code: str
    message: str


def read_reply(connection: Connection) -> bytes | int | ErrorReply:
    """Read the next reply, which must be a status, an integer or an error."""
    line = connection.line()
    usual = _USUAL_REPLIES.get(line)
    if usual is not None:
        return usual
    if line.startswith(b"+"):
        return line[1:]
    if line.startswith(b":"):
        return _integer(line[1:])
    return _error_reply(line)


def value_into(connection: Connection, view: memoryview) -> bool | ErrorReply:
    """Fill ``view`` with the next reply. ``False``: there is no value, or its length differs.

    A long value of another length is not read, and the connection is then not ``in_sync``.
    """
    if not connection.buffered and len(view) > BUFFER_BYTES:
        # Read only the length line, so that the value is received into aligned memory.
        connection.fill(len(b"$%d\r\n" % len(view)))
    line = connection.line()
    if not line.startswith(b"$"):
        return _error_reply(line)
    if line == b"$-1":
        return False
    length = _integer(line[1:])
    fits = length == len(view)
    if fits:
        connection.take(view)
    elif length > DRAIN_BYTES:
        connection.in_sync = False
        return False
    else:
        connection.take(memoryview(bytearray(length)))
    take_end(connection)
    return fits


def expect_values(views: Sequence[memoryview]) -> list[Operation]:
    """Return the operations that fill the views with the next replies, of exactly their lengths.

    For long values: native code runs all of it, without buffering lines.
    """
    operations: list[Operation] = []
    end = b""
    for view in views:
        operations += [(EXPECT, [end + b"$%d\r\n" % len(view)]), (RECEIVE, [view])]
        end = _CRLF
    return [*operations, (EXPECT, [end])]


def values_into(
    connection: Connection, views: Sequence[memoryview], progress: Progress
) -> Iterator[bool | ErrorReply]:
    """Yield the result of :func:`value_into` for each view, given the progress of :func:`expect_values`."""
    full, is_within = divmod(progress.operations, 2)
    yield from repeat(True, full if is_within else full - 1)
    if is_within:
        if progress.error is not None:
            raise progress.error
        return
    if full:
        take_end(connection)
        yield True
    for view in views[full:]:
        yield value_into(connection, view)


def encode(*args: bytes) -> bytes:
    """Encode a command."""
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)


_END = encode(b"MULTI") + encode(b"EXEC")
_UNWATCH = encode(b"UNWATCH")


def _integer(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > MAX_DIGITS:
        raise ProtocolViolation("a reply contains an invalid integer")
    return int(digits)


def _error_reply(line: bytes) -> ErrorReply:
    if not line.startswith(b"-"):
        raise ProtocolViolation("the reply is not RESP2")
    text = line[1:].decode(errors="replace")
    return ErrorReply(text.partition(" ")[0], text)


def take_end(connection: Connection) -> None:
    """Read the CRLF after a value. Raises :class:`ProtocolViolation` if it is something else."""
    end = memoryview(bytearray(len(_CRLF)))
    connection.take(end)
    if end != _CRLF:
        raise ProtocolViolation("a value does not end with CRLF")


@dataclass(frozen=True)
class Exchange(Generic[AnswerT_co]):
    """The commands for some items, and how to read the replies."""

    operations: Sequence[Operation]
    expected: Callable[[], list[AnswerT_co] | None]
    """Returns the answers after all operations have succeeded; ``None`` if the replies need parsing."""
    answers: Callable[[Connection, Progress], Iterator[AnswerT_co | ErrorReply]]
    """Reads the answers after any progress: one per item as it arrives, ``ErrorReply`` if it was rejected.

    Blocks, and raises what the connection raises. Ends early once the connection is out of sync
    (:attr:`~kvtier.concurrency.sockets.connection.Connection.in_sync`).
    """


class Commands:
    """Commands on chunks that are named by ``prefix`` and their key, and expire after ``ttl`` seconds.

    ``in_parts``: fetch a single long value in parts (:mod:`kvtier.backends.redis.protocol`).
    """

    def __init__(self, prefix: str, ttl: float | None, *, in_parts: bool = False) -> None:
        self._in_parts = in_parts
        self._prefix = prefix.encode()
        name = b"$%d\r\n" % (len(self._prefix) + 2 * KEY_BYTES) + self._prefix
        self._exists = b"*2\r\n$6\r\nEXISTS\r\n" + name
        self._strlen = b"*2\r\n$6\r\nSTRLEN\r\n" + name
        self._unlink = b"*2\r\n$6\r\nUNLINK\r\n" + name
        self._get = b"*2\r\n$3\r\nGET\r\n" + name
        self._set = b"*%d\r\n$3\r\nSET\r\n" % (3 if ttl is None else 5) + name
        milliseconds = b"%d" % max(1, round((ttl or 0) * 1000))
        expiry = b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)
        self._set_end = b"\r\n" if ttl is None else b"\r\n" + expiry

    def name(self, key: ChunkKey) -> bytes:
        """Return the Redis key for the chunk of ``key``."""
        return self._prefix + key.hex().encode()

    def contains(self, keys: Sequence[ChunkKey]) -> Exchange[bool]:
        """Query whether each key is held."""
        return _integer_replies(_pipeline(self._exists, keys), len(keys), bool)

    def lengths(self, keys: Sequence[ChunkKey]) -> Exchange[int]:
        """Query the length of each value; 0 without one."""
        return _integer_replies(_pipeline(self._strlen, keys), len(keys), int)

    def delete(self, keys: Sequence[ChunkKey]) -> Exchange[bool]:
        """Remove each key. The answer is true whether or not it existed."""
        return _integer_replies(_pipeline(self._unlink, keys), len(keys), lambda count: count >= 0)

    def get(self, items: Sequence[GetItem]) -> Exchange[Outcome]:
        """Fill each view with the value of its key, in parts if there is only one item and it is long."""
        if not self._in_parts or len(items) != 1 or len(items[0][1]) <= LONG_BYTES:
            return self.get_whole(items)
        ((key, view),) = items
        name = self.name(key)

        def answers(connection: Connection, progress: Progress) -> Iterator[Outcome | ErrorReply]:
            answer = outcome_of_parts(connection, view, progress)
            if answer is not None:
                yield answer
                return
            whole = self.get_whole(items)
            yield from whole.answers(connection, connection.exchange(whole.operations))

        return Exchange(operations_for_parts(name, view), lambda: [Outcome.OK], answers)

    def get_whole(self, items: Sequence[GetItem]) -> Exchange[Outcome]:
        """Fill each view with the value of its key, with one command each."""
        request = _pipeline(self._get, [key for key, _ in items])
        views = [view for _, view in items]

        def answers(connection: Connection, progress: Progress) -> Iterator[Outcome | ErrorReply]:
            _raise_if_not_sent(connection, progress)
            for filled in values_into(connection, views, progress.after(1)):
                if isinstance(filled, ErrorReply):
                    yield filled
                else:
                    yield Outcome.OK if filled else Outcome.MISS
                if not connection.in_sync:
                    return

        operations: list[Operation] = [(SEND, [request]), *expect_values(views)]
        return Exchange(operations, lambda: [Outcome.OK] * len(views), answers)

    def put(self, items: Sequence[PutItem]) -> Exchange[Outcome]:
        """Store each view under its key."""
        buffers: list[Buffer] = []
        for key, view in items:
            head = self._set + b"%b\r\n$%d\r\n" % (key.hex().encode(), len(view))
            buffers += (head, view, self._set_end)
        count = len(items)
        stored = _STORED * count
        expected = (stored[start : start + _STORED_BYTES] for start in range(0, len(stored), _STORED_BYTES))

        def answers(connection: Connection, progress: Progress) -> Iterator[Outcome | ErrorReply]:
            _raise_if_not_sent(connection, progress)
            acknowledged = min((progress.operations - 1) * (_STORED_BYTES // len(_STORED)), count)
            for _ in range(acknowledged):
                yield Outcome.OK
            for _ in range(count - acknowledged):
                reply = read_reply(connection)
                if isinstance(reply, ErrorReply):
                    yield reply
                elif reply == b"OK":
                    yield Outcome.OK
                else:
                    raise ProtocolViolation("unexpected reply to SET")

        operations: list[Operation] = [(SEND, buffers), *((EXPECT, [part]) for part in expected)]
        return Exchange(operations, lambda: [Outcome.OK] * count, answers)


def log_in(connection: Connection, user: str | None, password: str | None, database: int) -> None:
    """Authenticate the connection and select the database. Raises :class:`Refused`."""
    if password is not None:
        credentials = [password] if user is None else [user, password]
        try:
            _expect_ok(connection, encode(b"AUTH", *(text.encode() for text in credentials)))
        except Refused as refused:
            # A server that does not know AUTH echoes its arguments: never show its message.
            code = refused.reply.code
            raise Refused(ErrorReply("WRONGPASS" if code == "ERR" else code, code)) from None
    if database:
        _expect_ok(connection, encode(b"SELECT", b"%d" % database))


def send_asking(connection: Connection) -> None:
    """Announce that the next command was redirected by ``-ASK``. Raises :class:`Refused`."""
    _expect_ok(connection, encode(b"ASKING"))


class Refused(ConnectionError):
    """The server rejected a command that the connection depends on; the connection must be closed."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.code)
        self.reply = reply


def _expect_ok(connection: Connection, command: bytes) -> None:
    _raise_if_not_sent(connection, connection.exchange([(SEND, [command])]))
    reply = read_reply(connection)
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    if reply != b"OK":
        raise ProtocolViolation("the reply is not OK")


def _raise_if_not_sent(connection: Connection, progress: Progress) -> None:
    """Raise the error if not even the first operation succeeded, preferably the server's error reply."""
    if progress.operations or progress.error is None:
        return
    try:
        raise progress.error
    except ConnectionError:
        # A server may send an error and close the connection in the middle of a value that it rejects.
        reply: bytes | int | ErrorReply = b""
        try:
            reply = read_reply(connection)
        except ssl.SSLError:  # The server's alert.
            raise
        except OSError:
            pass
        if isinstance(reply, ErrorReply):
            raise Refused(reply) from None
        raise


def _integer_replies(
    request: bytes, commands: int, meaning: Callable[[int], AnswerT_co]
) -> Exchange[AnswerT_co]:
    """Return the exchange for commands with one integer reply each, usually 0 or 1."""
    counts = bytearray(_COUNT_BYTES * min(commands, _MAX_COUNTS))

    def expected() -> list[AnswerT_co] | None:
        digits = counts.replace(b":0\r\n", b"0").replace(b":1\r\n", b"1")
        return [meaning(digit - ord("0")) for digit in digits] if len(digits) == commands else None

    def answers(connection: Connection, progress: Progress) -> Iterator[AnswerT_co | ErrorReply]:
        _raise_if_not_sent(connection, progress)
        received = progress.received if progress.operations == 1 else len(counts)
        if not received and progress.error is not None:
            raise progress.error
        connection.unread(counts[:received])
        for _ in range(commands):
            reply = read_reply(connection)
            yield reply if isinstance(reply, ErrorReply) else meaning(_count(reply))

    return Exchange([(SEND, [request]), (RECEIVE, [memoryview(counts)])], expected, answers)


def _pipeline(head: bytes, keys: Sequence[ChunkKey]) -> bytes:
    return b"".join([b"%b%b\r\n" % (head, key.hex().encode()) for key in keys])


def _count(reply: bytes | int) -> int:
    if not isinstance(reply, int):
        raise ProtocolViolation("the reply is not an integer")
    return reply


def operations_for_parts(name: bytes, view: memoryview) -> list[Operation]:
    """Return the operations that read the value of ``name``, over :data:`LONG_BYTES`, into ``view``."""
    parts = _parts(view)
    requests = [_request(name, index * PART_BYTES, len(part)) for index, part in enumerate(parts)]
    requests[-1] += _END
    operations: list[Operation] = [
        (SEND, [encode(b"WATCH", name), encode(b"STRLEN", name), *requests[:PARTS_AHEAD]])
    ]
    before = b"+OK\r\n:%d\r\n" % len(view)
    for index, part in enumerate(parts):
        operations += [(EXPECT, [before + b"$%d\r\n" % len(part)]), (RECEIVE, [part])]
        operations += [(SEND, [request]) for request in requests[index + PARTS_AHEAD :][:1]]
        before = b"\r\n"
    operations.append((EXPECT, [b"\r\n+OK\r\n*0\r\n"]))
    return operations


def outcome_of_parts(
    connection: Connection, view: memoryview, progress: Progress
) -> Outcome | ErrorReply | None:
    """Return the outcome, given the progress. Blocks, and raises what the connection raises.

    ``None``: fetch the value with GET, because it changed meanwhile or the server does not permit WATCH.
    """
    if progress.error is not None:
        raise progress.error
    parts = _parts(view)
    kinds = [kind for kind, _ in operations_for_parts(b"", view)]
    if progress.operations == len(kinds):
        return Outcome.OK
    return _read_unexpected(connection, parts, kinds[: progress.operations].count(RECEIVE))


def _parts(view: memoryview) -> list[memoryview]:
    return [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]


def _read_unexpected(
    connection: Connection, parts: Sequence[memoryview], full: int
) -> Outcome | ErrorReply | None:
    """Read the unexpected reply after ``full`` complete parts."""
    if not full:
        watched, length = read_reply(connection), read_reply(connection)
        if watched != b"OK" or length != sum(map(len, parts)):
            return _abort(connection, parts[:PARTS_AHEAD], watched, length)
    else:
        take_end(connection)
    # The key was just removed or moved. Close the connection: more replies follow, or the key stays watched.
    connection.in_sync = False
    if full < len(parts):
        filled = value_into(connection, parts[full])
        return filled if isinstance(filled, ErrorReply) else Outcome.MISS
    multi, _ = connection.line(), connection.line()
    connection.in_sync = multi == b"+OK"
    return None


def _abort(
    connection: Connection,
    requested: Sequence[memoryview],
    watched: bytes | int | ErrorReply,
    length: bytes | int | ErrorReply,
) -> Outcome | ErrorReply | None:
    """Read the pending replies and unwatch the key, so that the connection can be reused."""
    for part in requested:
        value_into(connection, part)
    connection.send([_UNWATCH])
    read_reply(connection)
    errors = [reply for reply in (watched, length) if isinstance(reply, ErrorReply)]
    if any(error.code == "NOPERM" for error in errors):
        return None
    return errors[-1] if errors else Outcome.MISS


def _request(name: bytes, start: int, length: int) -> bytes:
    return encode(b"GETRANGE", name, b"%d" % start, b"%d" % (start + length - 1))
