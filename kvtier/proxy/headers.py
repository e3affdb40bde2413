"""Which headers go through: all but those that are between two neighbours alone (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# What is made anew: the body may be another, and what is compressed could not be read.
OF_A_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
OF_AN_ANSWER = HOP_BY_HOP | {b"date"}
IDENTITY = (b"accept-encoding", b"identity")


def to_engine(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The client's headers, for an engine: API keys among them. Names are in small letters."""
    headers = list(headers)
    dropped = OF_A_REQUEST | _named(headers)
    return [*((name, value) for name, value in headers if name not in dropped), IDENTITY]


def to_client(headers: Iterable[tuple[bytes, bytes]], length: int | None = None) -> Headers:
    """An engine's headers, for the client. ``length`` is that of the body, where it is another now."""
    headers = [(name.lower(), value) for name, value in headers]
    dropped = OF_AN_ANSWER | _named(headers)
    if length is not None:
        dropped |= {b"content-length"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    if length is not None:
        kept.append((b"content-length", b"%d" % length))
    return kept


def _named(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """What ``Connection`` says is for the neighbour alone."""
    return frozenset(
        name.strip().lower()
        for header, value in headers
        if header == b"connection"
        for name in value.split(b",")
    )
