"""Authentication of peers: a shared secret, TLS certificates, or both.

With ``peer.tls`` both sides present a certificate signed by the configured authority, over TLS 1.3. The host
name is not checked, because peers have addresses and no names: any certificate that the authority signed is
accepted. With ``peer.secret`` both sides prove that they know it (:mod:`kvtier.rpc.handshake`). With
``tls`` alone the same messages are exchanged under an empty secret, so that there is one sequence to get
right.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from kvtier.concurrency.sockets.connection import Connection, TLSConnection
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import SettingsError
from kvtier.rpc.handshake import Handshake, RefusedHandshake
from kvtier.settings.peer import PeerSettings, TLSSettings

ACCEPT_SECONDS = 5.0
"""Timeout for the authentication of an incoming connection."""
TLS_THREADS = 2
"""A TLS handshake step signs or verifies, which takes a millisecond: too long for the event loop."""

ResultT = TypeVar("ResultT")


class Credentials:
    """This instance's secret and certificates. Created with :meth:`from_settings`."""

    def __init__(self, secret: bytes, client: ssl.SSLContext | None, server: ssl.SSLContext | None) -> None:
        self._secret = secret
        self._client_context = client
        self._server_context = server
        self._executor = WorkerThreads(TLS_THREADS)

    @classmethod
    def from_settings(cls, settings: PeerSettings) -> Credentials:
        """Load the secret and certificates. Raises :class:`SettingsError`, which names the setting."""
        secret, tls = settings.secret, settings.tls
        if secret is None and tls is None:
            raise SettingsError("peer: set peer.secret or peer.tls, which authenticate peers")
        return cls(
            b"" if secret is None else secret.get_secret_value().encode(),
            None if tls is None else _context(tls, ssl.PROTOCOL_TLS_CLIENT),
            None if tls is None else _context(tls, ssl.PROTOCOL_TLS_SERVER),
        )

    # Client side: blocks, runs in a worker thread.

    def connection(self, family: int, host: str) -> Connection:
        """Create an unconnected connection, for ``Dialer``."""
        if self._client_context is None:
            return Connection(family)
        return _PeerTLSConnection(family, self._client_context, host)

    def prove_to_server(self, connection: Connection, version: int) -> None:
        """Authenticate both sides, which use protocol ``version``, within the connection's deadline.

        Nothing else is sent to a server that fails. Raises :class:`kvtier.errors.PeerError`, whose message
        names the fix, and ``OSError`` if the connection is lost or too slow.
        """
        handshake = Handshake("client", self._secret, version)
        opened = False
        try:
            connection.send([handshake.opening])
            while handshake.needed:
                answer = handshake.feed(connection.read(handshake.needed))
                if answer:
                    connection.send([answer])
                    opened = True
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise RefusedHandshake("refused", self._describe_close(opened=opened)) from error
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error
        except TimeoutError as error:
            raise TimeoutError("timed out authenticating the server") from error

    def _describe_close(self, *, opened: bool) -> str:
        """Return likely reasons why a server closed the connection without an error message."""
        if opened:
            reason = " during the handshake: it has exited, or its peer.secret differs"
        elif self._client_context is None:
            reason = ": it is overloaded, no kvtier peer, or only it has peer.tls set"
        else:
            reason = ": it is overloaded, or rejects this instance's certificate"
        return f"the server closed the connection{reason}"

    # Server side: runs in the event loop.

    async def accept(self, connected: socket.socket, version: int) -> socket.socket:
        """Authenticate a client and return the socket to use from now on: non-blocking, TLS if configured.

        Both sides must use protocol ``version``. The socket replaces ``connected``, and the caller closes it.
        On failure everything is closed. Raises :class:`RefusedHandshake`, and ``OSError`` if the connection
        is lost.
        """
        connected.setblocking(False)
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                if self._server_context is not None:
                    # Performs no I/O yet.
                    connected = self._server_context.wrap_socket(
                        connected, server_side=True, do_handshake_on_connect=False
                    )
                    await self._tls_handshake(connected)
                await self._prove_to_client(connected, version)
        except TimeoutError as error:
            connected.close()
            raise RefusedHandshake("timeout", "timed out authenticating it") from error
        except BaseException:
            connected.close()
            raise
        return connected

    async def _tls_handshake(self, secured: ssl.SSLSocket) -> None:
        async def step() -> None:
            await spread(ssl.SSLSocket.do_handshake, [secured], parts=1, executor=self._executor)

        try:
            await _retry_when_ready(secured, step, anyio.wait_readable)
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error

    async def _prove_to_client(self, connected: socket.socket, version: int) -> None:
        handshake = Handshake("server", self._secret, version)
        await send_all(connected, handshake.opening)
        while handshake.needed:
            await send_all(connected, handshake.feed(await receive_exactly(connected, handshake.needed)))


