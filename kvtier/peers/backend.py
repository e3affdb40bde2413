"""What all peers hold together, as one medium like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsPrefix
from kvtier.keys import ChunkKey
from kvtier.peers.authentication import Credentials
from kvtier.peers.client import PeerClient
from kvtier.peers.dialling import CONNECTING_AT_ONCE
from kvtier.peers.fetch import Fetch
from kvtier.settings import TierSettings
from kvtier.settings_peer import PeerSettings
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Transport

KEYS_A_QUESTION = 32_768
"""1 MiB of keys; the answer to as many fits a frame, too."""


class PeersBackend(Backend, SupportsPrefix):
    """Chunks in the tiers of other hosts: looked up there, promised, and read while the promise lasts.

    Nothing can be put here and nothing is deleted: what a peer holds is its own business. A peer that cannot
    be reached holds nothing; that none can is no error, and costs no wait. The transport belongs to the
    caller, who opens it, calls :meth:`connect`, and calls :meth:`disconnect` before closing it.
    """

    def __init__(
        self,
        settings: TierSettings,
        peer: PeerSettings,
        credentials: Credentials,
        transport: Transport,
        instance: str,
    ) -> None:
        self._deadline = settings.deadline
        self._look_up_patience = peer.patience
        self._threads = WorkerThreads(CONNECTING_AT_ONCE)
        self._clients = [
            PeerClient(
                address,
                credentials,
                transport,
                peer.transport["type"],
                instance,
                settings.deadline,
                self._threads,
            )
            for address in dict.fromkeys(peer.others)
        ]
        self._scope = CancelScope()
        self._keeping: asyncio.Task[None] | None = None

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

        One round trip; a second one where the peers seem to hold different parts of the prompt.
        """
        until = self._patience_ends()
        keys = keys[:KEYS_A_QUESTION]
        held = [False] * len(keys)
        prefixes: dict[PeerClient, int] = {}

        async def ask_for_prefix(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            positions = await client.look_up(part, prefix=True, until=until)
            if positions is not None:
                prefixes[client] = len(positions)

        await self._ask_all(ask_for_prefix, keys)
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
        return await Fetch(self._clients, items, self._ask_for_promises).run(self._deadline)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: nobody deletes what is another's."""

    def status(self) -> list[dict[str, object]]:
        """Of each peer, for people and tests: see :meth:`PeerClient.status`."""
        return [client.status() for client in self._clients]

    async def _keep(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for client in self._clients:
                    tasks.start_soon(client.keep)

    def _patience_ends(self) -> float:
        return anyio.current_time() + self._look_up_patience

    async def _ask_for_promises(self, keys: Sequence[ChunkKey]) -> None:
        until = self._patience_ends()

        async def ask(client: PeerClient, _start: int, part: Sequence[ChunkKey]) -> None:
            await client.look_up(part, prefix=False, until=until)

        await self._ask_all(ask, keys)

    async def _ask_all(
        self,
        ask: Callable[[PeerClient, int, Sequence[ChunkKey]], Coroutine[Any, Any, None]],
        keys: Sequence[ChunkKey],
        clients: Sequence[PeerClient] | None = None,
    ) -> None:
        """Ask every peer about all keys, at once, in as many parts as it takes."""
        async with anyio.create_task_group() as tasks:
            for client in self._clients if clients is None else clients:
                for start in range(0, len(keys), KEYS_A_QUESTION):
                    tasks.start_soon(ask, client, start, keys[start : start + KEYS_A_QUESTION])

    def _drop_promises(self, keys: Sequence[ChunkKey]) -> None:
        for client in self._clients:
            if client.source is not None:
                client.source.promises.drop(keys)
