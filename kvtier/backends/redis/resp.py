"""RESP2, client side, over a :class:`~kvtier.concurrency.sockets.connection.Connection`.

Lengths from the wire are never trusted. All functions block, raise what the connection raises, and raise
:class:`~kvtier.concurrency.sockets.connection.ProtocolViolation` for malformed replies.

RESP: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from kvtier.concurrency.sockets.connection import (
    BUFFER_BYTES,
    EXPECT,
    RECEIVE,
    Connection,
    Operation,
    Progress,
    ProtocolViolation,
)

DRAIN_BYTES = 1 << 20
"""A value of unexpected length is read and discarded up to this size; above, reconnecting is cheaper."""
MAX_DIGITS = 19

_CRLF = b"\r\n"

_USUAL_REPLIES: dict[bytes, bytes | int] = {b"+OK": b"OK", b":0": 0, b":1": 1}
"""A fast path: a long prompt gets thousands of these."""


class ErrorReply(NamedTuple):
    """An error reply to one command: ``-CODE message``."""

    code: str
    message: str


def reply(connection: Connection) -> bytes | int | ErrorReply:
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
