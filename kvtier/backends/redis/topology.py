"""Which server has which key: the only one, the primary that sentinels know, or one for each hash slot.

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
from kvtier.sockets.connection import Deadline


class Placement(NamedTuple):
    """Where the keys are."""

    endpoints: Sequence[Endpoint]
    """Every server, once."""
    by_slot: Sequence[Endpoint | None] | None = None
    """The server of each hash slot, ``None`` where none has it. Left out: one server has all keys."""


class Topology(ABC):
    """Knows the placement of a pool, or finds it out. Used from the event loop."""

    has_slots = False
    """Whether its servers may redirect us to each other."""

    def __init__(self, place: PoolURL, control: Control) -> None:
        self._place = place
        self._control = control
        self._known: Placement | None = None
        self._lock = Lock()

    async def placement(self, deadline: Deadline) -> Placement:
        """Where the keys are. Raises :class:`ControlFailed` or ``TimeoutError``."""
        if self._known is not None:
            return self._known  # The lock would be a turn of the loop before each batch.
        async with self._lock:
            if self._known is None:
                self._known = await self._look_up(deadline)
            return self._known

    def forget(self) -> None:
        """What is known may be wrong: look again when it is needed."""
        self._known = None

    @abstractmethod
    async def _look_up(self, deadline: Deadline) -> Placement: ...


class Single(Topology):
    """One server."""

    async def _look_up(self, deadline: Deadline) -> Placement:
        return Placement(self._place.endpoints)


class Sentinel(Topology):
    """The primary of a service, whichever server that is by now."""

    async def _look_up(self, deadline: Deadline) -> Placement:
        failure = ControlFailed(self._place.endpoints[0])
        sentinels = self._place.endpoints
        for index, sentinel in enumerate(sentinels):
            seconds = deadline.remaining() / (len(sentinels) - index)
            try:
                primary = await self._control.primary(sentinel, self._place.service, seconds)
            except ControlFailed as error:
                failure = error
                continue
            if primary is not None:
                return Placement([primary])
            failure = ControlFailed(sentinel, f"the sentinel at {sentinel} knows no {self._place.service!r}")
        raise failure


class Cluster(Topology):
    """Several primaries that have 16384 hash slots between them."""

    has_slots = True

    def __init__(self, place: PoolURL, control: Control) -> None:
        super().__init__(place, control)
        self._members: Sequence[Endpoint] = ()

    async def _look_up(self, deadline: Deadline) -> Placement:
        # Those in the URL may be gone one by one while the cluster lives on.
        candidates = list(dict.fromkeys([*self._place.endpoints, *self._members]))
        failure = ControlFailed(candidates[0])
        for index, endpoint in enumerate(candidates):
            try:
                ranges = await self._control.slots(endpoint, deadline.remaining() / (len(candidates) - index))
            except ControlFailed as error:
                failure = error
                continue
            placement = _placed(ranges)
            self._members = placement.endpoints
            return placement
        raise failure


def topology_of(place: PoolURL, control: Control) -> Topology:
    """The topology that a URL names."""
    kinds: dict[str, type[Topology]] = {"single": Single, "sentinel": Sentinel, "cluster": Cluster}
    return kinds[place.kind](place, control)


def slot_of(name: bytes) -> int:
    """The hash slot of a key: CRC16 (XMODEM) of it, or of what is in its first ``{}``, modulo 16384."""
    start = name.find(b"{")
    stop = name.find(b"}", start + 1) if start >= 0 else -1
    # An empty pair of braces is no tag, whatever comes after it.
    return crc_hqx(name[start + 1 : stop] if stop > start + 1 else name, 0) % SLOTS


def _placed(ranges: Sequence[tuple[range, Endpoint]]) -> Placement:
    by_slot: list[Endpoint | None] = [None] * SLOTS
    for slots, endpoint in ranges:
        for slot in slots:
            by_slot[slot] = endpoint
    return Placement(list(dict.fromkeys(endpoint for _, endpoint in ranges)), by_slot)
