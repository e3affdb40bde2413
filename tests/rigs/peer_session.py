"""A session over a real cache that accepts arbitrary client bytes, and a check that it leaks nothing."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio

from kvtier import Settings, TieredCache
from kvtier.errors import ChannelError
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.observability.traces.spans import Sampling, Tracer
from kvtier.peers.grants import GrantBook
from kvtier.peers.lookup import PeerLookup
from kvtier.peers.protocol import Granted, Lookup, Reserve, Reserved
from kvtier.peers.push_targets import ArenaTarget
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.peers.staging.buffers import Stagings
from kvtier.rpc.frames import Message
from kvtier.rpc.wire import SocketWire
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key
from tests.rigs.peer_server import BUILT_IN, CHUNK, PAYLOAD, NoTransport, RawClient
from tests.rigs.waiting import until

HELD = [make_key(number) for number in range(1, 6)]
ClientMessage = Message | bytes | Callable[[int], Message]
"""A message, raw bytes, or a function that builds the message from the latest grant number (0 if none)."""


class SessionHarness:
    """One cache, for any number of sessions one after the other."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.grants = GrantBook(cache.arena, PeerSettings(lease=5, share=0.5))
        self.lookup = PeerLookup(cache)
        arena = ArenaTarget(cache, self.grants, NoTransport().cut_off)
        self.reservations = Reservations(cache, arena, Stagings(cache.settings, None, cache))
        for key in HELD:
            self._store(key)

    def _store(self, key: ChunkKey) -> None:
        reservation = self.cache.reserve(ChunkHeader(key, make_key(0), bytes(32), PAYLOAD))
        if reservation is not None:
            self.cache.commit([reservation])

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[SessionHarness]:
        tiers = [{"name": "ram", "type": "cpu", "capacity": 8 * CHUNK}]
        async with TieredCache.open(Settings(tiers=tiers), plugins=BUILT_IN) as cache:
            yield cls(cache)

    async def run(self, *messages: ClientMessage) -> tuple[list[Any], ChannelError]:
        """Send the messages, close, and return the replies and the error that ended the session."""
        ours, theirs = socket.socketpair()
        errors: list[ChannelError] = []

        async def serve() -> None:
            tracer = Tracer(Sampling.of({}))
            session = Session(
                SocketWire(theirs), self.lookup, self.grants, self.reservations, Counter(), tracer
            )
            errors.append(await session.serve())
            theirs.close()

        replies: list[Any] = []
        with ours, theirs, anyio.fail_after(30):
            client = RawClient(ours)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                tasks.start_soon(self._receive, client, replies)
                for at, message in enumerate(messages):
                    if callable(message):
                        await self._wait_for_grants(messages[:at], replies, errors)
                        grants = [reply.grant for reply in replies if isinstance(reply, Granted | Reserved)]
                        message = message(grants[-1] if grants else 0)
                    try:
                        await client.send(message)
                    except OSError:
                        break
                ours.shutdown(socket.SHUT_WR)
        await self._assert_idle()
        (error,) = errors
        return replies, error

    async def _wait_for_grants(
        self, sent: Sequence[ClientMessage], replies: list[Any], errors: list[ChannelError]
    ) -> None:
        """Wait until all requested grants have arrived; only briefly if garbage may have swallowed some."""
        await anyio.sleep(0.001)
        if any(isinstance(message, bytes) for message in sent):
            return
        requests = sum(isinstance(message, Lookup | Reserve) for message in sent)
        while not errors and sum(isinstance(reply, Granted | Reserved) for reply in replies) < requests:
            await anyio.sleep(0.001)

    async def _receive(self, client: RawClient, replies: list[Any]) -> None:
        with suppress(OSError):
            while True:
                replies.append(await client.receive())

    async def _assert_idle(self) -> None:
        grants, cache = self.grants, self.cache
        assert grants.open == 0
        assert grants.granted_bytes == 0
        assert grants.slices == 0
        assert self.reservations.reserved_bytes == 0
        status = self.reservations.status()
        assert (status["reservations"], status["announcements"]) == (0, 0)
        assert not cache.expecting.announced
        await until(lambda: cache.arena.leases == cache.catalog.count(0))
