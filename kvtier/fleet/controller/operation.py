"""Base of all operations: they are planned from the index, and executed by commands to instances."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import anyio
import msgspec

from kvtier.concurrency.locks import LockRequest
from kvtier.fleet.controller.errors import CommandFailed
from kvtier.fleet.controller.events import Kind, Position, Result
from kvtier.fleet.controller.member import Member, TierRef
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import MAX_KEYS, Command, Done, Progress
from kvtier.memory.keys import ChunkKey, split_keys

STALL_SECONDS = 120.0
"""Timeout of a command without progress. Instances report progress after each batch of chunks."""

Report = Callable[[int, int], None]
"""Progress callback: total chunks done, total bytes transferred."""


class Part(NamedTuple):
    """Chunks of one prompt to process in one tier."""

    tier: int
    chunks: PromptChunks


class Plan(NamedTuple):
    """The work of an operation, according to the current index."""

    parts: Sequence[Part] = ()
    num_tokens: int = 0
    chunks: int = 0
    model: str | None = None
    """The model's first name."""
    peer: str | None = None
    """The address of the peer to fetch missing chunks from."""
    more: bool = False
    """Whether there may be chunks that are not indexed: in a shared pool, or of an instance out of date."""

    @classmethod
    def of(cls, tier: int, chunks: PromptChunks) -> Plan:
        """Return the plan to process these chunks in one tier."""
        return cls([Part(tier, chunks)], chunks.num_tokens, len(chunks.keys), chunks.model.names[0])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.chunks and not self.more

    def slices(self) -> Iterator[Part]:
        """Yield the parts, in slices of as many chunks as a command may name."""
        for tier, chunks in self.parts:
            for some in chunks.slices(MAX_KEYS):
                yield Part(tier, some)


class StoredOperation(msgspec.Struct, frozen=True, array_like=True):
    """What an operation is made from, as it is stored until it has ended."""

    kind: Kind
    source: Position | None
    target: Position
    until: float | None
    """When its deadline or its pins end, as a :func:`time.time`."""
    prompts: list[PromptChunks]


class Operation(ABC):
    """One operation. It is planned twice: when requested, and again once its locks are acquired."""

    kind: Kind
    exclusive: bool
    """Whether it may delete chunks or end pins, and so needs an exclusive lock."""

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[PromptChunks],
        pins: Pins,
        *,
        target: Position,
        source: Position | None = None,
        seconds: float | None = None,
    ) -> None:
        """``prompts`` is one prompt in each layout of its model; empty for all chunks.

        ``seconds`` is the maximum duration of a prefetch, or the duration of a pin.
        """
        self._registry = registry
        self._prompts = prompts
        self._pins = pins
        self._seconds = seconds
        self.source = source
        self.target = target

    def stored(self) -> bytes:
        """Return what the next controller makes the operation from, if this one ends before it."""
        until = None if self._seconds is None else time.time() + self._seconds
        return msgspec.msgpack.encode(
            StoredOperation(self.kind, self.source, self.target, until, list(self._prompts))
        )

    @property
    def instances(self) -> frozenset[str]:
        """The ids of the instances involved."""
        return frozenset(position[0] for position in (self.source, self.target) if position is not None)

    def lock(self) -> LockRequest:
        """Return what to lock before it is executed: the chunks of its prompts, or all of its instances.

        A key depends on all tokens before it, so two prompts share chunks only if they share the first one.
        Locking by first key is conservative, and takes one comparison regardless of the prompts' length.
        Operations that only copy or pin share chunks; those that delete or unpin lock them exclusively: two
        concurrent moves of a prompt in opposite directions could each delete what the other has confirmed.
        """
        roots = frozenset(chunks.keys[0] for chunks in self._prompts if chunks.keys)
        return LockRequest(roots if self._prompts else None, self.instances, exclusive=self.exclusive)

    @abstractmethod
    def plan(self) -> Plan:
        """Return the work to do, according to the current index.

        Raises: UnknownName: an instance has disconnected or has changed its tiers.
        """

    @abstractmethod
    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Execute a fresh plan, and update ``result`` along the way.

        Raises: MemberGone, CommandFailed: the message names the instance and the reason.
        """

    def target_tier(self) -> TierRef:
        """Return the target as it is now. Raises: see :meth:`Registry.find_tier`."""
        return self._registry.find_tier(self.target)


async def run_command(
    member: Member, command: Callable[[int], Command], progress: Callable[[Progress], None] | None = None
) -> Done:
    """Have an instance execute a command, and return its answer.

    The command is cancelled after ``STALL_SECONDS`` without progress.

    Raises: MemberGone, CommandFailed: also after that timeout.
    """

    def on_progress(current: Progress) -> None:
        scope.deadline = anyio.current_time() + STALL_SECONDS
        if progress is not None:
            progress(current)

    with anyio.move_on_after(STALL_SECONDS) as scope:
        return await member.execute(command, on_progress)
    raise CommandFailed(f"instance {member.id!r} made no progress for {STALL_SECONDS:g} s")


def confirmed_keys(done: Done) -> list[ChunkKey]:
    """Return the keys that an answer confirms, which the member has checked to be some of its command."""
    return list(dict.fromkeys(split_keys(done.keys)))


def count_confirmed(done: Done, chunks: PromptChunks, result: Result) -> list[ChunkKey]:
    """Add the chunks that an answer confirms to a result; return their keys."""
    confirmed = confirmed_keys(done)
    held = frozenset(confirmed)
    result.chunks += len(confirmed)
    result.tokens += chunks.selected([key in held for key in chunks.keys]).num_tokens
    result.reason = done.reason or result.reason
    return confirmed
