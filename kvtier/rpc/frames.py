"""Messages as frames on a byte stream.

A frame is a length (u32, little-endian) and that many bytes of MessagePack: one tagged array. A frame over
:data:`MAX_FRAME_BYTES` is rejected before it is read. A body is decoded into the types of one protocol, and
nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from kvtier.errors import ProtocolError

MAX_FRAME_BYTES = 4 << 20
LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that is sent in a frame of its own. Tags 1 to 9 are those of this package."""


class Request(Message, frozen=True, array_like=True):
    """Base of messages that are answered with a :class:`Reply` that has the same ticket."""

    ticket: int


class Reply(Message, frozen=True, array_like=True):
    """Base of the answers to a :class:`Request`."""

    ticket: int


class Interim(Reply, frozen=True, array_like=True):
    """Base of replies that are followed by another reply with the same ticket."""


class Refused(Message, frozen=True, array_like=True, tag=3):
    """Rejection of this connection, with the reason. Nothing but the end of the connection follows."""

    reason: str


class Ping(Request, frozen=True, array_like=True, tag=4):
    """Liveness probe. Each side answers it at once."""


class Pong(Reply, frozen=True, array_like=True, tag=5):
    """Answer to :class:`Ping`."""


def encode_body(message: Message) -> bytes:
    """Encode a message without its length. Raises :class:`ProtocolError` if it is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return body


def encode(message: Message) -> bytes:
    """Encode a message with its length. Raises :class:`ProtocolError` if it is too long."""
    body = encode_body(message)
    return LENGTH.pack(len(body)) + body


def decoder(messages: Any, what: str) -> Callable[[bytes], Any]:  # noqa: ANN401 - a union has no type of its own
    """Return a function that decodes a body into one of ``messages``.

    It raises :class:`ProtocolError`, which names ``what`` was expected.
    """
    decode = msgspec.msgpack.Decoder(messages).decode

    def checked(body: bytes) -> Any:  # noqa: ANN401 - one of ``messages``
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not {what}: {error}") from error

    return checked


class FrameReader:
    """Splits a byte stream into frames. Buffers at most one frame beyond the data fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received data, and return the bodies of the frames that are complete now.

        Raises :class:`ProtocolError`.
        """
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                buffer.clear()
                raise ProtocolError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
            stop = start + LENGTH.size + length
            if len(buffer) < stop:
                break
            bodies.append(bytes(buffer[start + LENGTH.size : stop]))
            start = stop
        del buffer[:start]
        return bodies


def _checked_length(head: bytes, limit: int) -> int:
    (length,) = LENGTH.unpack(head)
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over {limit}")
    return int(length)


def read_frame(read: Callable[[int], bytes], limit: int) -> bytes:
    """Read one frame's body with ``read``, which blocks and returns exactly that many bytes.

    Nothing beyond the frame is read. Raises :class:`ProtocolError` if it is longer than ``limit`` bytes.
    """
    return read(_checked_length(read(LENGTH.size), limit))


async def receive_frame(receive: Callable[[int], Awaitable[bytes]], limit: int) -> bytes:
    """Like :func:`read_frame`, in an event loop."""
    return await receive(_checked_length(await receive(LENGTH.size), limit))


class Versioned(Protocol):
    """The first message of each side: ``Hello`` of the client, ``Welcome`` of the server.

    The version of the protocol is its first field, and nothing but :class:`Refused` is sent before it.
    """

    @property
    def version(self) -> int:
        """The protocol version."""


VersionedT = TypeVar("VersionedT", bound=Versioned)


def check_hello(message: object, expected: type[VersionedT], version: int) -> VersionedT:
    """Return the client's first message if it is ``expected``. Raises :class:`ProtocolError`."""
    hello = _expect(message, expected)
    if hello.version != version:
        raise ProtocolError(describe_mismatch(hello.version, version))
    return hello


def check_welcome(message: object, expected: type[VersionedT], version: int) -> VersionedT:
    """Return the server's first message if it is ``expected``. Raises :class:`ProtocolError`."""
    welcome = _expect(message, expected)
    if welcome.version != version:
        raise ProtocolError(describe_mismatch(version, welcome.version))
    return welcome


def _expect(message: object, expected: type[VersionedT]) -> VersionedT:
    if not isinstance(message, expected):
        raise ProtocolError(f"the first message is {type(message).__name__}, not {expected.__name__}")
    return message


def describe_mismatch(client: int, server: int) -> str:
    """Return the error text for two protocol versions that differ.

    It is logged where it is found, and sent to the other side: so it names the sides by their role.
    """
    return (
        f"the client speaks protocol version {client} and the server version {server}: "
        "install the same kvtier on both, and restart both"
    )
