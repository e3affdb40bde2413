"""Which server holds a key: a single one, the primary behind sentinels, or the one of its slot in a cluster.

The pool's client library asks the servers. Each question opens a connection, sends one query and closes it,
because they are rare. Errors of the library are wrapped in :class:`ControlFailed`.

Slots: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#key-distribution-model
"""

from __future__ import annotations

import importlib
import ssl
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from anyio import Lock, fail_after, move_on_after
from pydantic import SecretStr

from kvtier.backends.redis.settings import Endpoint, PoolURL, RedisSettings
from kvtier.concurrency.sockets.connection import Deadline

SLOTS = 16384
"""Number of hash slots of a cluster."""
CLOSE_SECONDS = 1.0


class ClientLibrary(NamedTuple):
    """A client library that is compatible with redis-py."""

    product: str
    """The name of the server, for messages."""
    package: str
    """The library's import name, and the extra of kvtier that installs it."""
    client: str
    """The client class in ``package.asyncio``."""
    error: str
    """The base exception in ``package.exceptions``."""


class ControlFailed(Exception):
    """A query failed. ``__cause__`` is the library's exception, or the error in the reply."""

    def __init__(self, endpoint: Endpoint, message: str = "") -> None:
        super().__init__(message or f"{endpoint} does not answer")
        self.endpoint = endpoint


class Control:
    """Queries to the servers of a pool. Importing the library blocks: create it in a thread.

    Raises ``ImportError`` if the library is missing.
    """

    def __init__(self, library: ClientLibrary, settings: RedisSettings) -> None:
        package = importlib.import_module(f"{library.package}.asyncio")
        self._client: Any = getattr(package, library.client)
        self._error: type[Exception] = getattr(
            importlib.import_module(f"{library.package}.exceptions"), library.error
        )
        self._settings = settings
        pool_url = settings.pool_url
        self._database = pool_url.database
        self._tls: dict[str, Any] = _tls_options(settings) if pool_url.tls else {}

    async def info(self, endpoint: Endpoint, seconds: float) -> dict[str, Any]:
        """Return ``INFO``, with numbers as Python numbers."""
        settings = self._settings
        async with self._client_for(
            endpoint, seconds, settings.user, settings.password, self._database
        ) as client:
            answer = await client.info()
            if not isinstance(answer, dict) or "role" not in answer:
                raise ValueError("INFO does not contain a role")
            return answer

    async def slots(self, endpoint: Endpoint, seconds: float) -> list[tuple[range, Endpoint]]:
        """Return the slot ranges and their primaries: ``CLUSTER SLOTS``."""
        settings = self._settings
        async with self._client_for(endpoint, seconds, settings.user, settings.password) as client:
            return [_slot_range(entry, endpoint) for entry in await client.execute_command("CLUSTER SLOTS")]

    async def primary(self, sentinel: Endpoint, service: str, seconds: float) -> Endpoint | None:
        """Ask one sentinel for the primary of ``service``; ``None`` if it does not know the service."""
        settings = self._settings
        async with self._client_for(
            sentinel, seconds, settings.sentinel_user, settings.sentinel_password
        ) as client:
            answer = await client.sentinel_get_master_addr_by_name(service)
            return None if answer is None else _endpoint(answer[0], answer[1], sentinel)

    @asynccontextmanager
    async def _client_for(
        self,
        endpoint: Endpoint,
        seconds: float,
        user: str | None,
        password: SecretStr | None,
        database: int = 0,
    ) -> AsyncIterator[Any]:
        host, port = endpoint
        where = {"unix_socket_path": host} if port is None else {"host": host, "port": port, **self._tls}
        client = self._client(
            **where,
            db=database,
            username=None if password is None else user,
            password=None if password is None else password.get_secret_value(),
            protocol=2,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=None,
        )
        try:
            with fail_after(seconds):
                yield client
        except (self._error, OSError, ValueError, TypeError, IndexError) as error:
            raise ControlFailed(endpoint) from error
        finally:
            # Shielded, because a cancelled query would leave its socket open.
            with move_on_after(CLOSE_SECONDS, shield=True):
                await client.aclose()


def _tls_options(settings: RedisSettings) -> dict[str, Any]:
    files = {
        "ssl_ca_certs": settings.ca_file,
        "ssl_certfile": settings.certificate_file,
        "ssl_keyfile": settings.key_file,
    }
    return {
        "ssl": True,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        **{name: str(path) for name, path in files.items() if path is not None},
    }


def _slot_range(entry: Sequence[Any], asked: Endpoint) -> tuple[range, Endpoint]:
    """Parse ``[first, last, [host, port, ...], replicas ...]``."""
    first, last, primary = int(entry[0]), int(entry[1]), entry[2]
    if not 0 <= first <= last < SLOTS:
        raise ValueError("CLUSTER SLOTS contains a slot out of range")
    return range(first, last + 1), _endpoint(primary[0], primary[1], asked)


