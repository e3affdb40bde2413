"""Forward all headers except those that are hop-by-hop (RFC 9110, section 7.6.1)."""

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
# The proxy sets these itself: the body may change, and it could not parse a compressed response.
DROPPED_FROM_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
DROPPED_FROM_RESPONSE = HOP_BY_HOP | {b"date"}
IDENTITY = (b"accept-encoding", b"identity")


def to_engine(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers to forward to an engine, API keys included. Names must be lower case."""
    headers = list(headers)
    dropped = DROPPED_FROM_REQUEST | _connection_options(headers)
    return [*((name, value) for name, value in headers if name not in dropped), IDENTITY]


def to_client(headers: Iterable[tuple[bytes, bytes]], length: int | None = None) -> Headers:
    """Return the headers to forward to the client. ``length``: content length of a rewritten body."""
    headers = [(name.lower(), value) for name, value in headers]
    dropped = DROPPED_FROM_RESPONSE | _connection_options(headers)
    if length is not None:
        dropped |= {b"content-length"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    if length is not None:
        kept.append((b"content-length", b"%d" % length))
    return kept


def _connection_options(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the header names that ``Connection`` lists as hop-by-hop."""
    return frozenset(
        name.strip().lower()
        for header, value in headers
        if header == b"connection"
        for name in value.split(b",")
    )
