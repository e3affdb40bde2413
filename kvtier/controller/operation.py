"""What all operations are: planned from what is known, and carried out by telling instances what to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple

import anyio

from kvtier.agent.protocol import Command, Done, Progress
from kvtier.controller.errors import CommandFailed, WrongRequest
from kvtier.controller.events import Kind, Position, Result
from kvtier.controller.member import Member
from kvtier.controller.prompts import ModelPrompt
from kvtier.controller.registry import Registry
from kvtier.keys import ChunkKey, split_keys

PEERS = "peers"
"""The type of the tier by which an instance calls all others together."""
STALL_SECONDS = 120.0
"""A command that has come no further for so long is given up. Instances tell of each batch of chunks."""

Report = Callable[[int, int], None]
"""Told how many chunks are done and how many bytes were transferred, again and again."""


class Place(NamedTuple):
    """One tier of an instance that is connected."""

    member: Member
    tier: int

    @property
    def number(self) -> int:
        """What :class:`~kvtier.controller.holders.Holders` knows it by."""
        return self.member.places[self.tier]

    @property
    def position(self) -> Position:
        """For people."""
        return self.member.id, self.member.hello.tiers[self.tier].name

    @property
    def shared(self) -> bool:
        """Whether it is a pool that others fill and empty, too."""
        return self.member.hello.tiers[self.tier].shared

    @property
    def is_of_peers(self) -> bool:
        """Whether it stands for what other instances hold, who are asked themselves."""
        return self.member.hello.tiers[self.tier].type == PEERS


class Part(NamedTuple):
    """Chunks that one tier is asked for, all of one prompt."""

    tier: int
    chunks: ModelPrompt


class Plan(NamedTuple):
    """What an operation comes down to, by what is known now."""

    parts: Sequence[Part] = ()
    num_tokens: int = 0
    chunks: int = 0
    model: str | None = None
    """Its first name."""
    peer: str | None = None
    """Where what an instance has not is fetched from."""
    more: bool = False
    """Whether there may be more than is known: in a shared pool, or of an instance that has not told all."""

    @property
    def void(self) -> bool:
        """Whether there is nothing to do."""
        return not self.chunks and not self.more


class Operation(ABC):
    """One operation. It is planned twice, when it is asked for and when its turn has come."""

    kind: Kind
    deletes: ClassVar[bool]
    """Whether it may take chunks away, so that others on the same chunks must wait."""

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[ModelPrompt],
        *,
        source: Position | None = None,
        target: Position | None = None,
    ) -> None:
        """``prompts`` are one prompt in each layout of its model; none: everything is meant."""
        self._registry = registry
        self._prompts = prompts
        self.source = source
        self.target = target

    @property
    def instances(self) -> frozenset[str]:
        """Which it is about."""
        return frozenset(position[0] for position in (self.source, self.target) if position is not None)

    @property
    def roots(self) -> frozenset[ChunkKey] | None:
        """The first key of its prompts; ``None`` where everything is meant."""
        if not self._prompts:
            return None
        return frozenset(prompt.keys[0] for _, prompt in self._prompts if prompt.keys)

    @abstractmethod
    def plan(self) -> Plan:
        """What there is to be done, by what is known now; synchronous.

        Raises ``UnknownInstance`` or ``UnknownTier`` where it is about one that is gone.
        """

    @abstractmethod
    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Do what was just planned, and enter into ``result`` what has been achieved, as it is.

        Raises ``MemberGone`` and ``CommandFailed``, in words that say whose connection and what failed.
        """

    def place(self, position: Position) -> Place:
        """Where a position is now. Raises ``UnknownInstance`` or ``UnknownTier``."""
        return find_place(self._registry, position)


def find_place(registry: Registry, position: Position) -> Place:
    """Where a position is now.

    Raises ``UnknownInstance`` and ``UnknownTier``, and ``WrongRequest`` where it stands for other instances.
    """
    instance, tier = position
    assert tier is not None
    member = registry.find(instance)
    place = Place(member, registry.tier(member, tier))
    if place.is_of_peers:
        raise WrongRequest(
            f"tier {tier!r} of instance {instance!r} stands for what other instances hold: name one of those"
        )
    return place


async def tell(
    member: Member, command: Callable[[int], Command], progress: Callable[[Progress], None] | None = None
) -> Done:
    """Have an instance carry out a command.

    Raises ``MemberGone``, and ``CommandFailed`` also where it comes no further for ``STALL_SECONDS``; then
    it is told to stop.
    """

    def heard(so_far: Progress) -> None:
        patience.deadline = anyio.current_time() + STALL_SECONDS
        if progress is not None:
            progress(so_far)

    with anyio.move_on_after(STALL_SECONDS) as patience:
        return await member.carry_out(command, heard)
    raise CommandFailed(f"instance {member.id!r} has come no further for {STALL_SECONDS:g} s")


def confirmed(done: Done, asked: Collection[ChunkKey]) -> list[ChunkKey]:
    """What of the chunks that an instance was asked about is as it should be."""
    wanted = frozenset(asked)
    try:
        keys = split_keys(done.keys)
    except ValueError as error:
        raise CommandFailed(f"the instance's answer names no keys: {error}") from error
    return [key for key in dict.fromkeys(keys) if key in wanted]