def _endpoint(host: Any, port: Any, asked: Endpoint) -> Endpoint:  # noqa: ANN401 - from the wire
    """Parse an address in a reply; one without a host name means the server ``asked``."""
    name = host.decode("ascii") if isinstance(host, bytes) else ""
    return Endpoint(asked.host if name in ("", "?") else name, int(port))


class Placement(NamedTuple):
    """The mapping of keys to servers."""

    endpoints: Sequence[Endpoint]
    """Every server, without duplicates."""
    by_slot: Sequence[Endpoint | None] | None = None
    """The server of each hash slot, or ``None`` for unassigned slots. Not set if one server has all keys."""


class Topology(ABC):
    """Discovers and caches the placement of a pool. For use from the event loop."""

    has_slots = False
    """Whether servers may redirect commands to each other."""

    def __init__(self, pool_url: PoolURL, control: Control) -> None:
        self._pool_url = pool_url
        self._control = control
        self._known: Placement | None = None
        # One batch discovers the placement, and those that wait for the lock use its result.
        self._lock = Lock()

    async def placement(self, deadline: Deadline) -> Placement:
        """Return the placement. Raises :class:`ControlFailed` or ``TimeoutError``."""
        if self._known is not None:
            return self._known  # The lock would cost each batch an event loop iteration.
        async with self._lock:
            if self._known is None:
                self._known = await self._discover(deadline)
            return self._known

    def invalidate(self) -> None:
        """Drop the cached placement; the next batch discovers it again."""
        self._known = None

    async def _discover(self, deadline: Deadline) -> Placement:
        """Ask one server after another, each for its part of the remaining time."""
        candidates = self._candidates()
        failure = ControlFailed(candidates[0])
        for index, endpoint in enumerate(candidates):
            try:
                return await self._ask(endpoint, deadline.remaining() / (len(candidates) - index))
            except ControlFailed as error:
                failure = error
        raise failure

    def _candidates(self) -> Sequence[Endpoint]:
        return self._pool_url.endpoints

    @abstractmethod
    async def _ask(self, endpoint: Endpoint, seconds: float) -> Placement: ...


class Single(Topology):
    """A single server."""

    async def _ask(self, endpoint: Endpoint, seconds: float) -> Placement:
        return Placement([endpoint])


class Sentinel(Topology):
    """The current primary of a service, according to its sentinels."""

    async def _ask(self, endpoint: Endpoint, seconds: float) -> Placement:
        service = self._pool_url.service
        primary = await self._control.primary(endpoint, service, seconds)
        if primary is None:
            raise ControlFailed(endpoint, f"the sentinel at {endpoint} does not monitor {service!r}")
        return Placement([primary])


class Cluster(Topology):
    """Several primaries that share the 16384 hash slots."""

    has_slots = True

    def __init__(self, pool_url: PoolURL, control: Control) -> None:
        super().__init__(pool_url, control)
        self._members: Sequence[Endpoint] = ()

    def _candidates(self) -> Sequence[Endpoint]:
        # Also the last known members: those in the URL may be replaced while the cluster is running.
        return list(dict.fromkeys([*self._pool_url.endpoints, *self._members]))

    async def _ask(self, endpoint: Endpoint, seconds: float) -> Placement:
        ranges = await self._control.slots(endpoint, seconds)
        if not ranges:
            raise ControlFailed(endpoint, f"{endpoint} is not part of a cluster that has hash slots")
        placement = _placement_of(ranges)
        self._members = placement.endpoints
        return placement


def topology_of(pool_url: PoolURL, control: Control) -> Topology:
    """Return the topology for a URL."""
    kinds: dict[str, type[Topology]] = {"single": Single, "sentinel": Sentinel, "cluster": Cluster}
    return kinds[pool_url.kind](pool_url, control)


def slot_of(name: bytes) -> int:
    """Return the hash slot of a key: CRC16 (XMODEM) of the key, or of its hash tag, modulo 16384."""
    start = name.find(b"{")
    stop = name.find(b"}", start + 1) if start >= 0 else -1
    # Empty braces are not a hash tag, even if another pair follows.
    return crc_hqx(name[start + 1 : stop] if stop > start + 1 else name, 0) % SLOTS


def _placement_of(ranges: Sequence[tuple[range, Endpoint]]) -> Placement:
    by_slot: list[Endpoint | None] = [None] * SLOTS
    for slots, endpoint in ranges:
        for slot in slots:
            by_slot[slot] = endpoint
    return Placement(list(dict.fromkeys(endpoint for _, endpoint in ranges)), by_slot)
