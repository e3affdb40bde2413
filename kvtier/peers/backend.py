"""What all peers hold together, as one medium like any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsPrefix
from kvtier.errors import PeerError
from kvtier.keys import ChunkKey
from kvtier.peers.authentication import Credentials
from kvtier.peers.borrowed import KEYS_A_QUESTION, BorrowedPeer, Bound
from kvtier.peers.client import PeerClient
from kvtier.peers.dialling import CONNECT_SECONDS, CONNECTING_AT_ONCE
from kvtier.peers.directory import AskedDirectory, Directory
from kvtier.peers.fetch import Fetch
from kvtier.peers.roster import IDLE_SECONDS, Roster
from kvtier.peers.source import Source
from kvtier.settings import TierSettings
from kvtier.settings_peer import PeerSettings
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Transport

logger = logging.getLogger("kvtier")

BORROWING_AT_ONCE = 8
"""Threads of their own that connect to borrowed peers, so that no directory can keep the others waiting."""
HOLDERS_ASKED = 3
"""Of those that a directory names, in one look-up."""

Question = Callable[[PeerClient, int, Sequence[ChunkKey]], Coroutine[Any, Any, None]]
"""Asks a peer about some keys, which begin at a position."""


class PeersBackend(Backend, SupportsPrefix):
    """Chunks in the tiers of other hosts: looked up there, promised, and read while the promise lasts.

    Nothing can be put here and nothing is deleted: what a peer holds is its own business. A peer that cannot
    be reached holds nothing; that none can is no error, and costs no wait. The transport belongs to the
    caller, who opens it, calls :meth:`connect`, and calls :meth:`disconnect` before closing it.

    Peers are those of ``peer.others``, and others that are borrowed: by a command that names one, or because
    the directory says that they hold what is looked up.
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
        """``idle``: seconds after which a borrowed peer that nobody uses is hung up on."""
        self._deadline = settings.deadline
        self._look_up_patience = peer.patience
        self._threads = WorkerThreads(CONNECTING_AT_ONCE)
        self._borrowing_threads = WorkerThreads(BORROWING_AT_ONCE)
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
            configured, partial(make, threads=self._borrowing_threads, borrowed=True), idle=idle
        )
        self._bound: Bound = {}
        self._directory: AskedDirectory | None = None
        self._scope = CancelScope()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def clients(self) -> list[PeerClient]:
        """All peers of this moment, those of the settings first."""
        return self._roster.clients

    def ask_directory(self, directory: Directory | None) -> None:
        """Ask this directory, too, in every look-up from now on; none where it is ``None``."""
        self._directory = None if directory is None else AskedDirectory(directory)

    @asynccontextmanager
    async def borrow(self, address: str) -> AsyncIterator[BorrowedPeer]:
        """A peer to fetch from at ``HOST:PORT``, which the settings need not name; see :class:`BorrowedPeer`.

        Connected within five seconds; one that is connected already is shared. It stays for half a minute
        after its last use. Raises :class:`PeerError`, in words, where nobody answers there, it proves to be
        no peer or this very instance, or too many are borrowed and in use.
        """
        async with self._roster.lend(address, CONNECT_SECONDS) as client:
            peer = BorrowedPeer(client, self._bound, self._deadline)
            try:
                yield peer
            finally:
                peer.let_go()

    @asynccontextmanager
    async def lend(self, address: str) -> AsyncIterator[Source]:
        """The connection to a peer at ``HOST:PORT``, to push to; otherwise like :meth:`borrow`."""
        async with self._roster.lend(address, CONNECT_SECONDS) as client:
            source = client.source
            if source is None:
                raise PeerError(f"peer {client.address}: {client.trouble}")
            yield source

    async def open(self) -> None:
        """Nothing to do: peers are connected to by :meth:`connect`, once the transport knows the arena."""

    def connect(self) -> None:
        """Begin to connect to every peer, and to link with it. Once, in the event loop; waits for none."""
        self._keeping = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        """See :meth:`disconnect`."""
        await self.disconnect()

    async def disconnect(self) -> None:
        """Hang up on every peer, for good. Reads under way are ``FAILED``; harmless when repeated."""
        keeping, self._keeping = self._keeping, None
        if keeping is None:
            return
        self._scope.cancel()
        with CancelScope(shield=True):
            await asyncio.wait([keeping])
        keeping.result()
        self._threads.close()
        self._borrowing_threads.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether any peer holds each key, as far as they answer within ``patience``."""
        until = self._patience_ends()
        held = [False] * len(keys)

        async def ask(client: PeerClient, start: int, part: Sequence[ChunkKey]) -> None:
            answers = await client.contains(part, until=until) or ()
            for index, there in enumerate(answers, start):
                held[index] |= there

        await self._ask_all(ask, keys)
        return held

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading keys the peers hold together; those are promised to this host then.

        One round trip; a second one where the peers seem to hold different parts of the prompt. Meanwhile the
        directory is asked, and whoever it names besides.
        """
        until = self._patience_ends()
        keys = keys[:KEYS_A_QUESTION]
        held = [False] * len(keys)
        prefixes: dict[PeerClient, int] = {}

        async def ask_for_prefix(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            positions = await client.look_up(part, prefix=True, until=until)
            if positions is not None:
                prefixes[client] = len(positions)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask_all, ask_for_prefix, keys, self._roster.configured)
            if self._directory is not None:
                tasks.start_soon(self._ask_holders, self._directory, ask_for_prefix, keys, prefixes, until)
        longest = max(prefixes.values(), default=0)
        held[:longest] = [True] * longest
        # Whoever holds as much as the longest does not hold the key after it.
        others = [client for client, length in prefixes.items() if length < longest]

        async def ask_for_rest(client: PeerClient, start: int, part: Sequence[ChunkKey]) -> None:
            for position in await client.look_up(part, prefix=False, until=until) or ():
                held[longest + start + position] = True

        if others and longest < len(keys):
            await self._ask_all(ask_for_rest, keys[longest:], others)
        together = held.index(False) if False in held else len(held)
        self._drop_promises(
            [key for key, there in zip(keys[together:], held[together:], strict=True) if there]
        )
        return together

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """``FULL``: nothing is stored at a peer."""
        return [Outcome.FULL] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each chunk from a peer. ``MISS`` where none that can be reached holds it."""
        if not items:
            return []
        parts: dict[PeerClient | None, list[int]] = {}
        for index, (key, _) in enumerate(items):
            parts.setdefault(self._bound.get(key), []).append(index)
        outcomes = [Outcome.FAILED] * len(items)

        async def get(only: PeerClient | None, indexes: Sequence[int]) -> None:
            clients = self._roster.clients if only is None else [only]
            part = [items[index] for index in indexes]
            ask = partial(self._ask_for_promises, clients=clients)
            for index, outcome in zip(
                indexes, await Fetch(clients, part, ask).run(self._deadline), strict=True
            ):
                outcomes[index] = outcome

        async with anyio.create_task_group() as tasks:
            for only, indexes in parts.items():
                tasks.start_soon(get, only, indexes)
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: nobody deletes what is another's."""

    def status(self) -> list[dict[str, object]]:
        """Of each peer, for people and tests: see :meth:`Roster.status`."""
        return self._roster.status()

    async def _keep(self) -> None:
        with self._scope:
            await self._roster.run()

    def _patience_ends(self) -> float:
        return anyio.current_time() + self._look_up_patience

    async def _ask_holders(
        self,
        directory: AskedDirectory,
        ask: Question,
        keys: Sequence[ChunkKey],
        prefixes: Mapping[PeerClient, int],
        until: float,
    ) -> None:
        """Ask those that the directory names and that have more than is known to be held so far."""
        holders = await directory.holders(keys, until)
        known = max(prefixes.values(), default=0)
        chosen = (one.address for one in holders if one.chunks > known and self._roster.may_help(one.address))

        async def ask_one(address: str) -> None:
            try:
                async with self._roster.lend(address, until - anyio.current_time()) as client:
                    if client not in self._roster.configured:
                        await ask(client, 0, keys)
            except PeerError as error:
                logger.debug("the directory names a peer that is of no use: %s", error)

        async with anyio.create_task_group() as tasks:
            for address in islice(chosen, HOLDERS_ASKED):
                tasks.start_soon(ask_one, address)

    async def _ask_for_promises(self, keys: Sequence[ChunkKey], clients: Sequence[PeerClient]) -> None:
        until = self._patience_ends()

        async def ask(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            await client.look_up(part, prefix=False, until=until)

        await self._ask_all(ask, keys, clients)

    async def _ask_all(
        self, ask: Question, keys: Sequence[ChunkKey], clients: Sequence[PeerClient] | None = None
    ) -> None:
        """Ask every peer about all keys, at once, in as many parts as it takes."""
        async with anyio.create_task_group() as tasks:
            for client in self._roster.clients if clients is None else clients:
                for start in range(0, len(keys), KEYS_A_QUESTION):
                    tasks.start_soon(ask, client, start, keys[start : start + KEYS_A_QUESTION])

    def _drop_promises(self, keys: Sequence[ChunkKey]) -> None:
        for client in self._roster.clients:
            if client.source is not None:
                client.source.promises.drop(keys)
