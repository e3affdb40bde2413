"""Storage backend over the tiers of all peers."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from statistics import mean, median
from typing import Any, NamedTuple, Protocol

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsPrefix
from kvtier.concurrency.breaker import Backoff
from kvtier.concurrency.tasks import DetachedTask
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.peers.client import PeerClient, drop_leases
from kvtier.peers.dialing import CONNECT_SECONDS, CONNECT_THREADS
from kvtier.peers.fetch import Fetch
from kvtier.peers.link_codec import LinkDecoder
from kvtier.peers.roster import IDLE_SECONDS, Roster
from kvtier.peers.source import Source
from kvtier.plugins import AUTO
from kvtier.rpc.authentication import Credentials
from kvtier.settings import TierSettings
from kvtier.settings.peer import PeerSettings
from kvtier.transports.base import Transport

KEYS_PER_REQUEST = 32_768
"""1 MiB of keys; the answer fits a frame as well."""

Bound = dict[ChunkKey, PeerClient]
"""The peer from which alone a chunk may be read."""


class TemporaryPeer:
    """A peer that stays connected within the block of :meth:`PeersBackend.temporary_peer`.

    To fetch chunks from this peer alone, with the stages of the pipeline::

        async with peers.temporary_peer(address) as peer:
            async with discovering.temporarily_known(tier_of_peers, keys, expected, peer.lease) as held:
                ...  # Promote or write these: within the block the peers tier is known to hold them.

    The chunks need not form a prefix. Take about ten of them or 256 MiB at a time: a peer grants at most
    ``peer.share`` of its first tier at once, for ``peer.lease`` seconds. If the peer is lost, the chunks of
    the current batch fail, and the next :meth:`lease` raises.
    """

    def __init__(self, client: PeerClient, bound: Bound, seconds: float) -> None:
        self.address = client.address
        """The peer's ``HOST:PORT``."""
        self._client = client
        self._bound = bound
        self._seconds = seconds
        self._leased: set[ChunkKey] = set()

    async def lease(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Lease those of ``keys`` that the peer's own tiers hold, and return their positions, ascending.

        Reads of these go to this peer alone until the block ends. Raises :class:`PeerError` if the peer does
        not answer within the transport's deadline.
        """
        until = anyio.current_time() + self._seconds
        positions: list[int] = []
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            part = keys[start : start + KEYS_PER_REQUEST]
            leased = await self._client.look_up(part, prefix=False, until=until, force=True)
            if leased is None:
                raise PeerError(f"peer {self.address}: {self._client.last_error or 'no answer in time'}")
            positions += [start + position for position in sorted(leased)]
        for position in positions:
            self._bound[keys[position]] = self._client
            self._leased.add(keys[position])
        return positions

    def release(self) -> None:
        """Release the leases that were not used."""
        for key in self._leased:
            if self._bound.get(key) is self._client:
                del self._bound[key]
        drop_leases([self._client], self._leased)


MAX_HOLDERS = 256
"""Holders used from one answer; the rest is ignored."""


class Directory(Protocol):
    """Maps chunks to the instances that report holding them, such as a controller."""

    async def who_holds(self, keys: Sequence[ChunkKey]) -> Sequence[tuple[str, int]]:
        """Return ``(HOST:PORT, count)`` of the holders of the leading ``count`` keys, longest prefix first.

        Called concurrently, for every lookup that misses on this host, and cancelled after ``peer.timeout``.
        Must return an empty list at once if the directory is unavailable. Any exception counts as no answer
        and starts a back-off. The result is only a hint: the instances decide what they hold.
        """
        ...


class Holder(NamedTuple):
    """An instance that may hold a prefix of a prompt."""

    address: str
    chunks: int
    """Length of the prefix."""


class DirectoryClient:
    """Queries a directory with a timeout, and backs off after a failure."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._backoff = Backoff()
        self._retry_at = 0.0
        self._warn = RateLimitedLog(logger)

    async def holders(self, keys: Sequence[ChunkKey], until: float) -> list[Holder]:
        """Return who may hold a prefix of ``keys``, longest first. ``until`` is in the event loop's time."""
        if self._clock() < self._retry_at:
            return []
        try:
            with anyio.CancelScope(deadline=until) as scope:
                entries = await self._directory.who_holds(keys)
        except Exception as error:
            self._back_off()
            self._warn("directory lookup failed: %r", error)
            return []
        if scope.cancelled_caught:
            self._back_off()
            return []
        self._backoff.reset()
        holders = [Holder(address, chunks) for address, chunks in islice(entries, MAX_HOLDERS) if chunks > 0]
        return sorted(holders, key=lambda holder: -holder.chunks)

    def _back_off(self) -> None:
        # Concurrent lookups that failed together count as one failure.
        if self._clock() >= self._retry_at:
            self._retry_at = self._clock() + self._backoff.next()


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
            measured=peer.codec["type"] == AUTO,
        )
        configured = [make(address, threads=self._threads) for address in dict.fromkeys(peer.others)]
        self._roster = Roster(
            configured, partial(make, threads=self._temporary_threads, temporary=True), idle=idle
        )
        self._decoder: LinkDecoder | None = None
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

    def connect(self, decoder: LinkDecoder | None = None) -> None:
        """Start connecting to every configured peer. Call once, in the event loop; does not block.

        ``decoder``: decodes what is requested encoded. Without it, nothing is.
        """
        self._decoder = decoder
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
        drop_leases(self._roster.clients, beyond)
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
            ask = partial(self._request_leases, clients=clients)
            fetch = Fetch(clients, part, ask, self._decoder)
            for index, outcome in zip(indexes, await fetch.run(self._deadline), strict=True):
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

    async def _request_leases(self, keys: Sequence[ChunkKey], clients: Sequence[PeerClient]) -> None:
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


class LinkChoices:
    """What was decided with ``codec: auto`` for the peers of a backend, each for itself."""

    def __init__(self, peers: PeersBackend) -> None:
        self._peers = peers

    @property
    def encodes(self) -> float:
        """The part of the peers from which chunks are requested encoded."""
        return mean([client.choice.encodes for client in self._peers.clients if client.choice] or [0])

    @property
    def gain(self) -> float | None:
        """The middle one of the gains that are known."""
        choices = [client.choice for client in self._peers.clients if client.choice]
        gains = [gain for choice in choices if (gain := choice.gain) is not None]
        return median(gains) if gains else None
