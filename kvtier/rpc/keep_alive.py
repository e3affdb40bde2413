"""Detects an unresponsive peer at the other end of a connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import anyio

from kvtier.errors import ChannelError
from kvtier.rpc.endpoint import Endpoint

PARTS = 4


class Timeouts(NamedTuple):
    """In seconds."""

    ping: float
    """Idle time after which the other side is pinged."""
    unresponsive: float
    """Timeout of a ping, after which the other side counts as unresponsive."""
    disconnect: float
    """Timeout of a ping, after which the connection is given up. A cut network is not detected otherwise."""


class KeepAlive:
    """Pings the other side of a connection while it is idle."""

    def __init__(
        self,
        endpoint: Endpoint,
        timeouts: Timeouts,
        *,
        on_unresponsive: Callable[[bool], None] = lambda _: None,
        on_round_trip: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``on_unresponsive``: called when that changes. ``on_round_trip``: called with seconds."""
        self.unresponsive = False
        """Whether a ping has timed out and nothing has answered it yet."""
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._on_unresponsive = on_unresponsive
        self._on_round_trip = on_round_trip

    async def run(self) -> None:
        """Ping until a ping is not answered in time, or the connection ends."""
        while await self._ping():
            await self._wait_idle(self._timeouts.ping)

    async def probe(self, seconds: float) -> bool:
        """Return whether a ping is answered within ``seconds``. Raises :class:`ChannelError`."""
        sent_at = time.monotonic()
        with anyio.move_on_after(seconds):
            await self._endpoint.ping().reply()
            self._on_round_trip(time.monotonic() - sent_at)
            return True
        return False

    async def _wait_idle(self, seconds: float) -> None:
        idle = 0.0
        while idle < seconds:
            await anyio.sleep(seconds - idle)
            idle = time.monotonic() - self._endpoint.last_message_at

    async def _ping(self) -> bool:
        sent_at = time.monotonic()
        try:
            call = self._endpoint.ping()
        except ChannelError:
            return False
        for _ in range(PARTS):
            # In parts, so that a stall of this event loop does not count against the other side.
            await call.wait(self._timeouts.unresponsive / PARTS)
        if not call.settled:
            self._set_unresponsive(True)
            await call.wait(self._timeouts.disconnect - self._timeouts.unresponsive)
        if call.error is not None or not call.settled:
            return False
        self._on_round_trip(time.monotonic() - sent_at)
        if self.unresponsive:
            self._set_unresponsive(False)
        return True

    def _set_unresponsive(self, unresponsive: bool) -> None:
        self.unresponsive = unresponsive
        self._on_unresponsive(unresponsive)
