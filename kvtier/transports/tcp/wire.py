"""What travels over a connection of the transport ``tcp``. No input or output here.

Little-endian throughout. A request::

    magic u32 | kind u16: 1 to read, 2 to write | number of spans u16
    per span: grant u64 | offset u64 | length u64
    zeros up to a multiple of 64 bytes
    to write: the bytes of all spans, one after the other

Its answer, in the order of the requests of that connection::

    magic u32 | kind u16: that of the request | number of spans u16
    per span: u8: 0 where it is granted, 1 where it is not
    zeros up to a multiple of 64 bytes
    to read: the bytes of the spans that are granted, one after the other

What is written is confirmed for each ``CONFIRMED_BYTES`` that have arrived, and for the last, so that a cut
undoes little: first by the answer, then by marks::

    magic u32 | kind u16: 3 | u16: 0
    zeros up to 64 bytes

A request that is out of bounds ends the connection. What is to be written and is not granted is read and
dropped, so that no round trip is needed before bytes are sent. Multiples of 64 keep the memory of kernel and
arena aligned to each other: else the kernel takes up to twice as long over its copies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.sockets.connection import ProtocolViolation
from kvtier.transports.base import Access, RemoteSpan

MAX_SPANS = 512
MAX_REQUEST_BYTES = 64 << 20
"""What the spans of a request may have together."""
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
"""As much again has arrived."""


class Request(NamedTuple):
    """Spans that a peer asks for, or wants to write."""

    access: Access
    spans: list[RemoteSpan]


def can_be_asked(span: RemoteSpan) -> bool:
    """Whether its numbers fit; nobody grants those that do not."""
    return all(0 <= number <= MAX_NUMBER for number in span)


def encode_request(access: Access, spans: Sequence[RemoteSpan]) -> bytes:
    """Without the bytes that are to be written."""
    head = _HEAD.pack(_MAGIC, _KINDS[access], len(spans))
    return (head + b"".join([_SPAN.pack(*span) for span in spans])).ljust(request_bytes(len(spans)), b"\0")


def encode_answer(access: Access, granted: Sequence[bool]) -> bytes:
    """Without the bytes that were read."""
    head = _HEAD.pack(_MAGIC, _KINDS[access], len(granted)) + bytes(not one for one in granted)
    return head.ljust(answer_bytes(len(granted)), b"\0")


def request_bytes(count: int) -> int:
    """How long a request of ``count`` spans is before the bytes that are to be written."""
    return -(-(_HEAD.size + count * _SPAN.size) // _ALIGNMENT) * _ALIGNMENT


def answer_bytes(count: int) -> int:
    """How long the answer to a request of ``count`` spans is before the bytes that were read."""
    return -(-(_HEAD.size + count) // _ALIGNMENT) * _ALIGNMENT


def decode_answer(data: bytes | bytearray, access: Access, count: int) -> list[Outcome]:
    """What became of each span. Raises :class:`ProtocolViolation` where it answers another request."""
    if _HEAD.unpack_from(data) != (_MAGIC, _KINDS[access], count):
        raise ProtocolViolation("the answer is to another request")
    try:
        return [_OUTCOMES[outcome] for outcome in data[_HEAD.size : _HEAD.size + count]]
    except IndexError:
        raise ProtocolViolation("the answer has an outcome that there is not") from None


class RequestReader:
    """Cuts what a peer sends into requests, and the bytes that it wants to write."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    @property
    def held(self) -> int:
        """How many bytes were fed and not yet taken."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        del self._buffer[: self._at]
        self._at = 0
        self._buffer += data

    def next(self) -> Request | None:
        """The next request, or ``None`` until more is fed. Raises :class:`ProtocolViolation`.

        After a request to write come its bytes: :meth:`take` them before the next.
        """
        if self.held < _HEAD.size:
            return None
        magic, kind, count = _HEAD.unpack_from(self._buffer, self._at)
        if magic != _MAGIC or kind not in _ACCESSES:
            raise ProtocolViolation("that is no request")
        if not 0 < count <= MAX_SPANS:
            raise ProtocolViolation(f"a request of {count} spans")
        if self.held < request_bytes(count):
            return None
        start = self._at + _HEAD.size
        listed = bytes(self._buffer[start : start + count * _SPAN.size])
        spans = list(map(RemoteSpan._make, _SPAN.iter_unpack(listed)))
        wanted = sum(span.length for span in spans)
        if wanted > MAX_REQUEST_BYTES:
            raise ProtocolViolation(f"a request for {wanted} bytes")
        self._at += request_bytes(count)
        return Request(_ACCESSES[kind], spans)

    def take(self, most: int) -> bytes:
        """Up to so many bytes of what was fed."""
        taken = bytes(self._buffer[self._at : self._at + most])
        self._at += len(taken)
        return taken
