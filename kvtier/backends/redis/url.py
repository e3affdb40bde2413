"""Where a pool is, as its users write it: one server, sentinels or a cluster, in one URL."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

DEFAULT_PORT, DEFAULT_SENTINEL_PORT = 6379, 26379
MOST_DATABASES = 1 << 16

_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,5}))?")


class Endpoint(NamedTuple):
    """One server: a host and a port, or the path of a Unix socket and no port."""

    host: str
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PoolURL(NamedTuple):
    """What a URL says, without its secrets."""

    kind: Literal["single", "sentinel", "cluster"]
    tls: bool
    endpoints: tuple[Endpoint, ...]
    """The server, the sentinels, or those servers of the cluster that are asked for the others."""
    service: str = ""
    """What the sentinels call it."""
    database: int = 0


class Credentials(NamedTuple):
    """User and password as they stood in a URL; ``None`` where there was none."""

    user: str | None
    password: str | None


def take_credentials(url: str) -> tuple[str, Credentials]:
    """The URL without user and password, and these."""
    scheme, mark, rest = url.partition("://")
    slash = rest.find("/")
    authority, path = (rest, "") if slash < 0 else (rest[:slash], rest[slash:])
    written, at, hosts = authority.rpartition("@")
    if not mark or not at:
        return url, Credentials(None, None)
    user, colon, password = written.partition(":")
    credentials = Credentials(unquote(user) or None, unquote(password) if colon else None)
    return f"{scheme}://{hosts}{path}", credentials


def parse_url(url: str, scheme: str) -> PoolURL:
    """What ``url`` says, whose scheme is ``scheme``, that with an ``s`` for TLS, or ``unix``.

    Raises ``ValueError`` with words that repeat nothing of the URL, which may hold a secret by mistake.
    """
    written, mark, rest = url.partition("://")
    place, _, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    if "@" in authority:
        raise ValueError("it holds a user or a password that `user` or `password` gives as well: write one")
    if mark and written == "unix":
        return _unix(authority, slash + path, query)
    transport, _, kind = written.partition("+")
    if not mark or transport not in (scheme, scheme + "s") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(f"write {scheme}://HOST:PORT, or one of its other forms: {forms(scheme)}")
    if query:
        raise ValueError("only a unix:// URL has something after `?`: every other option is a setting")
    tls = transport == scheme + "s"
    if kind == "sentinel":
        service, _, database = path.partition("/")
        if not service:
            raise ValueError("name the service of the sentinels, such as /mymaster, after their addresses")
        endpoints = _endpoints(authority, DEFAULT_SENTINEL_PORT)
        return PoolURL("sentinel", tls, endpoints, unquote(service), _database(database))
    endpoints = _endpoints(authority, DEFAULT_PORT)
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has the database 0 alone: leave the path out")
        return PoolURL("cluster", tls, endpoints)
    if len(endpoints) > 1:
        raise ValueError(
            f"it names several servers: write {scheme}+sentinel:// or {scheme}+cluster://, if they are that"
        )
    return PoolURL("single", tls, endpoints, database=_database(path))


def forms(scheme: str) -> str:
    """The forms of a URL besides the plain one, for messages and documentation."""
    return (
        f"{scheme}s:// for TLS, unix:///PATH?db=0, {scheme}+sentinel://HOST:PORT,HOST:PORT/SERVICE/0, "
        f"{scheme}+cluster://HOST:PORT,HOST:PORT"
    )


def _unix(authority: str, path: str, query: str) -> PoolURL:
    options = dict(parse_qsl(query, keep_blank_values=True))
    database = options.pop("db", "")
    if authority or len(path) < 2:
        raise ValueError("a unix:// URL has the whole path of a socket: write unix:///run/redis.sock")
    if options:
        raise ValueError("a unix:// URL has no other option than `?db=0`")
    return PoolURL("single", False, (Endpoint(unquote(path), None),), database=_database(database))


def _database(text: str) -> int:
    if not text.rstrip("/"):
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 5 or int(text) >= MOST_DATABASES:
        raise ValueError("its database is no number: write /0, or leave it out")
    return int(text)


def _endpoints(authority: str, default_port: int) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(part, default_port) for part in authority.split(","))


def _endpoint(text: str, default_port: int) -> Endpoint:
    match = _ENDPOINT.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError("an address in it is not HOST:PORT")
    return Endpoint(match["bracketed"] or match["host"], port)
