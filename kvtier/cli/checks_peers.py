"""Checks of ``kvtier doctor`` on peers: connect to each one like a cache process, and read from it.

The read is for a span that the peer has not granted. The peer answers with a miss, over the same path that
chunks take, and none of its data is accessed.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import anyio

from kvtier.backends.base import Outcome
from kvtier.cli.checks import Check
from kvtier.concurrency.sockets.connection import Connection, Deadline
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import KVTierError, PeerError
from kvtier.logs import printable
from kvtier.memory.arena import Arena
from kvtier.memory.slices import Lease
from kvtier.peers.dialing import ControlConnection, PeerDialer
from kvtier.plugins import Plugins
from kvtier.rpc.authentication import Credentials
from kvtier.settings import Settings
from kvtier.settings.peer import GUESSABLE, GUESSABLE_REMEDY, PeerSettings, split_address
from kvtier.transports.base import Access, RemoteSpan, Transport

TRIAL_BYTES = 4096
INSTANCE_NAME = "kvtier doctor"
"""The instance name sent to peers."""


def check_peers(plugins: Plugins, settings: Settings) -> list[Check]:
    """Check the secret, the port that this instance listens on, and each peer. Blocking."""
    peers = list(dict.fromkeys((*settings.peer.others, *settings.kv_transfer.targets)))
    if settings.peer.listen is None and not peers:
        return []
    try:
        credentials = Credentials.from_settings(settings.peer)
        transport_settings = plugins.transport_settings(settings)
    except KVTierError as error:
        return [Check("peers", "fail", str(error))]
    transport = plugins.transport(transport_settings.type)(transport_settings)
    checks = [Check("peer.secret", "warn", GUESSABLE, GUESSABLE_REMEDY)] if settings.peer.guessable else []
    checks += [_check_listening(settings.peer)] if settings.peer.listen else []
    return checks + anyio.run(_check_all, peers, credentials, transport, transport_settings.type)


async def _check_all(
    peers: Sequence[str], credentials: Credentials, transport: Transport, transport_name: str
) -> list[Check]:
    """Open the transport on a small arena, and connect to peers, one after the other."""
    with closing(Arena.create(TRIAL_BYTES)) as arena:
        try:
            await transport.open(arena, _NoGrants())
            try:
                trial = _Trial(credentials, transport, transport_name, arena.view(0, TRIAL_BYTES))
                return [await trial.check(address) for address in peers]
            finally:
                await transport.close()
        except PeerError as error:
            return [Check("transport", "fail", f"{transport_name}: {error}")]


def _check_listening(peer: PeerSettings) -> Check:
    """Check that the address of ``peer.listen`` can be bound, or is in use already."""
    assert peer.listen is not None
    host, port = split_address(peer.listen)
    name = f"listening on {peer.listen}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Check(name, "ok", "the port is in use, presumably by a running cache process")
        found = f"cannot bind: {error.strerror}"
        return Check(name, "fail", found, "set peer.listen to an address of this host")
    return Check(name, "ok", "the port is free: no cache process runs with these settings")


class _NoGrants:
    """The grants of the doctor: none."""

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        return None

    def arrived(self, span: RemoteSpan, checksum: bytes) -> None:
        pass


@dataclass(frozen=True)
class _Trial:
    """Connects to peers with an open transport, and reads into ``scratch``."""

    credentials: Credentials
    transport: Transport
    transport_name: str
    scratch: memoryview
    threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(1))

    async def check(self, address: str) -> Check:
        """Check one peer."""
        name = f"peer {address}"
        host, port = split_address(address)
        dialer = PeerDialer(host, port, self.credentials, INSTANCE_NAME, self.threads)
        started = time.monotonic()
        try:
            connection = await dialer.dial()
        except TimeoutError:
            return Check(
                name, "fail", "it did not answer in time", f"check that {address} is running and reachable"
            )
        except OSError as error:
            found = f"unreachable: {error.strerror or error}"
            return Check(name, "fail", found, f"start it, or fix {address} in the settings or a firewall")
        except KVTierError as error:
            return Check(name, "fail", str(error))
        try:
            return await self._read(name, dialer, connection, time.monotonic() - started)
        except (OSError, KVTierError) as error:
            return Check(
                name, "fail", f"connected to {printable(connection.welcome.instance)}, then: {error}"
            )
        finally:
            connection.sock.close()

    async def _read(
        self, name: str, dialer: PeerDialer, connection: ControlConnection, seconds: float
    ) -> Check:
        welcome = connection.welcome
        peer_transport = printable(welcome.transport)
        description = (
            f"{printable(welcome.instance)}, {peer_transport}, connected in {_milliseconds(seconds)}"
        )
        if welcome.transport != self.transport_name:
            return Check(
                name,
                "fail",
                description,
                f"peer.transport is {peer_transport} there and {self.transport_name} here: "
                "set the same transport on both sides",
            )

        def dial(deadline: Deadline) -> Connection:
            return dialer.dial_data(connection, deadline)

        link = await self.transport.connect(welcome.endpoint, dial)
        try:
            if self.transport.one_sided:
                return Check(name, "ok", f"{description}; linked")
            started = time.monotonic()
            (outcome,) = await link.read([(RemoteSpan(1, 0, len(self.scratch)), self.scratch)])
            read_time = _milliseconds(time.monotonic() - started)
        finally:
            await link.close()
        if outcome is Outcome.MISS:
            return Check(name, "ok", f"{description}; read answered in {read_time}")
        remedy = "check its log, and that nothing between the hosts drops connections"
        return Check(name, "fail", f"{description}; read not answered", remedy)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
