"""Pipelined Redis commands on chunks: one value per chunk, many commands per round trip."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.redis import resp
from kvtier.backends.redis.parts import LONG_BYTES, operations_for_parts, outcome_of_parts
from kvtier.backends.redis.resp import ErrorReply, encode
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

AnswerT_co = TypeVar("AnswerT_co", covariant=True)

_STORED = b"+OK\r\n"
_STORED_BYTES = BUFFER_BYTES // len(_STORED) * len(_STORED)
"""Bytes of consecutive ``+OK`` replies that one ``EXPECT`` operation covers."""
_COUNT_BYTES = len(b":1\r\n")
_MAX_COUNTS = BUFFER_BYTES // _COUNT_BYTES


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

    ``in_parts``: fetch a single long value in parts (:mod:`kvtier.backends.redis.parts`).
    """

    def __init__(self, prefix: str, ttl: float | None, *, in_parts: bool = False) -> None:
        self._in_parts = in_parts
        self._prefix = prefix.encode()
        name = b"$%d\r\n" % (len(self._prefix) + 2 * KEY_BYTES) + self._prefix
        self._exists = b"*2\r\n$6\r\nEXISTS\r\n" + name
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
            for filled in resp.values_into(connection, views, progress.after(1)):
                if isinstance(filled, ErrorReply):
                    yield filled
                else:
                    yield Outcome.OK if filled else Outcome.MISS
                if not connection.in_sync:
                    return

        operations: list[Operation] = [(SEND, [request]), *resp.expect_values(views)]
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
                reply = resp.reply(connection)
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
    reply = resp.reply(connection)
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
            reply = resp.reply(connection)
        except ssl.SSLError:  # The server's alert.
            raise
        except OSError:
            pass
        if isinstance(reply, ErrorReply):
            raise Refused(reply) from None
        raise


def _integer_replies(request: bytes, commands: int, meaning: Callable[[int], bool]) -> Exchange[bool]:
    """Return the exchange for commands with one integer reply each, usually 0 or 1."""
    counts = bytearray(_COUNT_BYTES * min(commands, _MAX_COUNTS))

    def expected() -> list[bool] | None:
        digits = counts.replace(b":0\r\n", b"0").replace(b":1\r\n", b"1")
        return [meaning(digit - ord("0")) for digit in digits] if len(digits) == commands else None

    def answers(connection: Connection, progress: Progress) -> Iterator[bool | ErrorReply]:
        _raise_if_not_sent(connection, progress)
        received = progress.received if progress.operations == 1 else len(counts)
        if not received and progress.error is not None:
            raise progress.error
        connection.unread(counts[:received])
        for _ in range(commands):
            reply = resp.reply(connection)
            yield reply if isinstance(reply, ErrorReply) else meaning(_count(reply))

    return Exchange([(SEND, [request]), (RECEIVE, [memoryview(counts)])], expected, answers)


def _pipeline(head: bytes, keys: Sequence[ChunkKey]) -> bytes:
    return b"".join([b"%b%b\r\n" % (head, key.hex().encode()) for key in keys])


def _count(reply: bytes | int) -> int:
    if not isinstance(reply, int):
        raise ProtocolViolation("the reply is not an integer")
    return reply
