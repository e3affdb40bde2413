"""Redis backend: one value per chunk, on a single server, behind sentinels, or in a cluster.

A put goes from here to :class:`~kvtier.backends.redis.pool.Pool`, which finds the server of each key
(:mod:`~kvtier.backends.redis.topology`) and sends it the commands (:mod:`~kvtier.backends.redis.protocol`).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from anyio import to_thread

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck, SupportsTTL
from kvtier.backends.redis.errors import Fault, describe_control_failure, describe_refusal, outcome_of
from kvtier.backends.redis.pool import Access, Batch, Command, Pool
from kvtier.backends.redis.protocol import Commands, ErrorReply
from kvtier.backends.redis.settings import RedisSettings
from kvtier.backends.redis.topology import ClientLibrary, Control, ControlFailed, topology_of
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.errors import TierError
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.units import format_size


class NoServer(ConnectionError):
    """No server answers a lookup. Like :class:`TierError`, it has what was found, and a remedy if known."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"no server answers: {fault}")
        self.found = f"no server answers: {fault.found}"
        self.remedy = fault.remedy


class RedisBackend(Backend, SupportsTTL, SupportsCheck):
    """Chunks as values of a Redis pool, named by ``prefix`` and the key in hexadecimal.

    Worker threads transfer bytes between the socket and the caller's memory, over at most ``connections``
    to each server (:mod:`kvtier.backends.redis.protocol`); the client library queries the topology
    (:mod:`kvtier.backends.redis.topology`). Connects lazily and reconnects after a loss. A batch never takes
    longer than ``deadline``. A server that is full and evicts nothing yields ``FULL``.
    """

    settings_type: ClassVar[type[TierSettings]] = RedisSettings
    in_parts: ClassVar[bool] = True
    """Whether fetching a long value in parts is faster."""
    library: ClassVar[ClientLibrary] = ClientLibrary("Redis", "redis", "Redis", "RedisError")

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        commands = Commands(settings.prefix, settings.ttl, in_parts=self.in_parts)
        self._contains, self._lengths, self._delete = (
            Command[ChunkKey, int | None](
                exchange=exchange,
                name_of=commands.name,
                size_of=lambda _: 0,
                pool_of=lambda node: node.lookups,
                answer_for_error=lambda _: None,
                failed=None,
            )
            for exchange in (commands.contains, commands.lengths, commands.delete)
        )
        self._put, self._get = (
            Command[GetItem, Outcome](
                exchange=exchange,
                name_of=lambda item: commands.name(item[0]),
                size_of=lambda item: len(item[1]),
                pool_of=lambda node: node.chunks,
                answer_for_error=outcome_of,
                failed=Outcome.FAILED,
                exchange_one=exchange_one,
            )
            for exchange, exchange_one in ((commands.put, None), (commands.get, commands.get_whole))
        )

    @property
    def ttl(self) -> float | None:
        """Seconds until the server expires a chunk, or ``None``."""
        return self._settings.ttl

    async def open(self) -> None:
        """Load the client library and the certificates. Does not connect. Raises :class:`TierError`."""
        settings = self._settings
        access, self._control = await to_thread.run_sync(self._prepare)
        self._pool = Pool(settings.name, access, topology_of(settings.pool_url, self._control))

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held, with one round trip to each server.

        Keys on an unresponsive server count as not held. Raises ``ConnectionError`` if no server answers.
        """
        return [bool(held) for held in await self._query(self._contains, keys)]

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return how long each value is, as :meth:`contains` does whether there is one."""
        return [length or 0 for length in await self._query(self._lengths, keys)]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view as a value. ``FULL`` if the server is full and evicts nothing."""
        return await self._pool.execute(Batch(self._put, items, self._settings.deadline))

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each value into its view."""
        return await self._pool.execute(Batch(self._get, items, self._settings.deadline))

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Unlink each value. Raises ``ConnectionError`` if no server answers."""
        await self._query(self._delete, keys)

    async def _query(
        self, command: Command[ChunkKey, int | None], keys: Sequence[ChunkKey]
    ) -> Sequence[int | None]:
        answers = await self._pool.execute(Batch(command, keys, self._settings.deadline))
        if keys and all(answer is None for answer in answers):
            raise NoServer(self._pool.last_fault)
        return answers

    async def check(self) -> str:
        """Query the status of every primary. See :class:`~kvtier.backends.base.SupportsCheck`."""
        control, topology, seconds = self._control, self._pool.topology, self._settings.deadline
        deadline = Deadline(seconds)
        topology.invalidate()
        try:
            placement = await topology.placement(deadline)
            answers = [
                (endpoint, await control.info(endpoint, deadline.remaining()))
                for endpoint in placement.endpoints
            ]
        except ControlFailed as failed:
            raise TierError(*describe_control_failure(failed)) from failed
        except TimeoutError as error:
            raise TierError(f"the pool does not answer within {seconds:g} s") from error
        for endpoint, info in answers:
            if info["role"] != "master":
                raise TierError(*describe_refusal(ErrorReply("READONLY", ""), endpoint))
            if info.get("cluster_enabled") and placement.by_slot is None:
                raise TierError(*describe_refusal(ErrorReply("MOVED", ""), endpoint))
        if placement.by_slot is not None and (unassigned := placement.by_slot.count(None)):
            raise TierError(
                f"{unassigned} of {len(placement.by_slot)} hash slots of the cluster have no server, and "
                "their chunks are misses",
                "check CLUSTER INFO",
            )
        return _summary(self.library.product, [info for _, info in answers])

    def _prepare(self) -> tuple[Access, Control]:
        settings = self._settings
        try:
            control = Control(self.library, settings)
        except ImportError as error:
            package = self.library.package
            raise TierError(
                f"{settings.name}: the {self.library.product} client library is missing",
                f"pip install 'kvtier[{package}]'",
            ) from error
        return (
            Access(
                tls=_tls_context(settings) if settings.pool_url.tls else None,
                user=settings.user,
                password=settings.password.get_secret_value() if settings.password else None,
                database=settings.pool_url.database,
                connections=settings.connections,
            ),
            control,
        )


def _summary(product: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """Summarize ``INFO``. Version and eviction policy are those of the first server."""
    first = answers[0]
    servers = f" in a cluster of {len(answers)} primaries" if len(answers) > 1 else ""
    used = format_size(sum(_number(info, "used_memory") for info in answers))
    limits = [_number(info, "maxmemory") for info in answers]
    policy = first.get("maxmemory_policy", "unknown")
    # For old clients, Valkey also reports the Redis version that it is compatible with.
    version = first.get("valkey_version") or first.get("redis_version", "of unknown version")
    if not all(limits):
        return f"{product} {version}{servers}, {used} used, no maxmemory: memory use is unlimited"
    memory = f"{product} {version}{servers}, {used} of {format_size(sum(limits))} used"
    if policy == "noeviction":
        return f"{memory}, maxmemory-policy noeviction: rejects chunks when full (allkeys-lru evicts)"
    return f"{memory}, maxmemory-policy {policy}"


def _number(info: Mapping[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0


def _tls_context(settings: RedisSettings) -> ssl.SSLContext:
    """Return a context that verifies certificate and host name. Reads files. Raises :class:`TierError`."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise _unreadable(settings, "ca_file", error) from error
    try:
        if settings.certificate_file is not None:
            context.load_cert_chain(settings.certificate_file, settings.key_file)
    except OSError as error:
        raise _unreadable(settings, "certificate_file", error) from error
    return context


def _unreadable(settings: RedisSettings, name: str, error: OSError) -> TierError:
    return TierError(
        f"{settings.name}: `{name}` is {getattr(settings, name)}, which does not contain a usable "
        f"certificate: {error.strerror or error}"
    )
