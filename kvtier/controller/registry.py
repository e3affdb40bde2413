"""Who is connected, what each of them holds, and what all of them have said: the controller's knowledge.

All of it comes from the instances, and with a restart of the controller all of it is told anew.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import anyio

from kvtier.agent.protocol import (
    VERSION,
    Heartbeat,
    HeldBy,
    Hello,
    Model,
    Welcome,
    WhoHolds,
)
from kvtier.backends.logs import RareWarning
from kvtier.controller.checks import check_heartbeat, check_hello, check_models
from kvtier.controller.errors import RefusedInstance, UnknownInstance, UnknownTier
from kvtier.controller.history import SAMPLE_SECONDS, History, Sample
from kvtier.controller.holders import MOST_KEYS, Holders
from kvtier.controller.member import Member
from kvtier.controller.models import Models
from kvtier.keys import ChunkKey

logger = logging.getLogger("kvtier")

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 10.0
PING_SECONDS = 2.0
"""How long an instance may take to answer when another of its name has come."""
MOST_MEMBERS = 1024
MOST_HOLDERS = 8
"""Named to an instance that asks who holds a prompt."""
SWEEP_SECONDS = 0.005
"""Of sweeping without letting others have a turn; a single slice may take somewhat longer."""
SWEEP_SHARE = 0.2
"""Of the loop's time, as long as there is something to be swept."""


