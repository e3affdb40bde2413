"""Peer server: accepts connections on one port, and authenticates each before reading messages."""

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

from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ChannelClosed, PeerError, ProtocolError
from kvtier.logs import RateLimitedWarning
from kvtier.peers.authentication import ACCEPT_SECONDS, Credentials, receive_exactly, send_all
from kvtier.peers.dialling import printable
from kvtier.peers.grants import GrantBook
from kvtier.peers.handshake import RefusedHandshake
from kvtier.peers.holdings import Holdings
from kvtier.peers.protocol import VERSION, Hello, Refused, Welcome, decode_from_client
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.peers.staging.buffers import Stagings
from kvtier.settings.peer import PeerSettings, split_address
from kvtier.sockets.channel import Channel
from kvtier.sockets.frames import encode
from kvtier.transports.base import SupportsConnections, Transport

logger = logging.getLogger("kvtier")

MAX_CONNECTIONS = 1024
MAX_UNAUTHENTICATED = 64
"""Limit of unauthenticated connections. A further one evicts the oldest."""
MAX_HELLO_BYTES = 4096
REFUSAL_SECONDS = 1.0
"""Timeout for sending the reason before a refused connection is closed."""
BACKLOG = 256
RECOVERY_SECONDS = 0.1
"""Pause after a failed ``accept``, for example when file descriptors run out."""

_LENGTH = struct.Struct("<I")


