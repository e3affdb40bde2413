"""A Redis, a primary that sentinels know, or a cluster: one value per chunk, under its key."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import ClassVar

from anyio import to_thread

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck, SupportsTTL
from kvtier.backends.redis.batch import Batch, Operation, Pool
from kvtier.backends.redis.check import check
from kvtier.backends.redis.commands import Commands
from kvtier.backends.redis.control import ClientLibrary, Control
from kvtier.backends.redis.errors import outcome_of
from kvtier.backends.redis.nodes import Access, Nodes
from kvtier.backends.redis.settings import RedisSettings
from kvtier.backends.redis.topology import topology_of
from kvtier.errors import TierError
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings


class RedisBackend(Backend, SupportsTTL, SupportsCheck):
    """Chunks as values of a Redis pool, named by ``prefix`` and the key in hexadecimal.

    Bytes move in threads between socket and caller's memory, over at most ``connections`` to each
    server (:mod:`kvtier.backends.redis.resp`); what the pool is made of is asked through its client library
    (:mod:`kvtier.backends.redis.control`). Connects when first asked, and again whenever a connection is
    lost. A batch lasts ``deadline`` at most, whatever the servers do. A server that is full and evicts
    nothing is ``FULL``.
    """

    settings_type: ClassVar[type[TierSettings]] = RedisSettings
    in_parts: ClassVar[bool] = True
    """Whether the server is quicker with a long value in parts."""
    library: ClassVar[ClientLibrary] = ClientLibrary("Redis", "redis", "Redis", "RedisError")

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        commands = Commands(settings.prefix, settings.ttl, in_parts=self.in_parts)
        self._contains, self._delete = (
            Operation[ChunkKey, bool | None](
                exchange=exchange,
                name_of=commands.name,
                size_of=lambda _: 0,
                lane_of=lambda node: node.questions,
                answer_to=lambda _: None,
                failed=None,
            )
            for exchange in (commands.contains, commands.delete)
        )
        self._put, self._get = (
            Operation[GetItem, Outcome](
                exchange=exchange,
                name_of=lambda item: commands.name(item[0]),
                size_of=lambda item: len(item[1]),
                lane_of=lambda node: node.chunks,
                answer_to=outcome_of,
                failed=Outcome.FAILED,
                exchange_one=exchange_one,
            )
            for exchange, exchange_one in ((commands.put, None), (commands.get, commands.get_whole))
        )

    @property
    def ttl(self) -> float | None:
        """Seconds after which the server forgets a chunk."""
        return self._settings.ttl

    async def open(self) -> None:
        """Load what is needed to connect. Raises :class:`TierError`; a server that is down is no reason."""
        settings = self._settings
        access, self._control = await to_thread.run_sync(self._prepare)
        self._pool = Pool(settings.name, Nodes(access), topology_of(settings.place, self._control))

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held: one round trip to each server, however many keys.

        What is on a server that does not answer is not. Raises ``ConnectionError`` where none answers.
        """
        return [bool(held) for held in await self._question(self._contains, keys)]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view as a value. ``FULL`` where the server has no room and evicts nothing."""
        return await self._pool.ask(Batch(self._put, items, self._settings.deadline))

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each value into its view."""
        return await self._pool.ask(Batch(self._get, items, self._settings.deadline))

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Unlink each value. Raises ``ConnectionError`` where no server answers."""
        await self._question(self._delete, keys)

    async def _question(
        self, operation: Operation[ChunkKey, bool | None], keys: Sequence[ChunkKey]
    ) -> Sequence[bool | None]:
        answers = await self._pool.ask(Batch(operation, keys, self._settings.deadline))
        if keys and all(answer is None for answer in answers):
            raise ConnectionError("no server answers")
        return answers

    async def check(self) -> str:
        """Ask every primary what it is. See :class:`~kvtier.backends.base.SupportsCheck`."""
        return await check(self.library.product, self._control, self._pool.topology, self._settings.deadline)

    def _prepare(self) -> tuple[Access, Control]:
        settings = self._settings
        try:
            control = Control(self.library, settings)
        except ImportError as error:
            package = self.library.package
            raise TierError(
                f"{settings.name}: the client library of {self.library.product} is missing: "
                f"install it: pip install 'kvtier[{package}]'"
            ) from error
        return (
            Access(
                tls=_tls_context(settings) if settings.place.tls else None,
                user=settings.user,
                password=settings.password.get_secret_value() if settings.password else None,
                database=settings.place.database,
                connections=settings.connections,
            ),
            control,
        )


def _tls_context(settings: RedisSettings) -> ssl.SSLContext:
    """Verifies certificate and host name. Reads the files. Raises :class:`TierError`."""
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
        f"{settings.name}: `{name}` is {getattr(settings, name)}, which holds no certificate that can be "
        f"used: {error.strerror or error}"
    )
