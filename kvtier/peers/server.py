"""Where peers come in: one port, on which each connection proves who it is before anything of it is read."""

from __future__ import annotations

import logging
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.backends.logs import RareWarning
from kvtier.cache import TieredCache
from kvtier.errors import ChannelClosed, PeerError, ProtocolError
from kvtier.peers.authentication import ACCEPT_SECONDS, Credentials, receive_exactly, send_all
from kvtier.peers.dialling import printable
from kvtier.peers.grants import GrantBook
from kvtier.peers.handshake import RefusedHandshake
from kvtier.peers.holdings import Holdings
from kvtier.peers.protocol import VERSION, Hello, Refused, Welcome, decode_from_client
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.peers.staging import Stagings
from kvtier.settings_peer import PeerSettings, split_address
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import encode
from kvtier.tasks import open_tasks
from kvtier.transports.base import SupportsConnections, Transport

logger = logging.getLogger("kvtier")

MOST_CONNECTIONS = 1024
MOST_STRANGERS = 64
"""Connections that have not yet proved who they are. A further one takes the place of the oldest."""
MOST_HELLO_BYTES = 4096
REFUSAL_SECONDS = 1.0
"""How long it may take to say why, before the connection is closed."""
BACKLOG = 256
RECOVERY_SECONDS = 0.1
"""Until the next attempt where no connection can be accepted, such as for want of file descriptors."""

_LENGTH = struct.Struct("<I")