class PeerServer:
    """Serves all peers of this instance. The cache and the transport must stay open while it runs."""

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
        """Load the certificates. Raises :class:`kvtier.errors.SettingsError`.

        ``buffer``: bytes of the first tier that peers may reserve at once; default ``peer.share`` of it.
        ``refusal``: returns why pushes of a namespace are rejected; empty if they are accepted.
        ``stagings``: the staging buffers of the engines, if any.
        """
        self._settings = settings
        self._transport = transport
        self._grants = grants
        self._instance = instance
        self._holdings = Holdings(cache)
        self._reservations = Reservations(cache, grants, buffer, refusal, stagings)
        self._credentials = Credentials.from_settings(settings)
        self._warn = RateLimitedWarning(logger)
        self._address: tuple[str, int] | None = None
        self._unauthenticated: dict[CancelScope, None] = {}
        self._connections: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    @property
    def address(self) -> tuple[str, int]:
        """The address that it listens on. Raises :class:`PeerError` if it does not listen."""
        if self._address is None:
            raise PeerError("the peer server is not listening")
        return self._address

    def status(self) -> dict[str, object]:
        """Return counters and gauges."""
        return {
            "connections": dict(+self._connections),
            "unauthenticated": len(self._unauthenticated),
            "grants": self._grants.open,
            "promised_bytes": self._grants.promised,
            "granted": self._grants.granted,
            "expired": self._grants.expired,
            "reserving": self._reservations.status(),
            "asked": dict(self._asked),
            "refused": dict(self._refused),
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on ``peer.listen`` within the block. Raises :class:`PeerError` if that is impossible.

        On exit every grant has ended.
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
                "peer.listen is not set: set the address that peers connect to, such as 0.0.0.0:8200"
            )
        host, port = split_address(listen)
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except (OSError, UnicodeError) as error:
            detail = getattr(error, "strerror", None) or error
            raise PeerError(
                f"cannot listen on {listen}: {detail}: set another address or port in peer.listen"
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
                self._warn("cannot accept peer connections: %s", error)
                await anyio.sleep(RECOVERY_SECONDS)
            else:
                tasks.start_soon(self._serve, connected, f"{address[0]} port {address[1]}")
                await anyio.lowlevel.checkpoint()

    async def _serve(self, connected: socket.socket, peer: str) -> None:
        """Handle one connection, and close it. Raises nothing."""
        try:
            connected, hello = await self._identify(connected)
            with connected:
                await self._admit(connected, hello, peer)
        except RefusedHandshake as error:
            self._note_refusal(peer, error.reason, str(error))
        except (OSError, ChannelClosed) as error:
            logger.debug("connection from %s closed: %s", peer, error)
        except Exception:
            # Last resort: an error with one peer must not affect the others.
            self._refused["error here"] += 1
            logger.exception("connection from peer %s failed", peer)

    async def _identify(self, connected: socket.socket) -> tuple[socket.socket, Hello | ProtocolError]:
        """Authenticate a connection, and read its :class:`Hello`, or return why that is invalid.

        Raises :class:`RefusedHandshake` and ``OSError``, after closing the connection.
        """
        scope = CancelScope()
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        self._unauthenticated[scope] = None
        try:
            with scope:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connected = await self._credentials.accept(connected)
                return connected, await self._read_hello(connected)
        except BaseException:
            connected.close()
            raise
        finally:
            self._unauthenticated.pop(scope, None)
        connected.close()
        raise RefusedHandshake("too many strangers", "too many unauthenticated connections")

    async def _read_hello(self, connected: socket.socket) -> Hello | ProtocolError:
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                (length,) = _LENGTH.unpack(await receive_exactly(connected, _LENGTH.size))
                if length > MAX_HELLO_BYTES:
                    return ProtocolError(f"its Hello of {length} bytes is over {MAX_HELLO_BYTES}")
                message = decode_from_client(await receive_exactly(connected, length))
        except ProtocolError as error:
            return error
        except TimeoutError as error:
            raise RefusedHandshake("too slow", "timed out waiting for Hello") from error
        if isinstance(message, Hello):
            return message
        return ProtocolError(f"it sends {type(message).__name__} before Hello")

    async def _admit(self, connected: socket.socket, hello: Hello | ProtocolError, peer: str) -> None:
        """Serve the connection, or refuse it with a reason. Raises ``OSError`` and ``ChannelClosed``."""
        refusal = self._refusal(hello)
        if refusal is not None:
            await self._refuse(connected, peer, *refusal)
            return
        assert isinstance(hello, Hello)
        logger.debug("%s opened a %s connection: %s", peer, hello.purpose, printable(hello.instance))
        self._connections[hello.purpose] += 1
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                await send_all(connected, encode(self._welcome()))
            if hello.purpose == "control":
                await self._session(Channel(connected)).serve()
            elif isinstance(self._transport, SupportsConnections):
                await self._transport.serve(connected)
        except ProtocolError as error:
            await self._refuse(connected, peer, "no protocol", str(error))
        finally:
            self._connections[hello.purpose] -= 1

    def _session(self, channel: Channel) -> Session:
        return Session(
            channel, self._holdings, self._grants, self._reservations, self._asked, self._transport.cut_off
        )

    def _refusal(self, hello: Hello | ProtocolError) -> tuple[str, str] | None:
        """Return the label and the text of the reason to refuse a connection; ``None`` to accept it."""
        if isinstance(hello, ProtocolError):
            return "no protocol", str(hello)
        if hello.version != VERSION:
            return "another version", (
                f"this instance speaks protocol version {VERSION} and the peer version {hello.version}: "
                "install the same kvtier on both"
            )
        if hello.purpose == "data" and not isinstance(self._transport, SupportsConnections):
            name = self._settings.transport["type"]
            return "wrong purpose", f"the transport here, {name}, accepts no data connections"
        if self._connections.total() >= MAX_CONNECTIONS:
            return "too many connections", f"the limit of {MAX_CONNECTIONS} connections is reached"
        return None

    def _welcome(self) -> Welcome:
        name = self._settings.transport["type"]
        return Welcome(VERSION, self._instance, name, self._transport.endpoint, self._settings.lease)

    async def _refuse(self, connected: socket.socket, peer: str, reason: str, detail: str) -> None:
        self._note_refusal(peer, reason, detail)
        with anyio.move_on_after(REFUSAL_SECONDS), suppress(OSError):
            await send_all(connected, encode(Refused(printable(detail))))

    def _note_refusal(self, peer: str, reason: str, detail: str) -> None:
        self._refused[reason] += 1
        self._warn("refused peer %s: %s", peer, printable(detail))
