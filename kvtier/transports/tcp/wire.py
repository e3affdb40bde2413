"""The wire format of the transport ``tcp``. No I/O here.

Little-endian throughout. A request::

    magic u32 | kind u16: 1 to read, 2 to write | number of spans u16
    per span: grant u64 | offset u64 | length u64
    zeros up to a multiple of 64 bytes
    to write: the bytes of all spans, concatenated

The answers are in the order of the requests of a connection::

    magic u32 | kind u16: that of the request | number of spans u16
    per span: u8: 0 if granted, 1 if not
    zeros up to a multiple of 64 bytes
    to read: the bytes of the granted spans, concatenated

The receiver confirms each ``CONFIRMED_BYTES`` of a write, and the rest, so that a connection loss repeats
little: first with the answer, then with marks::

    magic u32 | kind u16: 3 | u16: 0
    zeros up to 64 bytes

A request that exceeds the limits closes the connection. The receiver reads and discards writes that are not
granted, so that the sender needs no round trip before it sends bytes. Padding to multiples of 64 keeps kernel
and arena memory aligned to each other; without it the kernel's copies take up to twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import ProtocolViolation
from kvtier.transports.base import Access, RemoteSpan

MAX_SPANS = 512
MAX_REQUEST_BYTES = 64 << 20
"""Maximum total length of a request's spans."""
MAX_NUMBER = (1 << 64) - 1

CONFIRMED_BYTES = 2 << 20

_ALIGNMENT = 64
_MAGIC = 0x3254564B
_HEAD = struct.Struct("<IHH")
_SPAN = struct.Struct("<QQQ")
_KINDS = {Access.READ: 1, Access.WRITE: 2}
_ACCESSES = {kind: access for access, kind in _KINDS.items()}
_OUTCOMES = (Outcome.OK, Outcome.MISS)

MARK = _HEAD.pack(_MAGIC, 3, 0).ljust(_ALIGNMENT, b"\0")
"""Confirms a further ``CONFIRMED_BYTES``, or the rest, of a write."""


class Request(NamedTuple):
    """A request of a peer to read or write spans."""

    access: Access
    spans: list[RemoteSpan]


def is_encodable(span: RemoteSpan) -> bool:
    """Return whether the span's numbers fit into a request. A span whose numbers do not is never granted."""
    return all(0 <= number <= MAX_NUMBER for number in span)


def encode_request(access: Access, spans: Sequence[RemoteSpan]) -> bytes:
    """Return a request, without the bytes to write."""
    head = _HEAD.pack(_MAGIC, _KINDS[access], len(spans))
    return (head + b"".join([_SPAN.pack(*span) for span in spans])).ljust(request_bytes(len(spans)), b"\0")


def encode_answer(access: Access, granted: Sequence[bool]) -> bytes:
    """Return an answer, without the bytes that were read."""
    head = _HEAD.pack(_MAGIC, _KINDS[access], len(granted)) + bytes(not is_granted for is_granted in granted)
    return head.ljust(answer_bytes(len(granted)), b"\0")


def request_bytes(count: int) -> int:
    """Return the length of a request for ``count`` spans, without the bytes to write."""
    return -(-(_HEAD.size + count * _SPAN.size) // _ALIGNMENT) * _ALIGNMENT


def answer_bytes(count: int) -> int:
    """Return the length of an answer for ``count`` spans, without the bytes that were read."""
    return -(-(_HEAD.size + count) // _ALIGNMENT) * _ALIGNMENT


def decode_answer(data: bytes | bytearray, access: Access, count: int) -> list[Outcome]:
    """Return the outcome of each span. Raises :class:`ProtocolViolation` if ``data`` does not match."""
    if _HEAD.unpack_from(data) != (_MAGIC, _KINDS[access], count):
        raise ProtocolViolation("the answer does not match the request")
    try:
        return [_OUTCOMES[outcome] for outcome in data[_HEAD.size : _HEAD.size + count]]
    except IndexError:
        raise ProtocolViolation("the answer has an unknown outcome") from None


class RequestReader:
    """A parser of a peer's byte stream into requests and the bytes to write."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    @property
    def buffered(self) -> int:
        """The number of bytes that were fed and not taken yet."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        del self._buffer[: self._at]
        self._at = 0
        self._buffer += data

    def next(self) -> Request | None:
        """Return the next request, or ``None`` if it is incomplete. Raises :class:`ProtocolViolation`.

        A write request is followed by its bytes: :meth:`take` them before the next call.
        """
        if self.buffered < _HEAD.size:
            return None
        magic, kind, count = _HEAD.unpack_from(self._buffer, self._at)
        if magic != _MAGIC or kind not in _ACCESSES:
            raise ProtocolViolation("not a request of the tcp transport")
        if not 0 < count <= MAX_SPANS:
            raise ProtocolViolation(f"a request of {count} spans")
        if self.buffered < request_bytes(count):
            return None
        start = self._at + _HEAD.size
        packed = bytes(self._buffer[start : start + count * _SPAN.size])
        spans = list(map(RemoteSpan._make, _SPAN.iter_unpack(packed)))
        requested = sum(span.length for span in spans)
        if requested > MAX_REQUEST_BYTES:
            raise ProtocolViolation(f"a request for {requested} bytes")
        self._at += request_bytes(count)
        return Request(_ACCESSES[kind], spans)

    def take(self, limit: int) -> bytes:
        """Remove and return up to ``limit`` buffered bytes."""
        taken = bytes(self._buffer[self._at : self._at + limit])
        self._at += len(taken)
        return taken
