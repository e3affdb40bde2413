"""A session over a real cache that is told any bytes at all; nothing of it may be left afterwards."""

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
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.peers.grants import GrantBook
from kvtier.peers.holdings import Holdings
from kvtier.peers.protocol import Granted, LookUp, Reserve, Reserved, decode_from_server
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.settings_peer import PeerSettings
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import Message, encode
from kvtier.testing.backend import make_key

from .serving import BUILT_IN, CHUNK, PAYLOAD, NoTransport

HELD = [make_key(number) for number in range(1, 6)]
Said = Message | bytes | Callable[[int], Message]
"""What a client says; what needs a grant is made of the number of the latest that was given, or 0."""
_LENGTH = struct.Struct("<I")


class Conversing:
    """One cache, to which any number of conversations are led, one after the other."""

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
    async def open(cls) -> AsyncIterator[Conversing]:
        tiers = [{"name": "ram", "type": "cpu", "capacity": 8 * CHUNK}]
        async with TieredCache.open(Settings(tiers=tiers), plugins=BUILT_IN) as cache:
            yield cls(cache)

    async def lead(self, *said: Said) -> tuple[list[Any], Exception]:
        """Say all this and hang up; what is answered, and how the session ended."""
        ours, theirs = socket.socketpair()
        ends: list[Exception] = []

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
                ends.append(error)
            theirs.close()

        answers: list[Any] = []
        with ours, theirs, anyio.fail_after(30):
            channel = Channel(ours)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                tasks.start_soon(self._hear, channel, answers)
                for at, one in enumerate(said):
                    if callable(one):
                        await self._answered(said[:at], answers, ends)
                        grants = [
                            answer.grant for answer in answers if isinstance(answer, Granted | Reserved)
                        ]
                        one = one(grants[-1] if grants else 0)
                    if not await self._say(channel, one):
                        break
                ours.shutdown(socket.SHUT_WR)
        await self._at_rest()
        (end,) = ends
        return answers, end

    async def _answered(self, said: Sequence[Said], answers: list[Any], ends: list[Exception]) -> None:
        """Wait for the grants that were asked for; briefly where garbage may have swallowed some."""
        await anyio.sleep(0.001)
        if any(isinstance(one, bytes) for one in said):
            return
        asked = sum(isinstance(one, LookUp | Reserve) for one in said)
        while not ends and sum(isinstance(one, Granted | Reserved) for one in answers) < asked:
            await anyio.sleep(0.001)

    async def _say(self, channel: Channel, message: Message | bytes) -> bool:
        try:
            await channel.send(message if isinstance(message, bytes) else encode(message))
        except ChannelClosed:
            return False
        return True

    async def _hear(self, channel: Channel, answers: list[Any]) -> None:
        heard = bytearray()
        try:
            while True:
                heard += await channel.receive()
                while len(heard) >= 4 and len(heard) >= 4 + _LENGTH.unpack_from(heard)[0]:
                    end = 4 + _LENGTH.unpack_from(heard)[0]
                    answers.append(decode_from_server(bytes(heard[4:end])))
                    del heard[:end]
        except ChannelClosed:
            pass

    async def _at_rest(self) -> None:
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