class PeerServer:
    """Serves every peer of this instance. The cache and the transport are open, and closed after it."""

    def __init__(
        self,
        cache: TieredCache,
        settings: PeerSettings,
        transport: Transport,
        grants: GrantBook,
        instance: str,
        buffer: int | None = None,
        refusal: Callable[[bytes], str] | None = None,
        stagings: Stagings | None = None,
    ) -> None:
        """Reads the certificates. Raises :class:`kvtier.errors.SettingsError`.

        ``buffer``: bytes of the first tier that peers may have reserved at once; ``peer.share`` of it where
        left out. ``refusal`` says why nothing of a namespace may be pushed here; nothing where it may.
        ``stagings``: the staging buffers of the engines, where there are any.
        """
        self._settings = settings
        self._transport = transport
        self._grants = grants
        self._instance = instance
        self._holdings = Holdings(cache)
        self._reservations = Reservations(cache, grants, buffer, refusal, stagings)
        self._credentials = Credentials.of(settings)
        self._warn = RareWarning(logger)
        self._address: tuple[str, int] | None = None
        self._strangers: dict[CancelScope, None] = {}
        self._connections: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens. While it does."""
        if self._address is None:
            raise PeerError("it does not listen")
        return self._address

    def status(self) -> dict[str, object]:
        """What it does and has done, for people and tests."""
        return {
            "connections": dict(+self._connections),
            "strangers": len(self._strangers),
            "grants": self._grants.open,
            "promised_bytes": self._grants.promised,
            "granted": self._grants.given,
            "expired": self._grants.expired,
            "reserving": self._reservations.status(),
            "asked": dict(self._asked),
            "refused": dict(self._refused),
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on ``peer.listen`` until the block is left. Raises :class:`PeerError` where that cannot be.

        Afterwards nothing is granted to anybody.
        """
        with await self._listen() as listener:
            host, port = listener.getsockname()[:2]
            self._address = (host, port)
            try:
                async with open_tasks() as tasks:
                    tasks.start_soon(self._accept_all, listener, tasks)
                    tasks.start_soon(self._expire)
                    try:
                        yield
                    finally:
                        tasks.cancel_scope.cancel()
            finally:
                self._address = None

    async def _listen(self) -> socket.socket:
        listen = self._settings.listen
        if listen is None:
            raise PeerError(
                "peer.listen is not set: write where peers reach this instance, like 0.0.0.0:8200"
            )
        host, port = split_address(listen)
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PeerError(
                f"cannot listen on {listen}: {why}: write another address or port in peer.listen"
            ) from error
        listener.setblocking(False)
        return listener

    async def _expire(self) -> None:
        while True:
            await anyio.sleep(min(1.0, self._settings.lease / 4))
            self._grants.expire()

    async def _accept_all(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            try:
                connected, address = listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(listener)
            except OSError as error:
                self._warn("no peer can connect: %s", error)
                await anyio.sleep(RECOVERY_SECONDS)
            else:
                tasks.start_soon(self._serve, connected, f"{address[0]} port {address[1]}")
                await anyio.lowlevel.checkpoint()

    async def _serve(self, connected: socket.socket, who: str) -> None:
        """Everything of one connection. Closes it; raises nothing."""
        try:
            connected, hello = await self._identify(connected)
            with connected:
                await self._admit(connected, hello, who)
        except RefusedHandshake as error:
            self._note_refusal(who, error.reason, str(error))
        except (OSError, ChannelClosed) as error:
            logger.debug("the connection of %s has ended: %s", who, error)
        except Exception:
            # The last resort: whatever is wrong with one peer must not end the others.
            self._refused["error here"] += 1
            logger.exception("the connection of a peer at %s failed", who)

    async def _identify(self, connected: socket.socket) -> tuple[socket.socket, Hello | ProtocolError]:
        """Let it prove who it is, and read its greeting, or what is wrong with that.

        Raises :class:`RefusedHandshake` and ``OSError``; the connection is closed then.
        """
        scope = CancelScope()
        if len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[scope] = None
        try:
            with scope:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connected = await self._credentials.accept(connected)
                return connected, await self._greeting(connected)
        except BaseException:
            connected.close()
            raise
        finally:
            self._strangers.pop(scope, None)
        connected.close()
        raise RefusedHandshake("too many strangers", "too many others were about to prove who they are")

    async def _greeting(self, connected: socket.socket) -> Hello | ProtocolError:
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                (length,) = _LENGTH.unpack(await receive_exactly(connected, _LENGTH.size))
                if length > MOST_HELLO_BYTES:
                    return ProtocolError(f"a greeting of {length} bytes is over {MOST_HELLO_BYTES}")
                message = decode_from_client(await receive_exactly(connected, length))
        except ProtocolError as error:
            return error
        except TimeoutError as error:
            raise RefusedHandshake("too slow", "it has not said in time what it wants") from error
        if isinstance(message, Hello):
            return message
        return ProtocolError(f"it says {type(message).__name__} before Hello")

    async def _admit(self, connected: socket.socket, hello: Hello | ProtocolError, who: str) -> None:
        """Serve what is asked for, or say why not. Raises ``OSError`` and ``ChannelClosed``."""
        refusal = self._refusal(hello)
        if refusal is not None:
            await self._refuse(connected, who, *refusal)
            return
        assert isinstance(hello, Hello)
        logger.debug("%s has come for %s: %s", who, hello.purpose, printable(hello.instance))
        self._connections[hello.purpose] += 1
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                await send_all(connected, encode(self._welcome()))
            if hello.purpose == "control":
                await self._session(Channel(connected)).serve()
            elif isinstance(self._transport, SupportsConnections):
                await self._transport.serve(connected)
        except ProtocolError as error:
            await self._refuse(connected, who, "no protocol", str(error))
        finally:
            self._connections[hello.purpose] -= 1

    def _session(self, channel: Channel) -> Session:
        return Session(
            channel, self._holdings, self._grants, self._reservations, self._asked, self._transport.cut_off
        )

    def _refusal(self, hello: Hello | ProtocolError) -> tuple[str, str] | None:
        """What kind of reason there is not to serve this one, and that in words."""
        if isinstance(hello, ProtocolError):
            return "no protocol", str(hello)
        if hello.version != VERSION:
            return "another version", (
                f"this instance speaks version {VERSION} of the protocol and the peer {hello.version}: "
                "install the same kvtier on both"
            )
        if hello.purpose == "data" and not isinstance(self._transport, SupportsConnections):
            name = self._settings.transport["type"]
            return "wrong purpose", f"the transport here, {name}, takes no connections for data"
        if self._connections.total() >= MOST_CONNECTIONS:
            return "too many connections", f"it has {MOST_CONNECTIONS} connections, which is its limit"
        return None

    def _welcome(self) -> Welcome:
        name = self._settings.transport["type"]
        return Welcome(VERSION, self._instance, name, self._transport.endpoint, self._settings.lease)

    async def _refuse(self, connected: socket.socket, who: str, reason: str, why: str) -> None:
        self._note_refusal(who, reason, why)
        with anyio.move_on_after(REFUSAL_SECONDS), suppress(OSError):
            await send_all(connected, encode(Refused(printable(why))))

    def _note_refusal(self, who: str, reason: str, why: str) -> None:
        self._refused[reason] += 1
        self._warn("a peer at %s is refused: %s", who, printable(why))
