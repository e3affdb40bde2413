"""Storage backend over the tiers of all peers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsPrefix
from kvtier.concurrency.detached import DetachedTask
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.memory.keys import ChunkKey
from kvtier.peers.client import PeerClient, drop_promises
from kvtier.peers.dialing import CONNECT_SECONDS, CONNECT_THREADS
from kvtier.peers.directory import Directory, DirectoryClient
from kvtier.peers.fetch import Fetch
from kvtier.peers.roster import IDLE_SECONDS, Roster
from kvtier.peers.source import Source
from kvtier.peers.temporary import KEYS_PER_REQUEST, Bound, TemporaryPeer
from kvtier.rpc.authentication import Credentials
from kvtier.settings import TierSettings
from kvtier.settings.peer import PeerSettings
from kvtier.transports.base import Transport

logger = logging.getLogger("kvtier")

TEMPORARY_CONNECT_THREADS = 8
"""A separate pool for temporary peers, so that bad directory entries cannot delay configured peers."""
MAX_HOLDERS_ASKED = 3
"""Holders named by a directory that are queried in one lookup."""

Query = Callable[[PeerClient, int, Sequence[ChunkKey]], Coroutine[Any, Any, None]]
"""Queries a peer for a slice of the keys, given the slice's position."""


class PeersBackend(Backend, SupportsPrefix):
    """Chunks in the tiers of other hosts. A lookup leases them at the peer, and a read uses the lease.

    Read-only: puts are refused, and deletes ignored. An unreachable peer counts as empty; it is not an error
    and adds no latency. The caller owns the transport: it opens it, calls :meth:`connect`, and calls
    :meth:`close` before it closes it.

    Peers are those of ``peer.others``, and temporary peers: those that a command names, or that the directory
    reports as holders of the keys that are looked up.
    """

    def __init__(
        self,
        settings: TierSettings,
        peer: PeerSettings,
        credentials: Credentials,
        transport: Transport,
        instance: str,
        *,
        idle: float = IDLE_SECONDS,
    ) -> None:
        """``idle``: seconds after which an unused temporary peer is disconnected."""
        self._deadline = settings.deadline
        self._lookup_timeout = peer.timeout
        self._threads = WorkerThreads(CONNECT_THREADS)
        self._temporary_threads = WorkerThreads(TEMPORARY_CONNECT_THREADS)
        make = partial(
            PeerClient,
            credentials=credentials,
            transport=transport,
            transport_name=peer.transport["type"],
            instance=instance,
            deadline=settings.deadline,
        )
        configured = [make(address, threads=self._threads) for address in dict.fromkeys(peer.others)]
        self._roster = Roster(
            configured, partial(make, threads=self._temporary_threads, temporary=True), idle=idle
        )
        self._bound: Bound = {}
        self._directory: DirectoryClient | None = None
        self._scope = CancelScope()
        self._running: DetachedTask[None] | None = None

    @property
    def clients(self) -> list[PeerClient]:
        """All current peers, configured ones first."""
        return self._roster.clients

    def set_directory(self, directory: Directory | None) -> None:
        """Query this directory in every lookup from now on; ``None`` removes it."""
        self._directory = None if directory is None else DirectoryClient(directory)

    @asynccontextmanager
    async def temporary_peer(self, address: str) -> AsyncIterator[TemporaryPeer]:
        """Connect to a peer at ``HOST:PORT``, configured or not, to fetch from; see :class:`TemporaryPeer`.

        Connects within :data:`CONNECT_SECONDS`, or shares an existing connection. The connection closes after
        :data:`IDLE_SECONDS` without use. Raises :class:`PeerError` if the address is unreachable, is not a
        peer, or is this instance, or if too many temporary peers are in use.
        """
        async with self._roster.checkout(address, CONNECT_SECONDS) as client:
            peer = TemporaryPeer(client, self._bound, self._deadline)
            try:
                yield peer
            finally:
                peer.release()

    @asynccontextmanager
    async def checkout(self, address: str) -> AsyncIterator[Source]:
        """Like :meth:`temporary_peer`, but yield the connection itself, to push over."""
        async with self._roster.checkout(address, CONNECT_SECONDS) as client:
            source = client.source
            if source is None:
                raise PeerError(f"peer {client.address}: {client.last_error}")
            yield source

    async def open(self) -> None:
        """Do nothing: :meth:`connect` connects, once the transport knows the arena."""

    def connect(self) -> None:
        """Start connecting to every configured peer. Call once, in the event loop; does not block."""
        self._running = DetachedTask(self._run())

    async def close(self) -> None:
        """Disconnect from every peer for good. Reads in flight end as ``FAILED``. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        self._scope.cancel()
        with CancelScope(shield=True):
            await running.wait()
        running.result()
        self._threads.close()
        self._temporary_threads.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether any peer holds each key, counting answers within ``peer.timeout``."""
        until = self._lookup_deadline()
        held = [False] * len(keys)

        async def query(client: PeerClient, start: int, part: Sequence[ChunkKey]) -> None:
            answers = await client.contains(part, until=until) or ()
            for index, is_held in enumerate(answers, start):
                held[index] |= is_held

        await self._query_all(query, keys)
        return held

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many leading keys the peers hold together, and lease those chunks there.

        Takes one round trip, and a second one if the peers hold different parts of the prompt. In parallel,
        queries the directory and the holders that it names.
        """
        until = self._lookup_deadline()
        keys = keys[:KEYS_PER_REQUEST]
        held = [False] * len(keys)
        prefixes: dict[PeerClient, int] = {}

        async def query_prefix(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            positions = await client.look_up(part, prefix=True, until=until)
            if positions is not None:
                prefixes[client] = len(positions)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._query_all, query_prefix, keys, self._roster.configured)
            if self._directory is not None:
                tasks.start_soon(self._query_holders, self._directory, query_prefix, keys, prefixes, until)
        longest = max(prefixes.values(), default=0)
        held[:longest] = [True] * longest
        # Peers with the longest prefix do not hold the key after it.
        others = [client for client, length in prefixes.items() if length < longest]

        async def query_rest(client: PeerClient, start: int, part: Sequence[ChunkKey]) -> None:
            for position in await client.look_up(part, prefix=False, until=until) or ():
                held[longest + start + position] = True

        if others and longest < len(keys):
            await self._query_all(query_rest, keys[longest:], others)
        together = held.index(False) if False in held else len(held)
        beyond = [key for key, is_held in zip(keys[together:], held[together:], strict=True) if is_held]
        drop_promises(self._roster.clients, beyond)
        return together

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Return ``FULL``: peers are read-only."""
        return [Outcome.FULL] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each chunk from a peer; ``MISS`` if no reachable peer holds it."""
        if not items:
            return []
        parts: dict[PeerClient | None, list[int]] = {}
        for index, (key, _) in enumerate(items):
            parts.setdefault(self._bound.get(key), []).append(index)
        outcomes = [Outcome.FAILED] * len(items)

        async def get(only: PeerClient | None, indexes: Sequence[int]) -> None:
            clients = self._roster.clients if only is None else [only]
            part = [items[index] for index in indexes]
            ask = partial(self._request_promises, clients=clients)
            for index, outcome in zip(
                indexes, await Fetch(clients, part, ask).run(self._deadline), strict=True
            ):
                outcomes[index] = outcome

        async with anyio.create_task_group() as tasks:
            for only, indexes in parts.items():
                tasks.start_soon(get, only, indexes)
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: peers are read-only."""

    def status(self) -> list[dict[str, object]]:
        """Return the status of each peer; see :meth:`Roster.status`."""
        return self._roster.status()

    async def _run(self) -> None:
        with self._scope:
            await self._roster.run()

    def _lookup_deadline(self) -> float:
        return anyio.current_time() + self._lookup_timeout

    async def _query_holders(
        self,
        directory: DirectoryClient,
        query: Query,
        keys: Sequence[ChunkKey],
        prefixes: Mapping[PeerClient, int],
        until: float,
    ) -> None:
        """Query holders named by the directory that hold more than the longest prefix found so far."""
        holders = await directory.holders(keys, until)
        known = max(prefixes.values(), default=0)
        chosen = (
            holder.address
            for holder in holders
            if holder.chunks > known and self._roster.is_candidate(holder.address)
        )

        async def query_holder(address: str) -> None:
            try:
                async with self._roster.checkout(address, until - anyio.current_time()) as client:
                    if client not in self._roster.configured:
                        await query(client, 0, keys)
            except PeerError as error:
                logger.debug("a holder named by the directory is unusable: %s", error)

        async with anyio.create_task_group() as tasks:
            for address in islice(chosen, MAX_HOLDERS_ASKED):
                tasks.start_soon(query_holder, address)

    async def _request_promises(self, keys: Sequence[ChunkKey], clients: Sequence[PeerClient]) -> None:
        until = self._lookup_deadline()

        async def query(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            await client.look_up(part, prefix=False, until=until)

        await self._query_all(query, keys, clients)

    async def _query_all(
        self, query: Query, keys: Sequence[ChunkKey], clients: Sequence[PeerClient] | None = None
    ) -> None:
        """Query every peer for all keys concurrently, split into requests of bounded size."""
        async with anyio.create_task_group() as tasks:
            for client in self._roster.clients if clients is None else clients:
                for start in range(0, len(keys), KEYS_PER_REQUEST):
                    tasks.start_soon(query, client, start, keys[start : start + KEYS_PER_REQUEST])
