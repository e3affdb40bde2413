"""The registry of connected instances, the chunks that they hold and the models that they serve.

All of it is reported by the instances, which report it again after a restart of the controller.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import anyio

from kvtier.bounded import remember
from kvtier.concurrency.tasks import Changes
from kvtier.errors import ChannelClosed
from kvtier.fleet.controller.answers import GoneAnswer
from kvtier.fleet.controller.checks import (
    MAX_NAMES,
    check_heartbeat,
    check_hello,
    check_models,
    check_what_if,
)
from kvtier.fleet.controller.errors import (
    AmbiguousModel,
    RefusedInstance,
    UnknownModel,
    UnknownName,
    WrongRequest,
)
from kvtier.fleet.controller.events import Position
from kvtier.fleet.controller.holders import Holders, Keys
from kvtier.fleet.controller.member import PEERS, Member, TierRef
from kvtier.fleet.controller.settings import HEARTBEAT_SECONDS, IDLE_TIMEOUT_SECONDS
from kvtier.fleet.member.protocol import (
    VERSION,
    Heartbeat,
    HeldBy,
    Hello,
    Lost,
    Model,
    ServedAt,
    Serves,
    TierDescription,
    UpToDate,
    Welcome,
    WhatIf,
    WhoHolds,
    WhoServes,
)
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.rpc.endpoint import Endpoint
from kvtier.settings.peer import join_address, split_address

MAX_MODELS = 4096
"""Known models. Beyond this, the least recently reported one is dropped."""


logger = logging.getLogger("kvtier")
PING_SECONDS = 2.0
"""Time for an instance to answer a ping when another one connects with the same id."""
BACKENDS = {"cpu": "LocalCPUBackend", "hugepage": "LocalCPUBackend", "disk": "LocalDiskBackend"}
"""LMCache's names for tiers of these types. For a shared pool of any type it is :data:`POOL`."""
POOL = "RemoteBackend"
MAX_MEMBERS = 1024
MAX_GONE = 256
MAX_INDEXING = 2
"""Long reports that are indexed at a time, in turns."""
MAX_HOLDERS = 8
"""Holders returned to an instance that looks up a prompt."""
SWEEP_SECONDS = 0.005
"""Maximum time of sweeping without yielding to the event loop; a single slice may exceed it."""
SWEEP_SHARE = 0.2
"""Share of the event loop's time that sweeping takes."""


class Models:
    """Known models by name and namespace. A model stays known after all its instances have disconnected.

    A model here is one *namespace*: a model in one KV layout. Engines with different layouts share no chunks,
    so one name may refer to several namespaces.
    """

    def __init__(self) -> None:
        self._models: dict[bytes, Model] = {}

    def add(self, models: Iterable[Model]) -> None:
        """Add the models that an instance serves."""
        for model in models:
            known = self._models.get(model.namespace)
            if known is not None:
                names = list(dict.fromkeys([*model.names, *known.names]))[:MAX_NAMES]
                model = Model(names, model.namespace, model.layout, model.tokenizer)
            remember(self._models, model.namespace, model, MAX_MODELS)

    def all(self) -> list[Model]:
        """Return all known models, one per namespace."""
        return list(self._models.values())

    def find(self, name: str | None, among: Sequence[Model] | None = None) -> list[Model]:
        """Return the model with this name in all known layouts. Without a name, the only known model.

        ``among`` restricts the search to these models. Raises: UnknownModel, AmbiguousModel.
        """
        models = self.all() if among is None else among
        if name is not None:
            found = [model for model in models if name in model.names]
            if not found:
                raise UnknownModel(name, {known for model in models for known in model.names})
            return found
        names = {model.names[0] for model in models}
        if not names:
            raise UnknownModel(None, ())
        if len(names) > 1:
            raise AmbiguousModel(names)
        return list(models)


