"""Any bytes, cut anywhere, through the frame reader and both decoders."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvtier.rpc", "kvtier.peers"]):
    from kvtier.errors import ProtocolError
    from kvtier.peers.protocol import (
        Await,
        Contains,
        Granted,
        Hello,
        Lookup,
        Readable,
        Release,
        Welcome,
        decode_from_client,
        decode_from_server,
    )
    from kvtier.rpc.frames import MAX_FRAME_BYTES, FrameReader, Ping, Refused, encode

EXAMPLES = [
    Hello(1, "here", "control"),
    Lookup(1, bytes(64), True),
    Await(2, 1 << 62, [0, 1]),
    Release(3, 1 << 62, [0, 1]),
    Contains(4, bytes(32)),
    Ping(5),
    Welcome(1, "there", "tcp", b"endpoint", 10.0),
    Refused("because"),
    Granted(1, 1 << 62, [0, 1], [0, 4096], [4096, 4096], 2),
    Readable(2, [True, False]),
]


def read(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """All frames of a stream, and whether it is refused after them."""
    reader = FrameReader()
    bodies: list[bytes] = []
    for piece in pieces:
        try:
            bodies += reader.feed(piece)
        except ProtocolError:
            return bodies, True
        assert len(reader._buffer) < 4 + MAX_FRAME_BYTES
    return bodies, False


def _piece(provider: atheris.FuzzedDataProvider) -> bytes:
    """Anything, or a frame of anything, or a message with some of its bytes changed."""
    kind = provider.ConsumeIntInRange(0, 2)
    raw: bytes = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 80))
    if kind == 0:
        return raw
    if kind == 1:
        return len(raw).to_bytes(4, "little") + raw
    frame = bytearray(encode(EXAMPLES[provider.ConsumeIntInRange(0, len(EXAMPLES) - 1)]))
    for byte in raw[:4]:
        frame[byte % len(frame)] ^= 1 << (byte >> 5)
    return bytes(frame)


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    cuts = [provider.ConsumeIntInRange(1, 64) for _ in range(4)]
    left = stream = b"".join(_piece(provider) for _ in range(provider.ConsumeIntInRange(0, 8)))
    pieces = []
    while left:
        length = cuts[len(pieces) % len(cuts)]
        pieces.append(left[:length])
        left = left[length:]
    bodies, refused = read(pieces)
    whole, refused_whole = read([stream])
    assert refused == refused_whole
    # What is refused in one piece with frames before it is lost with them: the connection ends there.
    assert whole == bodies or refused
    for body in [*bodies, stream]:
        for decode in (decode_from_client, decode_from_server):
            try:
                message = decode(body)
            except ProtocolError:
                continue
            # A decoded message encodes to an equal one.
            (again,) = FrameReader().feed(encode(message))
            assert decode(again) == message


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
