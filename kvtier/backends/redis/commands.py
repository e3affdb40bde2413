"""What is asked of a Redis: one value per chunk, and many questions with one round trip.

Each of :class:`Commands` sends a run of commands at once over a connection and yields one answer for each
of them as it comes, ``ErrorReply`` where the server refused that one. It stops early where the connection
is not :attr:`~kvtier.sockets.connection.Connection.in_step` any longer, and raises what the connection
raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.redis import resp
from kvtier.backends.redis.parts import LONG_BYTES, get_in_parts
from kvtier.backends.redis.resp import ErrorReply, encode
from kvtier.keys import KEY_BYTES, ChunkKey
from kvtier.sockets.connection import BUFFER_BYTES, Buffer, Connection, ProtocolViolation
from kvtier.sockets.conversation import EXPECT, SEND, Operation, Progress

_STORED = b"+OK\r\n"
_STORED_BYTES = BUFFER_BYTES // len(_STORED) * len(_STORED)
"""Of them, expected at once."""


class Commands:
    """The commands on chunks named by ``prefix`` and their key, which are forgotten after ``ttl`` seconds.

    ``in_parts``: the server is quicker with a long value in parts (:mod:`kvtier.backends.redis.parts`).
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
        """What the chunk of ``key`` is called on the server."""
        return self._prefix + key.hex().encode()

    def contains(self, connection: Connection, keys: Sequence[ChunkKey]) -> Iterator[bool | ErrorReply]:
        """Whether each key is held."""
        _converse(connection, [(SEND, [_run(self._exists, keys)])])
        for _ in keys:
            reply = resp.reply(connection)
            yield reply if isinstance(reply, ErrorReply) else bool(_count(reply))

    def delete(self, connection: Connection, keys: Sequence[ChunkKey]) -> Iterator[bool | ErrorReply]:
        """Remove each key; true where the server did, or did not have it."""
        _converse(connection, [(SEND, [_run(self._unlink, keys)])])
        for _ in keys:
            reply = resp.reply(connection)
            yield reply if isinstance(reply, ErrorReply) else _count(reply) >= 0

    def get(self, connection: Connection, items: Sequence[GetItem]) -> Iterator[Outcome | ErrorReply]:
        """Fill each view with the value of its key: in parts where it is one long view."""
        if self._in_parts and len(items) == 1 and len(items[0][1]) > LONG_BYTES:
            ((key, view),) = items
            answer = get_in_parts(connection, self.name(key), view)
            if answer is not None:
                yield answer
                return
        yield from self.get_whole(connection, items)

    def get_whole(self, connection: Connection, items: Sequence[GetItem]) -> Iterator[Outcome | ErrorReply]:
        """Fill each view with the value of its key, one command each."""
        question = _run(self._get, [key for key, _ in items])
        views = [view for _, view in items]
        if all(len(view) > BUFFER_BYTES for view in views):
            progress = _converse(connection, [(SEND, [question]), *resp.expecting(views)])
            answers = resp.values_into(connection, views, progress.after(1))
        else:
            _converse(connection, [(SEND, [question])])
            answers = (resp.value_into(connection, view) for view in views)
        for filled in answers:
            if isinstance(filled, ErrorReply):
                yield filled
            else:
                yield Outcome.OK if filled else Outcome.MISS
            if not connection.in_step:
                return

    def put(self, connection: Connection, items: Sequence[PutItem]) -> Iterator[Outcome | ErrorReply]:
        """Store each view under its key."""
        buffers: list[Buffer] = []
        for key, view in items:
            head = self._set + b"%b\r\n$%d\r\n" % (key.hex().encode(), len(view))
            buffers += (head, view, self._set_end)
        stored = _STORED * len(items)
        expected = (stored[start : start + _STORED_BYTES] for start in range(0, len(stored), _STORED_BYTES))
        progress = _converse(connection, [(SEND, buffers), *((EXPECT, [part]) for part in expected)])
        acknowledged = (progress.operations - 1) * (_STORED_BYTES // len(_STORED))
        for _ in items[:acknowledged]:
            yield Outcome.OK
        for _ in items[acknowledged:]:
            reply = resp.reply(connection)
            if isinstance(reply, ErrorReply):
                yield reply
            elif reply == b"OK":
                yield Outcome.OK
            else:
                raise ProtocolViolation("the answer to SET is none")


def log_in(connection: Connection, user: str | None, password: str | None, database: int) -> None:
    """Make ``connection`` that of a user, in a database. Raises :class:`Refused`."""
    if password is not None:
        words = [password] if user is None else [user, password]
        try:
            _expect_ok(connection, encode(b"AUTH", *(word.encode() for word in words)))
        except Refused as refused:
            # A server that does not know AUTH repeats its arguments: what it says must not be shown.
            code = refused.reply.code
            raise Refused(ErrorReply("WRONGPASS" if code == "ERR" else code, code)) from None
    if database:
        _expect_ok(connection, encode(b"SELECT", b"%d" % database))


def ask_again(connection: Connection) -> None:
    """Say that the next command was redirected here by ``-ASK``. Raises :class:`Refused`."""
    _expect_ok(connection, encode(b"ASKING"))


class Refused(ConnectionError):
    """The server refused something, and the connection is good for nothing now."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.code)
        self.reply = reply


def _expect_ok(connection: Connection, command: bytes) -> None:
    _converse(connection, [(SEND, [command])])
    reply = resp.reply(connection)
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    if reply != b"OK":
        raise ProtocolViolation("the answer is not OK")


def _converse(connection: Connection, operations: Sequence[Operation]) -> Progress:
    """Say what comes first, which is sent, and go on as far as answers are as expected."""
    progress = connection.exchange(operations)
    if progress.operations or progress.error is None:
        return progress
    try:
        raise progress.error
    except ConnectionError:
        # A server may hang up in the middle of a value that it does not admit, and have said why.
        reply: bytes | int | ErrorReply = b""
        with suppress(OSError):
            reply = resp.reply(connection)
        if isinstance(reply, ErrorReply):
            raise Refused(reply) from None
        raise


def _run(head: bytes, keys: Sequence[ChunkKey]) -> bytes:
    return b"".join([b"%b%b\r\n" % (head, key.hex().encode()) for key in keys])


def _count(reply: bytes | int) -> int:
    if not isinstance(reply, int):
        raise ProtocolViolation("the answer is no number")
    return reply
