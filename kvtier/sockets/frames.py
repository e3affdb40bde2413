"""Messages on a byte stream.

A frame is a length (u32, little-endian) and that many bytes of MessagePack: one tagged array. A frame over
:data:`MAX_FRAME_BYTES` is refused before it is read, and a body is decoded into the types of one protocol,
nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from kvtier.errors import ProtocolError

MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that travels in a frame of its own."""


def encode_body(message: Message) -> bytes:
    """One frame without its length. Raises :class:`ProtocolError` where it is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return body


def encode(message: Message) -> bytes:
    """One frame, length included. Raises :class:`ProtocolError` where it is too long."""
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


def decoder(messages: Any, what: str) -> Callable[[bytes], Any]:  # noqa: ANN401 - a union has no type of its own
    """What turns a frame's body into one of ``messages``; it raises :class:`ProtocolError` for all else."""
    decode = msgspec.msgpack.Decoder(messages).decode

    def checked(body: bytes) -> Any:  # noqa: ANN401 - one of ``messages``
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not {what}: {error}") from error

    return checked


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame beyond what was fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read; the bodies of all frames that are now whole. Raises :class:`ProtocolError`."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
            stop = start + _LENGTH.size + length
            if len(buffer) < stop:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : stop]))
            start = stop
        del buffer[:start]
        return bodies
