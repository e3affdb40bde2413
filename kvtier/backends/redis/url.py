"""Parse pool URLs: a single server, sentinels or a cluster."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

DEFAULT_PORT, DEFAULT_SENTINEL_PORT = 6379, 26379
MAX_DATABASES = 1 << 16

_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,5}))?")


class Endpoint(NamedTuple):
    """The address of a server: host and port, or the path of a Unix socket and no port."""

    host: str
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PoolURL(NamedTuple):
    """A parsed URL, without credentials."""

    kind: Literal["single", "sentinel", "cluster"]
    tls: bool
    endpoints: tuple[Endpoint, ...]
    """The server, the sentinels, or the seed nodes of the cluster."""
    service: str = ""
    """The service name at the sentinels."""
    database: int = 0


class Credentials(NamedTuple):
    """User and password of a URL; ``None`` if absent."""

    user: str | None
    password: str | None


def take_credentials(url: str) -> tuple[str, Credentials]:
    """Split a URL into the URL without credentials, and the credentials."""
    scheme, separator, rest = url.partition("://")
    slash = rest.find("/")
    authority, path = (rest, "") if slash < 0 else (rest[:slash], rest[slash:])
    userinfo, at, hosts = authority.rpartition("@")
    if not separator or not at:
        return url, Credentials(None, None)
    user, colon, password = userinfo.partition(":")
    credentials = Credentials(unquote(user) or None, unquote(password) if colon else None)
    return f"{scheme}://{hosts}{path}", credentials


def parse_url(url: str, scheme: str) -> PoolURL:
    """Parse a URL whose scheme is ``scheme``, ``scheme`` with an ``s`` for TLS, or ``unix``.

    Raises ``ValueError``. The message quotes no part of the URL, which may contain a secret by mistake.
    """
    full_scheme, separator, rest = url.partition("://")
    address, _, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    if "@" in authority:
        raise ValueError("it contains a user or password that is also set in `user` or `password`: use one")
    if separator and full_scheme == "unix":
        return _unix(authority, slash + path, query)
    transport, _, kind = full_scheme.partition("+")
    if not separator or transport not in (scheme, scheme + "s") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(f"use {scheme}://HOST:PORT, or one of the other forms: {forms(scheme)}")
    if query:
        raise ValueError("only a unix:// URL may contain `?`: every other option is a setting")
    tls = transport == scheme + "s"
    if kind == "sentinel":
        service, _, database = path.partition("/")
        if not service:
            raise ValueError("add the service name, such as /mymaster, after the addresses of the sentinels")
        endpoints = _endpoints(authority, DEFAULT_SENTINEL_PORT)
        return PoolURL("sentinel", tls, endpoints, unquote(service), _database(database))
    endpoints = _endpoints(authority, DEFAULT_PORT)
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has only database 0: omit the path")
        return PoolURL("cluster", tls, endpoints)
    if len(endpoints) > 1:
        raise ValueError(f"it lists several servers: use {scheme}+sentinel:// or {scheme}+cluster://")
    return PoolURL("single", tls, endpoints, database=_database(path))


def forms(scheme: str) -> str:
    """Return the URL forms other than the plain one, for messages and documentation."""
    return (
        f"{scheme}s:// for TLS, unix:///PATH?db=0, {scheme}+sentinel://HOST:PORT,HOST:PORT/SERVICE/0, "
        f"{scheme}+cluster://HOST:PORT,HOST:PORT"
    )


def _unix(authority: str, path: str, query: str) -> PoolURL:
    options = dict(parse_qsl(query, keep_blank_values=True))
    database = options.pop("db", "")
    if authority or len(path) < 2:
        raise ValueError("a unix:// URL requires the absolute path of a socket: use unix:///run/redis.sock")
    if options:
        raise ValueError("the only option of a unix:// URL is `?db=0`")
    return PoolURL("single", False, (Endpoint(unquote(path), None),), database=_database(database))


def _database(text: str) -> int:
    if not text.rstrip("/"):
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 5 or int(text) >= MAX_DATABASES:
        raise ValueError("its database is not a valid number: use /0, or omit it")
    return int(text)


def _endpoints(authority: str, default_port: int) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(part, default_port) for part in authority.split(","))


def _endpoint(text: str, default_port: int) -> Endpoint:
    match = _ENDPOINT.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError("an address in it is not HOST:PORT")
    return Endpoint(match["bracketed"] or match["host"], port)