class Registry:
    """Every connected instance. Belongs to one event loop, on which :meth:`run` must be running.

    ``heartbeat`` is the heartbeat interval of instances, and ``idle_timeout`` the time without messages after
    which one is disconnected, both in seconds.
    """

    def __init__(
        self, *, heartbeat: float = HEARTBEAT_SECONDS, idle_timeout: float = IDLE_TIMEOUT_SECONDS
    ) -> None:
        self.heartbeat = heartbeat
        self.idle_timeout = idle_timeout
        self.holders = Holders()
        self.models = Models()
        self.term: int | None = None
        """That of this controller's lease: ``None`` while it does not lead, 0 if there are no others."""
        self._members: dict[str, Member] = {}
        self.members: Mapping[str, Member] = MappingProxyType(self._members)
        """By id, in the order of registration."""
        self.gone: dict[str, GoneAnswer] = {}
        """Disconnected instances by id, the latest one last; :data:`MAX_GONE` at most."""
        self.changes = Changes()
        """Connects, disconnects and reports of instances."""
        self.indexing = anyio.CapacityLimiter(MAX_INDEXING)
        """Held while a long report is indexed."""
        self._new_places = itertools.count()
        self._vacant_places: list[int] = []
        self._sources: dict[int, Member] = {}
        """By place: members that serve that place to peers. Shared pools are excluded."""
        self._dropped_keys = 0
        self._to_sweep = anyio.Event()
        self._warn = RateLimitedLog(logger)

    async def run(self) -> None:
        """Sweep the index, until cancelled."""
        while True:
            await self._to_sweep.wait()
            self._to_sweep = anyio.Event()
            while self.holders.needs_sweep:
                # A slice takes longer on a slow host, and so does the pause after it.
                seconds = self._sweep_slice()
                await anyio.sleep(seconds / SWEEP_SHARE - seconds)

    def _sweep_slice(self) -> float:
        """Sweep for about ``SWEEP_SECONDS``. Return the time taken in seconds."""
        started = now = time.monotonic()
        while self.holders.needs_sweep and now - started < SWEEP_SECONDS:
            self.holders.sweep()
            now = time.monotonic()
        return now - started

    # Used by operations.

    def find(self, instance: str) -> Member:
        """Return the connected instance with this id. Raises: UnknownName."""
        member = self._members.get(instance)
        if member is None:
            raise UnknownName(f"instance {instance!r}", self._members)
        return member

    def find_tier(self, position: Position) -> TierRef:
        """Return a tier by its instance and its name, or its type if no other tier there has it.

        LMCache's name for a backend stands for the first tier of that kind.

        Raises: UnknownName, WrongRequest: the tier stands for the instance's peers.
        """
        instance, name = position
        member = self.find(instance)
        tiers = member.hello.tiers
        named = [number for number, tier in enumerate(tiers) if tier.name == name]
        found = named or [number for number, tier in enumerate(tiers) if tier.type == name]
        found = found or [number for number, tier in enumerate(tiers) if _backend(tier) == name][:1]
        if len(found) != 1:
            raise UnknownName(f"tier {name!r} in instance {instance!r}", [tier.name for tier in tiers])
        ref = TierRef(member, found[0])
        if ref.is_peers:
            raise WrongRequest(
                f"tier {name!r} of instance {instance!r} stands for its peers: name a tier of one of them"
            )
        return ref

    def held(self, instance: str, keys: Sequence[ChunkKey]) -> int:
        """Return how many leading chunks an instance holds, in any tier; 0 if it is not connected."""
        member = self._members.get(instance)
        if member is None:
            return 0
        return self.holders.prefixes_of(dict.fromkeys(member.places, instance), keys).get(instance, 0)

    # Used by connections.

    async def admit(self, hello: Hello, endpoint: Endpoint) -> Member:
        """Register an instance, and send its welcome.

        If another instance with this id is connected, it is pinged first, and replaced if it does not answer.

        Raises: RefusedInstance, ChannelError.
        """
        check_hello(hello)
        # A loop, because another one with the id may register while one is pinged.
        while (current := self._members.get(hello.instance)) is not None:
            if current.hello.incarnation == hello.incarnation:
                self.leave(current, "it has reconnected")
            elif await current.responds(PING_SECONDS):
                raise RefusedInstance(
                    f"instance id {hello.instance!r} is in use by process {current.hello.process} on host "
                    f"{current.hello.host}: set another controller.instance_id "
                    "(KVTIER_CONTROLLER__INSTANCE_ID)"
                )
            else:
                self.leave(
                    current, "another instance with its id has connected, and it did not answer a ping"
                )
        if len(self._members) >= MAX_MEMBERS:
            raise RefusedInstance(f"the controller has {MAX_MEMBERS} instances, which is the limit")
        endpoint.send(Welcome(VERSION, self.heartbeat, self.idle_timeout))
        places = [self._new_place() for _ in hello.tiers]
        member = Member(hello, places, endpoint, lambda: self.term or 0)
        self._members[member.id] = member
        self.gone.pop(member.id, None)
        if hello.peer is not None:
            self._sources.update(
                (place, member)
                for place, tier in zip(member.places, hello.tiers, strict=True)
                if not tier.shared
            )
        logger.info("instance %s registered: process %d on %s", member.id, hello.process, hello.host)
        self.changes.notify()
        return member

    def leave(self, member: Member, why: str) -> None:
        """End an instance's connection, unregister it, and drop its chunks from the index. Idempotent."""
        member.endpoint.end(ChannelClosed(why))
        if self._members.get(member.id) is not member:
            return
        del self._members[member.id]
        for place in member.places:
            self._sources.pop(place, None)
        self._drop(member)
        # Only now: the next instance in this place must not get its chunks.
        self._vacant_places.extend(member.places)
        logger.info("instance %s disconnected: %s", member.id, member.closed_reason)
        gone = GoneAnswer(
            instance=member.id,
            host=member.hello.host,
            disconnected_at=time.time(),
            reason=member.closed_reason or why,
        )
        remember(self.gone, member.id, gone, MAX_GONE)
        self.changes.notify()

    def report(self, member: Member, message: Serves | Heartbeat | WhatIf | UpToDate | Lost) -> None:
        """Store what a member reports on itself. Raises: RefusedInstance."""
        match message:
            case Serves(models):
                check_models(models)
                member.models = tuple(models)
                self.models.add(models)
            case Heartbeat():
                check_heartbeat(message, len(member.places))
                member.heartbeat = message
                member.hit_window.add(message, time.monotonic())
            case WhatIf(report):
                check_what_if(report, [tier.name for tier in member.hello.tiers])
                member.what_if, member.what_if_at = report, time.time()
            case UpToDate():
                member.up_to_date = True
            case Lost():
                # It will report its chunks again.
                member.up_to_date = False
                self._drop(member)
        self.changes.notify()

    def stored(self, member: Member, tier: int, keys: Keys) -> None:
        """Add keys to a member's tier. Ignored for disconnected members."""
        if not member.endpoint.closed:
            self.holders.add(member.places[tier], keys)
            self._after_change()

    def removed(self, member: Member, tier: int, keys: Keys) -> None:
        """Remove keys from a member's tier. Ignored for disconnected members."""
        if not member.endpoint.closed:
            self.holders.remove(member.places[tier], keys)
            self._after_change()

    def peers_with(self, member: Member, keys: Sequence[ChunkKey]) -> list[tuple[Member, int]]:
        """Return the other members that hold leading keys, and how many, the best first.

        Shared pools do not count, nor do members that do not serve peers.
        """
        found = self.holders.prefixes_of(self._sources, keys)
        found.pop(member, None)
        return sorted(found.items(), key=lambda item: -item[1])

    def held_by(self, member: Member, question: WhoHolds, keys: Sequence[ChunkKey]) -> HeldBy:
        """Return the peer addresses of the members that hold most leading keys, the best first."""
        best = self.peers_with(member, keys)[:MAX_HOLDERS]
        return HeldBy(
            question.ticket, [other.hello.peer or "" for other, _ in best], [count for _, count in best]
        )

    def served_at(self, question: WhoServes) -> ServedAt:
        """Return those of the addresses at which a member serves peers, by its host name as well."""
        served = set()
        for hello in (member.hello for member in self._members.values()):
            if hello.peer is not None:
                port = split_address(hello.peer)[1]
                served |= {hello.peer.lower(), join_address(hello.host.lower(), port)}
        return ServedAt(question.ticket, [address for address in question.addresses if address in served])

    def _new_place(self) -> int:
        return self._vacant_places.pop() if self._vacant_places else next(self._new_places)

    def _drop(self, member: Member) -> None:
        self.holders.drop(member.places)
        self._after_change()

    def _after_change(self) -> None:
        if self.holders.needs_sweep:
            self._to_sweep.set()
        if self.holders.dropped_keys > self._dropped_keys:
            self._dropped_keys = self.holders.dropped_keys
            self._warn("the index is full: lookups do not find further chunks")


def _backend(tier: TierDescription) -> str | None:
    return POOL if tier.shared and tier.type != PEERS else BACKENDS.get(tier.type)
