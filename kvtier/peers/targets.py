"""Which instances a request may have KV transferred to: those that the settings or the controller name.

Connecting reaches into the network of this host, and sends a proof of ``peer.secret``: with it, a server can
try to guess a short secret offline. So an address in a request decides nothing.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Protocol

import anyio

from kvtier.bounded import remember
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import PeerError
from kvtier.logs import RateLimitedLog, printable
from kvtier.peers.roster import MAX_REMEMBERED, normal_address
from kvtier.settings import Settings
from kvtier.settings.peer import join_address, split_address

logger = logging.getLogger("kvtier")

FIND_SECONDS = 5.0
"""Timeout to resolve a name and ask the controller. Meanwhile the chunks are stored as usual."""
RESOLVE_THREADS = 2
KEPT_SECONDS = 3600.0
"""For how long an address that the controller has named is used while it does not answer."""
REFUSED_SECONDS = 5.0
"""For how long an address is refused without asking again."""


class UnnamedTarget(PeerError):
    """Neither the settings nor the controller name an address. Logged by :class:`Targets`."""


class Registered(Protocol):
    """Knows the addresses of all instances, such as a controller."""

    async def who_serves(self, addresses: Sequence[str]) -> list[str] | None:
        """Return those of ``addresses`` at which an instance serves peers; ``None`` if unavailable."""
        ...


class Targets:
    """The addresses that requests may name. Bound to one event loop."""

    def __init__(self, settings: Settings) -> None:
        named = (*settings.kv_transfer.targets, *settings.peer.others)
        self._configured = {normal_address(address) for address in named}
        self._registered: Registered | None = None
        self._found: dict[str, tuple[str, float]] = {}
        """What the controller has named: the address to connect to, and when."""
        self._refused: dict[str, float] = {}
        """Until when an address is refused, on the clock of :func:`time.monotonic`."""
        self._threads = WorkerThreads(RESOLVE_THREADS)
        self._warn = RateLimitedLog(logger)

    def set_registered(self, registered: Registered | None) -> None:
        """Ask this controller from now on; ``None`` for none."""
        self._registered = registered

    async def find(self, to: str) -> str:
        """Return the address to connect to for the address in a request.

        A host name may be that of an instance which the controller knows by its IP address: then it is
        resolved, and the result is the IP address. Raises :class:`UnnamedTarget`, and :class:`PeerError` if
        ``to`` is not an address.
        """
        try:
            wanted = normal_address(to)
        except ValueError as error:
            raise PeerError(f"cannot start a KV transfer: {error}") from error
        if wanted in self._configured:
            return wanted
        found = await self._find_registered(wanted)
        if found is None:
            remedy = "if it is a decode instance, add it to kv_transfer.targets"
            self._warn(
                "KV transfer to %s refused: a request names it, but neither kv_transfer.targets, peer.others "
                "nor a controller does; %s",
                printable(to),
                remedy,
            )
            raise UnnamedTarget(f"neither the settings nor a controller name this address: {remedy}")
        return found

    async def _find_registered(self, wanted: str) -> str | None:
        now = time.monotonic()
        if self._registered is None or self._refused.get(wanted, 0.0) > now:
            return None
        with anyio.move_on_after(FIND_SECONDS):
            named = await self._registered.who_serves([wanted])
            if named == []:
                # Named by its IP address, as most are. A name is resolved for no other purpose.
                addresses = await self._resolve(wanted)
                named = await self._registered.who_serves(addresses) if addresses else []
            if named is not None:  # Else the controller is unavailable, and what it named before counts.
                if not named:
                    self._found.pop(wanted, None)
                    remember(self._refused, wanted, now + REFUSED_SECONDS, MAX_REMEMBERED)
                    return None
                remember(self._found, wanted, (named[0], now), MAX_REMEMBERED)
                return named[0]
        found, at = self._found.get(wanted, ("", 0.0))
        return found if found and now - at < KEPT_SECONDS else None

    async def _resolve(self, address: str) -> list[str]:
        """Return the IP addresses of a host name, with the port; nothing for an IP address."""
        host, port = split_address(address)
        try:
            ip_address(host)
        except ValueError:
            pass
        else:
            return []
        found: list[str] = []
        wanted = True

        def resolve() -> None:
            if not wanted:  # Names that take long would otherwise keep the threads from all later ones.
                return
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(join_address(str(info[4][0]), port) for info in infos))

        try:
            await self._threads(resolve)
        except (OSError, UnicodeError) as error:
            logger.debug("cannot resolve %s: %s", printable(host), error)
        finally:
            wanted = False
        return list(found)