class _PeerTLSConnection(TLSConnection):
    """A TLS connection that explains why the handshake failed."""

    def _set_up(self) -> None:
        try:
            super()._set_up()
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error


async def receive_exactly(connected: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes from a non-blocking socket. Raises ``OSError``."""
    data = bytearray(length)
    view = memoryview(data)

    async def receive() -> int:
        return connected.recv_into(view)

    while view:
        received = await _retry_when_ready(connected, receive, anyio.wait_readable)
        if not received:
            raise ConnectionResetError("the other side closed the connection")
        view = view[received:]
    return bytes(data)


async def send_all(connected: socket.socket, data: bytes) -> None:
    """Send all bytes over a non-blocking socket. Raises ``OSError``."""
    view = memoryview(data)

    async def send() -> int:
        return connected.send(view)

    while view:
        view = view[await _retry_when_ready(connected, send, anyio.wait_writable) :]


async def _retry_when_ready(
    connected: socket.socket,
    step: Callable[[], Awaitable[ResultT]],
    wait: Callable[[socket.socket], Awaitable[None]],
) -> ResultT:
    """Retry an operation on a non-blocking socket until it does not block. Raises ``OSError``."""
    while True:
        try:
            return await step()
        except BlockingIOError:
            await wait(connected)
        except ssl.SSLWantReadError:
            await anyio.wait_readable(connected)
        except ssl.SSLWantWriteError:
            await anyio.wait_writable(connected)


def _context(tls: TLSSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=tls.authority)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"peer.tls.authority: cannot use {tls.authority}: {_describe(error)}") from error
    for name, path in (("certificate", tls.certificate), ("key", tls.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise SettingsError(f"peer.tls.{name}: cannot read {path}: {_describe(error)}") from error
    try:
        # Without a callback, OpenSSL would prompt for a password at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"peer.tls.certificate and peer.tls.key: cannot use {tls.certificate} with {tls.key}: "
            f"{_describe(error)}"
        ) from error
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Tickets would be unsolicited data, and an idle connection counts as closed once it is readable.
        context.num_tickets = 0
    return context


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the file is not PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _tls_refusal(error: ssl.SSLError) -> RefusedHandshake:
    """Translate an OpenSSL error into a message that names the fix."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedHandshake(
            "wrong certificate",
            f"the other side's certificate is not accepted: {error.verify_message}: see peer.tls.authority",
        )
    reason = (error.reason or "").replace("_", " ").lower()
    if any(sign in reason for sign in ("wrong version number", "http request", "unexpected message")):
        return RefusedHandshake(
            "TLS mismatch", "the other side does not speak TLS: set peer.tls on both sides, or on neither"
        )
    if "did not return a certificate" in reason:
        return RefusedHandshake(
            "wrong certificate", "the other side presents no certificate: set peer.tls there, too"
        )
    if "alert" in reason:
        return RefusedHandshake(
            "refused",
            f"the other side rejects this instance's certificate ({reason}): see peer.tls.certificate",
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return RefusedHandshake("refused", "the other side closed the connection during the TLS handshake")
    return RefusedHandshake("TLS failed", f"TLS handshake failed: {reason or error}")
