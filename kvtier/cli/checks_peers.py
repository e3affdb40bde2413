"""What ``kvtier doctor`` does with peers: calls each of them as a cache process would, and reads from it.

What is read is something that the peer has not granted: it says that it has not, over the same way on which
chunks travel, and nothing of what it holds is touched.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvtier.arena import Arena
from kvtier.backends.base import Outcome
from kvtier.cli.checks import Check
from kvtier.errors import KVTierError, PeerError
from kvtier.peers.authentication import Credentials
from kvtier.peers.dialling import Called, Caller, printable
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.settings_peer import PeerSettings, split_address
from kvtier.slices import Lease
from kvtier.sockets.connection import Connection, Deadline
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Access, RemoteSpan, Transport

TRIAL_BYTES = 4096
NOBODY = "kvtier doctor"
"""What the peer is told that calls."""


def check_peers(plugins: Plugins, settings: Settings) -> list[Check]:
    """A check for the port that this instance listens on, and one for each peer. Blocks meanwhile."""
    if not settings.peer.used:
        return []
    try:
        credentials = Credentials.of(settings.peer)
        transport_settings = plugins.transport_settings(settings)
    except KVTierError as error:
        return [Check("peers", "fail", str(error))]
    transport = plugins.transport(transport_settings.type)(transport_settings)
    checks = [_check_listening(settings.peer)] if settings.peer.listen else []
    return checks + anyio.run(_check_all, settings.peer, credentials, transport, transport_settings.type)


async def _check_all(
    peer: PeerSettings, credentials: Credentials, transport: Transport, transport_name: str
) -> list[Check]:
    try:
        async with _opened(transport) as scratch:
            trial = _Trial(credentials, transport, transport_name, scratch)
            return [await trial.check(address) for address in peer.others]
    except PeerError as error:
        return [Check("transport", "fail", f"{transport_name}: {error}")]


def _check_listening(peer: PeerSettings) -> Check:
    """Whether the port of ``peer.listen`` can be had, or is in use already."""
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
            return Check(name, "ok", "the port is in use, by a running cache process if all is well")
        found = f"it cannot be had: {error.strerror}"
        return Check(name, "fail", found, "write an address of this host in peer.listen")
    return Check(name, "ok", "the port is free: no cache process of these settings runs")


class _Nothing:
    """What the doctor grants to others."""

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        return None


@asynccontextmanager
async def _opened(transport: Transport) -> AsyncIterator[memoryview]:
    """The transport at work on a small arena of its own; some of that to read into."""
    arena = Arena.create(TRIAL_BYTES)
    try:
        await transport.open(arena, _Nothing())
        try:
            yield arena.view(0, TRIAL_BYTES)
        finally:
            await transport.close()
    finally:
        arena.close()


class _Trial:
    """Calls one peer after the other."""

    def __init__(
        self, credentials: Credentials, transport: Transport, transport_name: str, scratch: memoryview
    ) -> None:
        self._credentials = credentials
        self._transport = transport
        self._transport_name = transport_name
        self._scratch = scratch
        self._threads = WorkerThreads(1)

    async def check(self, address: str) -> Check:
        """What became of calling one peer."""
        name = f"peer {address}"
        host, port = split_address(address)
        caller = Caller(host, port, self._credentials, NOBODY, self._threads)
        started = time.monotonic()
        try:
            called = await caller.call()
        except TimeoutError:
            return Check(
                name, "fail", "it does not answer in time", f"see that {address} runs and is reached"
            )
        except OSError as error:
            found = f"it cannot be reached: {error.strerror or error}"
            return Check(name, "fail", found, f"start it, or mend {address} in peer.others or a firewall")
        except KVTierError as error:
            return Check(name, "fail", str(error))
        try:
            return await self._read(name, caller, called, time.monotonic() - started)
        except (OSError, KVTierError) as error:
            return Check(name, "fail", f"{printable(called.welcome.instance)} welcomes us, then: {error}")
        finally:
            called.connected.close()

    async def _read(self, name: str, caller: Caller, called: Called, seconds: float) -> Check:
        welcome = called.welcome
        there = printable(welcome.transport)
        who = f"{printable(welcome.instance)}, {there}, called in {_milliseconds(seconds)}"
        if welcome.transport != self._transport_name:
            return Check(
                name,
                "fail",
                who,
                f"peer.transport is {there} there and {self._transport_name} here: "
                "write the same on both sides",
            )

        def dial(deadline: Deadline) -> Connection:
            return caller.dial_like(called, deadline)

        link = await self._transport.connect(welcome.endpoint, dial)
        try:
            if self._transport.one_sided:
                return Check(name, "ok", f"{who}; linked")
            started = time.monotonic()
            (outcome,) = await link.read([(RemoteSpan(1, 0, len(self._scratch)), self._scratch)])
            answered = _milliseconds(time.monotonic() - started)
        finally:
            await link.close()
        if outcome is Outcome.MISS:
            return Check(name, "ok", f"{who}; answers a read in {answered}")
        remedy = "see its log, and that nothing between the hosts cuts connections"
        return Check(name, "fail", f"{who}; a read is not answered", remedy)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
