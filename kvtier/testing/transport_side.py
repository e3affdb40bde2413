"""One of the two sides of the transport conformance suite.

Used in the test process and in the other process alike: an arena, its grants, the transport, and for
transports over connections a minimal listener and dialer without authentication.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from kvtier.concurrency.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.concurrency.tasks import open_tasks
from kvtier.memory.arena import Arena
from kvtier.memory.slices import Lease
from kvtier.testing.noise import noise, poison
from kvtier.transports.base import Access, Dial, RemoteSpan, SupportsConnections, Transport

MIB = 1 << 20
LOOPBACK = "127.0.0.1"
_PATTERN_BYTES = MIB + 13
"""Not a multiple of any page or part size, so that bytes at a wrong offset differ."""


class Certificate(NamedTuple):
    """The files of a self-signed certificate, for connections over TLS."""

    certificate: str
    key: str


def pattern(seed: int, length: int) -> bytes:
    """Return pseudo-random bytes that depend on the seed only."""
    once = noise(b"pattern %d" % seed, min(length, _PATTERN_BYTES))
    return (once * -(-length // max(len(once), 1)))[:length]


class SimpleGrants:
    """A minimal implementation of ``Grants``."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._granted: dict[int, tuple[Access | None, list[Lease]]] = {}

    @property
    def leases(self) -> int:
        """Number of leases held by the grants themselves."""
        return sum(len(slices) for _, slices in self._granted.values())

    def grant(self, lengths: Sequence[int], access: Access | None, seed: int) -> list[RemoteSpan]:
        """Grant a slice of each length, filled with ``pattern(seed)``, ``pattern(seed + 1)`` and so on.

        ``access``: ``None`` allows both kinds.
        """
        slices: list[Lease] = []
        for index, length in enumerate(lengths):
            lease = self._arena.allocate(length)
            assert lease is not None, "the test's arena is too small"
            lease.view[:] = pattern(seed + index, length)
            slices.append(lease)
        self._arena.settle()
        number = secrets.randbits(63)
        self._granted[number] = (access, slices)
        return [RemoteSpan(number, lease.offset, lease.length) for lease in slices]

    def revoke(self, number: int) -> None:
        """End a grant."""
        _, slices = self._granted.pop(number)
        for lease in slices:
            lease.release()

    def clear(self) -> None:
        """End all grants."""
        for number in list(self._granted):
            self.revoke(number)

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """See :class:`kvtier.transports.base.Grants`."""
        granted, slices = self._granted.get(span.grant, (None, []))
        if granted not in (access, None) or span.length < 0:
            return None
        for lease in slices:
            if lease.offset <= span.offset and span.offset + span.length <= lease.offset + lease.length:
                return lease.share()
        return None


class Side:
    """An open transport with its arena. Create with :meth:`open`."""

    def __init__(self, arena: Arena, transport: Transport, port: int) -> None:
        self.arena = arena
        self.transport = transport
        self.grants = SimpleGrants(arena)
        self.port = port
        """The port it listens on; 0 if the transport needs no connections."""

    @property
    def transfer_leases(self) -> int:
        """Number of leases on this arena, without those of the grants."""
        return self.arena.leases - self.grants.leases

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        kind: type[Transport],
        settings: Mapping[str, Any],
        capacity: int,
        certificate: Certificate | None = None,
        address: str = LOOPBACK,
    ) -> AsyncIterator[Side]:
        """Open a transport on an arena filled with a sentinel byte. Close it when the block exits.

        Fails if a transfer holds a lease then.
        """
        arena = Arena.create(capacity)
        await anyio.to_thread.run_sync(poison, arena.view(0, arena.capacity))
        transport = kind(kind.settings_type.model_validate(dict(settings)))
        side = cls(arena, transport, 0)
        try:
            await transport.open(arena, side.grants)
            try:
                async with _listening(transport, certificate, address) as side.port:
                    yield side
            finally:
                await transport.close()
                side.grants.clear()
            assert arena.leases == 0, f"{arena.leases} leases are still open after close"
        finally:
            arena.close()


@asynccontextmanager
async def _listening(
    transport: Transport, certificate: Certificate | None, address: str
) -> AsyncIterator[int]:
    if not isinstance(transport, SupportsConnections):
        yield 0
        return
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        context.load_verify_locations(certificate.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        # No session tickets: an idle connection with unread data counts as broken.
        context.num_tickets = 0
    listener = socket.create_server((address, 0), backlog=128)
    listener.setblocking(False)
    with listener:
        async with open_tasks() as tasks:
            tasks.start_soon(_accept, listener, transport.serve, context)
            try:
                yield listener.getsockname()[1]
            finally:
                tasks.cancel_scope.cancel()


async def _accept(
    listener: socket.socket,
    serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
    context: ssl.SSLContext | None,
) -> None:
    async def serve_connection(connected: socket.socket) -> None:
        with suppress(OSError):
            secured = connected if context is None else await _secured(context, connected)
            with secured:
                await serve(secured)

    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener)
            with suppress(BlockingIOError, ConnectionError):
                tasks.start_soon(serve_connection, listener.accept()[0])


async def _secured(context: ssl.SSLContext, connected: socket.socket) -> socket.socket:
    secured = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
    secured.settimeout(5)
    try:
        await anyio.to_thread.run_sync(secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


def dial_to(port: int, certificate: Certificate | None = None, address: str = LOOPBACK) -> Dial:
    """Return a ``Dial`` to a side, by default on this host."""
    return partial(_dial, (address, port), certificate)


def _dial(address: tuple[str, int], certificate: Certificate | None, deadline: Deadline) -> Connection:
    connection: Connection
    if certificate is None:
        connection = Connection(socket.AF_INET)
    else:
        context = ssl.create_default_context(cafile=certificate.certificate)
        context.load_cert_chain(Path(certificate.certificate), Path(certificate.key))
        connection = TLSConnection(socket.AF_INET, context, LOOPBACK)
    try:
        with deadline.bounds(connection):
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def dial_nowhere(_: Deadline) -> Connection:
    """Raise ``OSError``. The ``Dial`` for transports that need no connections."""
    raise OSError("this transport must not need connections")
