"""RESP2, as a client speaks it over a :class:`~kvtier.sockets.connection.Connection`.

Nothing from the wire is trusted for a length. All functions block, raise what the connection raises, and
:class:`~kvtier.sockets.connection.ProtocolViolation` for garbage.

RESP: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from kvtier.sockets.connection import BUFFER_BYTES, Connection, ProtocolViolation
from kvtier.sockets.conversation import EXPECT, RECEIVE, Operation, Progress

DRAIN_BYTES = 1 << 20
"""A value of an unexpected length is read and dropped up to here; beyond, a new connection is cheaper."""
LENGTH_DIGITS = 19

_CRLF = b"\r\n"

_USUAL_REPLIES: dict[bytes, bytes | int] = {b"+OK": b"OK", b":0": 0, b":1": 1}
"""Thousands of these are read for a long prompt."""


class ErrorReply(NamedTuple):
    """The server's refusal of one command: ``-CODE message``."""

    code: str
    message: str


def reply(connection: Connection) -> bytes | int | ErrorReply:
    """The next reply, which must be a status, a number or an error."""
    line = connection.line()
    usual = _USUAL_REPLIES.get(line)
    if usual is not None:
        return usual
    if line.startswith(b"+"):
        return line[1:]
    if line.startswith(b":"):
        return _number(line[1:])
    return _refusal(line)


def value_into(connection: Connection, view: memoryview) -> bool | ErrorReply:
    """Fill ``view`` with the next reply. ``False``: there is no value, or one of another length.

    A long one of another length is left unread, and the connection is then not ``in_step``.
    """
    if not connection.buffered and len(view) > BUFFER_BYTES:
        # No byte of the value, if it is the one, so that the rest lands where memory is aligned.
        connection.fill(len(b"$%d\r\n" % len(view)))
    line = connection.line()
    if not line.startswith(b"$"):
        return _refusal(line)
    if line == b"$-1":
        return False
    length = _number(line[1:])
    fits = length == len(view)
    if fits:
        connection.take(view)
    elif length > DRAIN_BYTES:
        connection.in_step = False
        return False
    else:
        connection.take(memoryview(bytearray(length)))
    take_end(connection)
    return fits


def expecting(views: Sequence[memoryview]) -> list[Operation]:
    """Those of a conversation in which the next replies are values of those lengths, which fill the views.

    For long values: no line is read into a buffer, and native code does it all.
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
    """What :func:`value_into` says of each view, once :func:`expecting` them has come so far."""
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


def encode(*words: bytes) -> bytes:
    """A command as it travels."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > LENGTH_DIGITS:
        raise ProtocolViolation("a number in a reply is none")
    return int(digits)


def _refusal(line: bytes) -> ErrorReply:
    if not line.startswith(b"-"):
        raise ProtocolViolation("the answer is no RESP2")
    text = line[1:].decode(errors="replace")
    return ErrorReply(text.partition(" ")[0], text)


def take_end(connection: Connection) -> None:
    """Take what comes after a value. Raises :class:`ProtocolViolation` where it is something else."""
    end = memoryview(bytearray(len(_CRLF)))
    connection.take(end)
    if end != _CRLF:
        raise ProtocolViolation("a value does not end where it should")
