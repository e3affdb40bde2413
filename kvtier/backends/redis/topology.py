"""Map keys to servers: a single server, the primary behind sentinels, or the slots of a cluster.

Slots: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#key-distribution-model
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Sequence
from typing import NamedTuple

from anyio import Lock

from kvtier.backends.redis.control import SLOTS, Control, ControlFailed
from kvtier.backends.redis.url import Endpoint, PoolURL
from kvtier.concurrency.sockets.connection import Deadline


class Placement(NamedTuple):
    """The mapping of keys to servers."""

    endpoints: Sequence[Endpoint]
    """Every server, without duplicates."""
    by_slot: Sequence[Endpoint | None] | None = None
    """The server of each hash slot, or ``None`` for unassigned slots. Not set if one server has all keys."""


class Topology(ABC):
    """Discovers and caches the placement of a pool. For use from the event loop."""

    has_slots = False
    """Whether servers may redirect commands to each other."""

    def __init__(self, pool_url: PoolURL, control: Control) -> None:
        self._pool_url = pool_url
        self._control = control
        self._known: Placement | None = None
        self._lock = Lock()

    async def placement(self, deadline: Deadline) -> Placement:
        """Return the placement. Raises :class:`ControlFailed` or ``TimeoutError``."""
        if self._known is not None:
            return self._known  # The lock would cost each batch an event loop iteration.
        async with self._lock:
            if self._known is None:
                self._known = await self._discover(deadline)
            return self._known

    def invalidate(self) -> None:
        """Drop the cached placement; the next batch discovers it again."""
        self._known = None

    @abstractmethod
    async def _discover(self, deadline: Deadline) -> Placement: ...


class Single(Topology):
    """A single server."""

    async def _discover(self, deadline: Deadline) -> Placement:
        return Placement(self._pool_url.endpoints)


class Sentinel(Topology):
    """The current primary of a service, according to its sentinels."""

    async def _discover(self, deadline: Deadline) -> Placement:
        failure = ControlFailed(self._pool_url.endpoints[0])
        sentinels = self._pool_url.endpoints
        for index, sentinel in enumerate(sentinels):
            seconds = deadline.remaining() / (len(sentinels) - index)
            try:
                primary = await self._control.primary(sentinel, self._pool_url.service, seconds)
            except ControlFailed as error:
                failure = error
                continue
            if primary is not None:
                return Placement([primary])
            failure = ControlFailed(
                sentinel, f"the sentinel at {sentinel} does not monitor {self._pool_url.service!r}"
            )
        raise failure


class Cluster(Topology):
    """Several primaries that share the 16384 hash slots."""

    has_slots = True

    def __init__(self, pool_url: PoolURL, control: Control) -> None:
        super().__init__(pool_url, control)
        self._members: Sequence[Endpoint] = ()

    async def _discover(self, deadline: Deadline) -> Placement:
        # Also ask the last known members: those in the URL may be replaced while the cluster is running.
        candidates = list(dict.fromkeys([*self._pool_url.endpoints, *self._members]))
        failure = ControlFailed(candidates[0])
        for index, endpoint in enumerate(candidates):
            try:
                ranges = await self._control.slots(endpoint, deadline.remaining() / (len(candidates) - index))
            except ControlFailed as error:
                failure = error
                continue
            if not ranges:
                failure = ControlFailed(endpoint, f"{endpoint} is not part of a cluster that has hash slots")
                continue
            placement = _placement_of(ranges)
            self._members = placement.endpoints
            return placement
        raise failure


def topology_of(pool_url: PoolURL, control: Control) -> Topology:
    """Return the topology for a URL."""
    kinds: dict[str, type[Topology]] = {"single": Single, "sentinel": Sentinel, "cluster": Cluster}
    return kinds[pool_url.kind](pool_url, control)


def slot_of(name: bytes) -> int:
    """Return the hash slot of a key: CRC16 (XMODEM) of the key, or of its hash tag, modulo 16384."""
    start = name.find(b"{")
    stop = name.find(b"}", start + 1) if start >= 0 else -1
    # Empty braces are not a hash tag, even if another pair follows.
    return crc_hqx(name[start + 1 : stop] if stop > start + 1 else name, 0) % SLOTS


def _placement_of(ranges: Sequence[tuple[range, Endpoint]]) -> Placement:
    by_slot: list[Endpoint | None] = [None] * SLOTS
    for slots, endpoint in ranges:
        for slot in slots:
            by_slot[slot] = endpoint
    return Placement(list(dict.fromkeys(endpoint for _, endpoint in ranges)), by_slot)
