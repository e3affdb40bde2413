"""A session over a real cache that accepts arbitrary client bytes, and a check that it leaks nothing."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from kvtier import Settings, TieredCache
from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.peers.grants import GrantBook
from kvtier.peers.holdings import Holdings
from kvtier.peers.protocol import Granted, Lookup, Reserve, Reserved, decode_from_server
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.settings.peer import PeerSettings
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import Message, encode
from kvtier.testing.backend import make_key

from .serving import BUILT_IN, CHUNK, PAYLOAD, NoTransport

HELD = [make_key(number) for number in range(1, 6)]
ClientMessage = Message | bytes | Callable[[int], Message]
"""A message, raw bytes, or a function that builds the message from the latest grant number (0 if none)."""
_LENGTH = struct.Struct("<I")


class SessionHarness:
    """One cache, for any number of sessions one after the other."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.grants = GrantBook(cache.arena, PeerSettings(lease=5, share=0.5))
        self.holdings = Holdings(cache)
        self.reservations = Reservations(cache, self.grants)
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

    async def run(self, *messages: ClientMessage) -> tuple[list[Any], Exception]:
        """Send the messages, close, and return the replies and the exception that ended the session."""
        ours, theirs = socket.socketpair()
        errors: list[Exception] = []

        async def serve() -> None:
            session = Session(
                Channel(theirs),
                self.holdings,
                self.grants,
                self.reservations,
                Counter(),
                NoTransport().cut_off,
            )
            try:
                await session.serve()
            except (ChannelClosed, ProtocolError) as error:
                errors.append(error)
            theirs.close()

        replies: list[Any] = []
        with ours, theirs, anyio.fail_after(30):
            channel = Channel(ours)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                tasks.start_soon(self._receive, channel, replies)
                for at, message in enumerate(messages):
                    if callable(message):
                        await self._wait_for_grants(messages[:at], replies, errors)
                        grants = [reply.grant for reply in replies if isinstance(reply, Granted | Reserved)]
                        message = message(grants[-1] if grants else 0)
                    if not await self._send(channel, message):
                        break
                ours.shutdown(socket.SHUT_WR)
        await self._assert_idle()
        (error,) = errors
        return replies, error

    async def _wait_for_grants(
        self, sent: Sequence[ClientMessage], replies: list[Any], errors: list[Exception]
    ) -> None:
        """Wait until all requested grants have arrived; only briefly if garbage may have swallowed some."""
        await anyio.sleep(0.001)
        if any(isinstance(message, bytes) for message in sent):
            return
        requests = sum(isinstance(message, Lookup | Reserve) for message in sent)
        while not errors and sum(isinstance(reply, Granted | Reserved) for reply in replies) < requests:
            await anyio.sleep(0.001)

    async def _send(self, channel: Channel, message: Message | bytes) -> bool:
        try:
            await channel.send(message if isinstance(message, bytes) else encode(message))
        except ChannelClosed:
            return False
        return True

    async def _receive(self, channel: Channel, replies: list[Any]) -> None:
        buffer = bytearray()
        try:
            while True:
                buffer += await channel.receive()
                while len(buffer) >= 4 and len(buffer) >= 4 + _LENGTH.unpack_from(buffer)[0]:
                    end = 4 + _LENGTH.unpack_from(buffer)[0]
                    replies.append(decode_from_server(bytes(buffer[4:end])))
                    del buffer[:end]
        except ChannelClosed:
            pass

    async def _assert_idle(self) -> None:
        grants, cache = self.grants, self.cache
        assert grants.open == 0
        assert grants.promised == 0
        assert not grants._owned
        assert self.reservations.reserved_bytes == 0
        assert not self.reservations._rooms
        assert not self.reservations._announced
        assert not cache.expecting.coming
        with anyio.fail_after(30):
            while cache.arena.leases != cache.hierarchy.catalog.count(0):
                await anyio.sleep(0.001)