class Watch:
    """Tells that something in the registry has changed; many changes count as one."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._seen = changes.count

    async def changed(self) -> None:
        """Wait until something has changed since the last call, or since this was made."""
        while self._seen == self._changes.count:
            await self._changes.next.wait()
        self._seen = self._changes.count


class Changes:
    """Counts what changes, and wakes whoever waits for that."""

    def __init__(self) -> None:
        self.count = 0
        self.next = anyio.Event()

    def tell(self) -> None:
        """Something has changed."""
        self.count += 1
        self.next.set()
        self.next = anyio.Event()


class Registry:
    """Every connected instance. Belongs to one event loop, on which :meth:`run` must be running.

    ``heartbeat`` and ``silence`` are seconds: how often instances are asked to say that they are there, and
    how long one may say nothing before it is taken for dead. At most ``most_keys`` chunks are kept in mind.
    """

    def __init__(
        self,
        *,
        heartbeat: float = HEARTBEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
        most_keys: int = MOST_KEYS,
    ) -> None:
        if not 0 < heartbeat < silence:
            raise ValueError(f"heartbeats each {heartbeat:g} s are no sign of life within {silence:g} s")
        self.heartbeat = heartbeat
        self.silence = silence
        self.holders = Holders(most_keys)
        self.models = Models()
        self.members: Mapping[str, Member]
        """By id, in the order in which they came."""
        self._members: dict[str, Member] = {}
        self.members = MappingProxyType(self._members)
        self._history = History()
        self._changes = Changes()
        self._new_places = itertools.count()
        self._vacant_places: list[int] = []
        self._sources: dict[int, Member] = {}
        """By place: members that others can fetch from that place, which is theirs alone."""
        self._overlooked = 0
        self._to_sweep = anyio.Event()
        self._warn = RareWarning(logger)

    async def run(self) -> None:
        """Note how the instances are, and sweep up after those that have left. Until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample)
            tasks.start_soon(self._sweep)

    async def _sample(self) -> None:
        while True:
            await anyio.sleep(SAMPLE_SECONDS)
            self._history.sample(self._members.values(), time.time())

    async def _sweep(self) -> None:
        while True:
            await self._to_sweep.wait()
            self._to_sweep = anyio.Event()
            while self.holders.untidy:
                taken = self._sweep_for_a_turn()
                await anyio.sleep(taken / SWEEP_SHARE - taken)

    def _sweep_for_a_turn(self) -> float:
        """Returns the seconds that it has taken."""
        started = now = time.monotonic()
        while self.holders.untidy and now - started < SWEEP_SECONDS:
            self.holders.sweep()
            now = time.monotonic()
        return now - started

    # What operations ask.

    def find(self, instance: str) -> Member:
        """The connected instance of this id. Raises :class:`UnknownInstance`."""
        member = self._members.get(instance)
        if member is None:
            raise UnknownInstance(instance, self._members)
        return member

    def tier(self, member: Member, name: str) -> int:
        """The number of a member's tier by its name, or by its type where no other tier has that.

        Raises :class:`UnknownTier`.
        """
        tiers = member.hello.tiers
        named = [number for number, tier in enumerate(tiers) if tier.name == name]
        found = named or [number for number, tier in enumerate(tiers) if tier.type == name]
        if len(found) != 1:
            raise UnknownTier(member.id, name, [tier.name for tier in tiers])
        return found[0]

    def history(self, member: Member) -> Sequence[Sample]:
        """How it was, over the last hour, the oldest first."""
        return self._history.of(member.id)

    def watch(self) -> Watch:
        """A way to wait for changes: instances that come, go or say how they are. Needs no closing."""
        return Watch(self._changes)

    # What connections tell.

    async def admit(self, hello: Hello, hang_up: Callable[[], None]) -> Member:
        """Register an instance; ``hang_up`` ends its connection. Raises :class:`RefusedInstance`.

        Where another of its id is connected, that one is asked for a sign of life first.
        """
        check_hello(hello)
        while (first := self._members.get(hello.instance)) is not None:
            if first.hello.incarnation == hello.incarnation:
                self.leave(first, "it has connected anew")
            elif await first.responds(PING_SECONDS):
                raise RefusedInstance(
                    f"instance id {hello.instance!r} is taken by process {first.hello.process} on host "
                    f"{first.hello.host}, which is alive: set another controller.instance_id"
                )
            else:
                self.leave(first, "another instance of its id has come, and it has not answered")
        if len(self._members) >= MOST_MEMBERS:
            raise RefusedInstance(f"the controller has {MOST_MEMBERS} instances, which is its limit")
        member = Member(hello, [self._new_place() for _ in hello.tiers], hang_up)
        self._members[member.id] = member
        if hello.peer is not None:
            self._sources.update(
                (place, member)
                for place, tier in zip(member.places, hello.tiers, strict=True)
                if not tier.shared
            )
        member.say(Welcome(VERSION, self.heartbeat, self.silence))
        logger.info("instance %s is registered: process %d on %s", member.id, hello.process, hello.host)
        self._changes.tell()
        return member

    def leave(self, member: Member, why: str) -> None:
        """Its connection is at an end, and it holds nothing. Harmless when repeated."""
        member.end(why)
        if self._members.get(member.id) is not member:
            return
        del self._members[member.id]
        for place in member.places:
            self._sources.pop(place, None)
        self._drop(member)
        self._vacant_places.extend(member.places)
        logger.info("instance %s is gone: %s", member.id, member.over)
        self._changes.tell()

    def serves(self, member: Member, models: Sequence[Model]) -> None:
        """A member has told of its models. Raises :class:`RefusedInstance`."""
        check_models(models)
        member.models = tuple(models)
        self.models.add(models)
        self._changes.tell()

    def beat(self, member: Member, heartbeat: Heartbeat) -> None:
        """A member has told how it is. Raises :class:`RefusedInstance`."""
        check_heartbeat(heartbeat, len(member.places))
        member.heartbeat = heartbeat
        self._changes.tell()

    def in_step(self, member: Member) -> None:
        """A member has told all that it holds."""
        member.in_step = True
        self._changes.tell()

    def lost(self, member: Member) -> None:
        """What a member has told counts no more."""
        member.in_step = False
        self._drop(member)
        self._changes.tell()

    def stored(self, member: Member, tier: int, keys: Sequence[ChunkKey]) -> None:
        """A member's tier holds these. Of members that have left nothing is taken in."""
        if member.over is None:
            self.holders.add(member.places[tier], keys)
            self._tidy()

    def removed(self, member: Member, tier: int, keys: Sequence[ChunkKey]) -> None:
        """A member's tier does not hold these any more."""
        if member.over is None:
            self.holders.remove(member.places[tier], keys)
            self._tidy()

    def held_by(self, member: Member, question: WhoHolds, keys: Sequence[ChunkKey]) -> HeldBy:
        """Who else holds leading chunks in tiers of its own and can be reached, those with most first."""
        found = self.holders.prefixes_of(self._sources, keys)
        found.pop(member, None)
        best = sorted(found.items(), key=lambda item: -item[1])[:MOST_HOLDERS]
        return HeldBy(
            question.ticket, [other.hello.peer or "" for other, _ in best], [count for _, count in best]
        )

    def _new_place(self) -> int:
        return self._vacant_places.pop() if self._vacant_places else next(self._new_places)

    def _drop(self, member: Member) -> None:
        self.holders.drop(member.places)
        self._tidy()

    def _tidy(self) -> None:
        if self.holders.untidy:
            self._to_sweep.set()
        if self.holders.overlooked > self._overlooked:
            self._overlooked = self.holders.overlooked
            self._warn("the controller has all the chunks in mind that it may: no others are found")
