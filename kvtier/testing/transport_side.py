"""One of the two sides between which the conformance suite of transports moves bytes.

In the process of the tests and in the other one alike: an arena, what is granted of it, the transport, and
for transports over connections the simplest way to listen and to dial, without any authentication.
"""

from __future__ import annotations

import asyncio
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

from kvtier.arena import Arena
from kvtier.slices import Lease
from kvtier.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.testing.noise import noise, stain
from kvtier.transports.base import Access, Dial, RemoteSpan, SupportsConnections, Transport

MIB = 1 << 20
LOOPBACK = "127.0.0.1"
_PATTERN_BYTES = MIB + 13
"""No multiple of any page or part: bytes that end up at a wrong offset differ."""

DialFrom = Callable[[int], Dial]


class Certificate(NamedTuple):
    """The files of one that vouches for itself, where connections are to go over TLS."""

    certificate: str
    key: str


def pattern(seed: int, length: int) -> bytes:
    """Bytes that are the same for the same seed, and as any others."""
    once = noise(b"pattern %d" % seed, min(length, _PATTERN_BYTES))
    return (once * -(-length // max(len(once), 1)))[:length]


class SimpleGrants:
    """What a side has granted, as plain as the contract allows."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._granted: dict[int, tuple[Access, list[Lease]]] = {}

    @property
    def leases(self) -> int:
        """How many leases the grants hold themselves."""
        return sum(len(slices) for _, slices in self._granted.values())

    def grant(self, lengths: Sequence[int], access: Access, seed: int) -> list[RemoteSpan]:
        """Grant a slice of each length, the first with the bytes of ``pattern(seed)``, then ``seed + 1``."""
        slices: list[Lease] = []
        for index, length in enumerate(lengths):
            lease = self._arena.allocate(length)
            assert lease is not None, "the arena of a test is too small"
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
        if granted is not access or span.length < 0:
            return None
        for lease in slices:
            if lease.offset <= span.offset and span.offset + span.length <= lease.offset + lease.length:
                return lease.share()
        return None


class Side:
    """An open transport with its arena. Made with :meth:`open`."""

    def __init__(self, arena: Arena, transport: Transport, port: int) -> None:
        self.arena = arena
        self.transport = transport
        self.grants = SimpleGrants(arena)
        self.port = port
        """Where it takes connections; 0 where the transport needs none."""

    @property
    def lent(self) -> int:
        """Leases that transfers hold of this arena, beside the grants' own and those in :meth:`room`."""
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
        """Open a transport on an arena whose bytes are all stained, until the block is left.

        Fails where a transfer then still holds a lease.
        """
        arena = Arena.create(capacity)
        await anyio.to_thread.run_sync(stain, arena.view(0, arena.capacity))
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
            assert arena.leases == 0, f"{arena.leases} leases are open after close"
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
        # Nothing may come that was not asked for: idle connections are told from dead ones by that.
        context.num_tickets = 0
    listener = socket.create_server((address, 0), backlog=128)
    listener.setblocking(False)
    with listener:
        tasks = asyncio.ensure_future(_accept(listener, transport.serve, context))
        try:
            yield listener.getsockname()[1]
        finally:
            tasks.cancel()
            with suppress(asyncio.CancelledError):
                await tasks


async def _accept(
    listener: socket.socket,
    serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
    context: ssl.SSLContext | None,
) -> None:
    async def take_on(connected: socket.socket) -> None:
        with suppress(OSError):
            secured = connected if context is None else await _secured(context, connected)
            with secured:
                await serve(secured)

    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener)
            with suppress(BlockingIOError, ConnectionError):
                tasks.start_soon(take_on, listener.accept()[0])


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
    """Opens connections to a side, of this host where no other address is given."""
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
    """For transports that need no connections."""
    raise OSError("this transport was to need no connections")
