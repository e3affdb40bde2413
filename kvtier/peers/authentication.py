"""Who may speak to this instance at all: those that know the secret, hold a certificate, or both.

With ``peer.tls`` each side shows a certificate that the authority of the settings has signed, over TLS 1.3;
which host it names is not looked at, since peers have addresses and no names: whoever the authority signs is
a peer. With ``peer.secret`` each side proves that it knows it (:mod:`kvtier.peers.handshake`). With ``tls``
alone the same messages are exchanged under an empty secret, so that there is one sequence to get right.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from kvtier.errors import SettingsError
from kvtier.peers.handshake import Handshake, RefusedHandshake
from kvtier.settings_peer import PeerSettings, TLSSettings
from kvtier.sockets.connection import Connection, TLSConnection
from kvtier.threads import WorkerThreads, spread

ACCEPT_SECONDS = 5.0
"""How long who connects may take to prove who it is."""
TLS_STEPS_AT_ONCE = 2
"""A step of a TLS handshake signs or verifies, which takes a millisecond: too long for the loop."""

ResultT = TypeVar("ResultT")


class Credentials:
    """What this instance proves itself by, and what it wants of others. Made with :meth:`of`."""

    def __init__(self, secret: bytes, client: ssl.SSLContext | None, server: ssl.SSLContext | None) -> None:
        self._secret = secret
        self._client_context = client
        self._server_context = server
        self._hop = WorkerThreads(TLS_STEPS_AT_ONCE)

    @classmethod
    def of(cls, settings: PeerSettings) -> Credentials:
        """Read what the settings name, once. Raises :class:`SettingsError`, which names the setting."""
        secret, tls = settings.secret, settings.tls
        if secret is None and tls is None:
            raise SettingsError("peer: write peer.secret or peer.tls, by which peers prove who they are")
        return cls(
            b"" if secret is None else secret.get_secret_value().encode(),
            None if tls is None else _context(tls, ssl.PROTOCOL_TLS_CLIENT),
            None if tls is None else _context(tls, ssl.PROTOCOL_TLS_SERVER),
        )

    # The side that connects: blocks, in a worker thread.

    def connection(self, family: int, host: str) -> Connection:
        """One that is not yet connected, for ``Dialer``."""
        if self._client_context is None:
            return Connection(family)
        return _PeerTLSConnection(family, self._client_context, host)

    def prove_to_server(self, connection: Connection) -> None:
        """Prove who this is, and have the other side do so, within the connection's deadline.

        Nothing else is said to who cannot. Raises :class:`kvtier.errors.PeerError`, whose message says what
        to mend, and ``OSError`` where the connection is lost or too slow.
        """
        handshake = Handshake("client", self._secret)
        opened = False
        try:
            connection.send([handshake.opening])
            while handshake.wanted:
                data = bytearray(handshake.wanted)
                connection.take(memoryview(data))
                answer = handshake.feed(bytes(data))
                if answer:
                    connection.send([answer])
                    opened = True
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise RefusedHandshake("refused", self._told_nothing(opened=opened)) from error
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error
        except TimeoutError as error:
            raise TimeoutError("it does not prove in time that it is a peer") from error

    def _told_nothing(self, *, opened: bool) -> str:
        """Why a server may have closed the connection without a word."""
        if opened:
            return "it refuses: peer.secret is another one there"
        if self._client_context is None:
            return "it closes at once: it is too busy, no kvtier peer, or peer.tls is written there alone"
        return "it closes at once: it is too busy, or does not accept this instance's certificate"

    # The side that listens: in the event loop.

    async def accept(self, connected: socket.socket) -> socket.socket:
        """The socket to go on with, once the other side has proved who it is; non-blocking, perhaps TLS.

        It takes the place of ``connected``, which is of no more use; the caller closes it. Where this fails,
        everything is closed. Raises :class:`RefusedHandshake`, and ``OSError`` where the connection is lost.
        """
        connected.setblocking(False)
        try:
            with anyio.fail_after(ACCEPT_SECONDS):
                if self._server_context is not None:
                    # Nothing is read or written yet.
                    connected = self._server_context.wrap_socket(
                        connected, server_side=True, do_handshake_on_connect=False
                    )
                    await self._shake_tls_hands(connected)
                await self._prove_to_client(connected)
        except TimeoutError as error:
            connected.close()
            raise RefusedHandshake("too slow", "it has not proved in time who it is") from error
        except BaseException:
            connected.close()
            raise
        return connected

    async def _shake_tls_hands(self, secured: ssl.SSLSocket) -> None:
        async def step() -> None:
            await spread(ssl.SSLSocket.do_handshake, [secured], parts=1, hop=self._hop)

        try:
            await _when_possible(secured, step, anyio.wait_readable)
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error

    async def _prove_to_client(self, connected: socket.socket) -> None:
        handshake = Handshake("server", self._secret)
        await send_all(connected, handshake.opening)
        while handshake.wanted:
            await send_all(connected, handshake.feed(await receive_exactly(connected, handshake.wanted)))


class _PeerTLSConnection(TLSConnection):
    """One that says in words why its peer and it do not come together."""

    def _set_up(self) -> None:
        try:
            super()._set_up()
        except ssl.SSLError as error:
            raise _tls_refusal(error) from error


async def receive_exactly(connected: socket.socket, length: int) -> bytes:
    """So many bytes of a non-blocking socket, and none beyond them. Raises ``OSError``."""
    data = bytearray(length)
    view = memoryview(data)

    async def receive() -> int:
        return connected.recv_into(view)

    while view:
        received = await _when_possible(connected, receive, anyio.wait_readable)
        if not received:
            raise ConnectionResetError("the other side has closed")
        view = view[received:]
    return bytes(data)


async def send_all(connected: socket.socket, data: bytes) -> None:
    """Send bytes over a non-blocking socket. Raises ``OSError``."""
    view = memoryview(data)

    async def send() -> int:
        return connected.send(view)

    while view:
        view = view[await _when_possible(connected, send, anyio.wait_writable) :]


async def _when_possible(
    connected: socket.socket,
    step: Callable[[], Awaitable[ResultT]],
    wait: Callable[[socket.socket], Awaitable[None]],
) -> ResultT:
    """Try a step of a non-blocking socket until it does not have to wait. Raises ``OSError``."""
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
    """For one side. Raises :class:`SettingsError`."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=tls.authority)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"peer.tls.authority: cannot use {tls.authority}: {_why(error)}") from error
    for name, path in (("certificate", tls.certificate), ("key", tls.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise SettingsError(f"peer.tls.{name}: cannot read {path}: {_why(error)}") from error
    try:
        # Asked for a password, OpenSSL would wait at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"peer.tls.certificate and peer.tls.key: cannot use {tls.certificate} with {tls.key}: "
            f"{_why(error)}"
        ) from error
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Nothing may come that was not asked for: connections that idle are told from dead ones by that.
        context.num_tickets = 0
    return context


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _tls_refusal(error: ssl.SSLError) -> RefusedHandshake:
    """In words, from what OpenSSL says."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedHandshake(
            "wrong certificate",
            f"its certificate is not accepted: {error.verify_message}: see peer.tls.authority",
        )
    reason = (error.reason or "").replace("_", " ").lower()
    if any(sign in reason for sign in ("wrong version number", "http request", "unexpected message")):
        return RefusedHandshake(
            "no TLS there", "it does not speak TLS: write peer.tls on both sides, or on neither"
        )
    if "did not return a certificate" in reason:
        return RefusedHandshake("wrong certificate", "it shows no certificate: write peer.tls there, too")
    if "alert" in reason:
        return RefusedHandshake(
            "refused", f"it refuses this instance's certificate ({reason}): see peer.tls.certificate"
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return RefusedHandshake("refused", "it closes the connection instead of speaking TLS")
    return RefusedHandshake("TLS failed", f"TLS does not work with it: {reason or error}")
