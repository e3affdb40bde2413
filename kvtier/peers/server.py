"""Peer server: accepts connections on one port, and authenticates each before reading messages."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
from anyio import CancelScope

from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.errors import PeerError, ProtocolError
from kvtier.logs import RateLimitedLog, printable
from kvtier.memory.header import IDENTITY
from kvtier.observability.traces.spans import NO_TRACER, Tracer
from kvtier.peers.grants import GrantBook
from kvtier.peers.link_codec import GrantEncoder
from kvtier.peers.lookup import PeerLookup
from kvtier.peers.protocol import VERSION, Hello, Welcome, decode_from_client
from kvtier.peers.reservations import Reservations
from kvtier.peers.session import Session
from kvtier.rpc.authentication import ACCEPT_SECONDS, Credentials, receive_exactly, send_all
from kvtier.rpc.endpoint import REFUSAL_SECONDS
from kvtier.rpc.frames import Refused, check_hello, encode, receive_frame
from kvtier.rpc.handshake import RefusedHandshake
from kvtier.rpc.listener import accept_all
from kvtier.rpc.wire import SocketWire
from kvtier.settings.peer import PeerSettings, split_address
from kvtier.transports.base import SupportsConnections, Transport

logger = logging.getLogger("kvtier")

MAX_CONNECTIONS = 1024
MAX_UNAUTHENTICATED = 64
"""Limit of unauthenticated connections. A further one evicts the oldest."""
MAX_HELLO_BYTES = 4096
BACKLOG = 256


class PeerServer:
    """Serves all peers of this instance. The cache and the transport must stay open while it runs."""

    def __init__(
        self,
        cache: TieredCache,
        settings: PeerSettings,
        transport: Transport,
        grants: GrantBook,
        reservations: Reservations,
        instance: str,
        tracer: Tracer = NO_TRACER,
        encoder: GrantEncoder | None = None,
    ) -> None:
        """Load the certificates. Raises :class:`kvtier.errors.SettingsError`."""
        self._tracer = tracer
        self._encoder = encoder
        self._settings = settings
        self._transport = transport
        self._grants = grants
        self._instance = instance
        self.serve_engine: Callable[[socket.socket], Awaitable[None]] | None = None
        """Serves the scheduler of an engine that has workers on this host, set by the bridge. It closes its
        socket and raises nothing."""
        self._lookup = PeerLookup(cache)
        self._reservations = reservations
        self._credentials = Credentials.from_settings(settings)
        self._warn = RateLimitedLog(logger)
        self._address: tuple[str, int] | None = None
        self._unauthenticated: dict[CancelScope, None] = {}
        self._connections: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()

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
            "granted_bytes": self._grants.granted_bytes,
            "granted": self._grants.granted,
            "expired": self._grants.expired,
            "reserving": self._reservations.status(),
            "requests": dict(self._requests),
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
                async with open_background_tasks() as tasks:
                    tasks.start_soon(accept_all, listener, self._serve)
                    tasks.start_soon(self._expire)
                    yield
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

    async def _serve(self, connected: socket.socket, address: tuple[str, int]) -> None:
        """Handle one connection, and close it. Raises nothing."""
        peer = f"{address[0]} port {address[1]}"
        try:
            connected, message = await self._identify(connected)
            with connected:
                await self._admit(connected, message, peer)
        except RefusedHandshake as error:
            self._note_refusal(peer, error.reason, str(error))
        except OSError as error:
            logger.debug("connection from %s closed: %s", peer, error)
        except Exception:
            # Last resort: an error with one peer must not affect the others.
            self._refused["internal error"] += 1
            logger.exception("connection from peer %s failed", peer)

    async def _identify(self, connected: socket.socket) -> tuple[socket.socket, object]:
        """Authenticate a connection, and read its first message, or return why that is invalid.

        Raises :class:`RefusedHandshake` and ``OSError``, after closing the connection.
        """
        scope = CancelScope()
        # Connections that never authenticate would otherwise keep peers out.
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        self._unauthenticated[scope] = None
        try:
            with scope:
                # Messages are short, and the other side waits for each.
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connected = await self._credentials.accept(connected, VERSION)
                return connected, await self._read_message(connected)
        except BaseException:
            connected.close()
            raise
        finally:
            self._unauthenticated.pop(scope, None)
        connected.close()
        raise RefusedHandshake("too many unauthenticated", "too many unauthenticated connections")

    async def _read_message(self, connected: socket.socket) -> object:
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                return decode_from_client(
                    await receive_frame(partial(receive_exactly, connected), MAX_HELLO_BYTES)
                )
        except ProtocolError as error:
            return error
        except TimeoutError as error:
            raise RefusedHandshake("timeout", "timed out waiting for Hello") from error

    async def _admit(self, connected: socket.socket, hello: object, peer: str) -> None:
        """Serve the connection, or refuse it with a reason. Raises ``OSError``."""
        refusal = self._refusal(hello)
        if refusal is not None:
            self._note_refusal(peer, *refusal)
            with anyio.move_on_after(REFUSAL_SECONDS), suppress(OSError):
                await send_all(connected, encode(Refused(printable(refusal[1]))))
            return
        assert isinstance(hello, Hello)
        logger.debug("%s opened a %s connection: %s", peer, hello.purpose, printable(hello.instance))
        self._connections[hello.purpose] += 1
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                await send_all(connected, encode(self._welcome()))
            if hello.purpose == "control":
                await self._serve_control(connected, peer)
            elif hello.purpose == "engine":
                assert self.serve_engine is not None
                await self.serve_engine(connected)
            elif isinstance(self._transport, SupportsConnections):
                await self._transport.serve(connected)
        finally:
            self._connections[hello.purpose] -= 1

    async def _serve_control(self, connected: socket.socket, peer: str) -> None:
        session = Session(
            SocketWire(connected),
            self._lookup,
            self._grants,
            self._reservations,
            self._requests,
            self._tracer,
            self._encoder,
        )
        error = await session.serve()
        if isinstance(error, ProtocolError):
            self._note_refusal(peer, "protocol error", str(error))
        else:
            logger.debug("connection from %s closed: %s", peer, printable(str(error)))

    def _refusal(self, message: object) -> tuple[str, str] | None:
        """Return the label and the text of the reason to refuse a connection; ``None`` to accept it."""
        if isinstance(message, ProtocolError):
            return "protocol error", str(message)
        try:
            hello = check_hello(message, Hello, VERSION)
        except ProtocolError as error:
            return "version mismatch" if isinstance(message, Hello) else "protocol error", str(error)
        if hello.purpose == "data" and not isinstance(self._transport, SupportsConnections):
            name = self._settings.transport["type"]
            return "wrong purpose", f"the transport here, {name}, accepts no data connections"
        if hello.purpose == "engine" and self.serve_engine is None:
            return "wrong purpose", "this instance serves no engines"
        if self._connections.total() >= MAX_CONNECTIONS:
            return "too many connections", f"the limit of {MAX_CONNECTIONS} connections is reached"
        return None

    def _welcome(self) -> Welcome:
        name = self._settings.transport["type"]
        code = IDENTITY if self._encoder is None else self._encoder.code
        return Welcome(VERSION, self._instance, name, self._transport.endpoint, self._settings.lease, code)

    def _note_refusal(self, peer: str, reason: str, detail: str) -> None:
        self._refused[reason] += 1
        self._warn("refused peer %s: %s", peer, printable(detail))
