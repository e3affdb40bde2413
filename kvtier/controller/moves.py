"""Bringing chunks into a tier: moves, copies, and what is fetched ahead of need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.agent.protocol import MOST_KEYS, Delete, Fetch, Progress
from kvtier.controller.errors import CommandFailed, MemberGone, UnknownName, WrongRequest
from kvtier.controller.events import Kind, Position, Result
from kvtier.controller.member import Member
from kvtier.controller.models import Prompt
from kvtier.controller.operation import PEERS, Operation, Part, Place, Plan, Report, confirmed, tell
from kvtier.controller.pinning import end_pins
from kvtier.controller.pins import Pins
from kvtier.controller.prompts import ModelPrompt
from kvtier.controller.registry import Registry
from kvtier.keys import ChunkKey, join_keys
from kvtier.router import FIRST

Progressed = Callable[[Progress], None]


class Move(Operation):
    """From one tier to another, of one instance or of two. With ``copy`` the chunks stay where they were.

    What goes is what the source holds of the prompt, up to the first chunk that neither tier holds: so a
    move that was cut short is completed by asking for it again.
    """

    deletes = True

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[ModelPrompt],
        pins: Pins,
        *,
        source: Position,
        target: Position,
        copy: bool,
    ) -> None:
        """Raises :class:`WrongRequest` for one place twice, and for a source of which nobody knows all."""
        super().__init__(registry, prompts, source=source, target=target)
        self._pins = pins
        self._copy = copy
        self.kind: Kind = "copy" if copy else "move"
        self.deletes = not copy  # type: ignore[misc]
        old, new = self.place(source), self.place(target)
        if old == new:
            raise WrongRequest("`old_position` and `new_position` are the same")
        if old.shared:
            raise WrongRequest(
                f"tier {source[1]!r} of instance {source[0]!r} is a pool that others fill, too, and "
                "the controller does not know what it holds: use /prefetch to fetch from there"
            )

    def plan(self) -> Plan:
        """Of the layouts of the model the one of which there is most to move."""
        source, target = self._places()
        return max(
            (self._plan(chunks, source, target) for chunks in self._prompts), key=lambda plan: plan.num_tokens
        )

    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Fetch, then delete exactly what was confirmed; slice by slice where there are very many chunks."""
        source, target = self._places()
        [part] = plan.parts
        raised = self._raised(source, target, part.chunks.prompt.keys)
        peer = source.member.hello.peer if source.member is not target.member else None
        if source.member is not target.member and peer is None:
            raise CommandFailed(
                f"instance {source.member.id!r} serves no others: set peer.listen in its settings"
            )
        for chunks in part.chunks.slices(MOST_KEYS):
            fetch = Fetching(target, peer, part.chunks.model.namespace, chunks)
            try:
                arrived = await fetch.carry_out(result, report)
            except MemberGone as error:
                raise MemberGone(
                    f"the target {target.member.id!r} went away before it had confirmed all ({error}): the "
                    "source keeps what was not confirmed"
                ) from error
            if not self._copy:
                await self._leave(source, arrived, raised, result)
            if len(arrived) < len(chunks.keys):
                result.reason = self._why(source, result.reason)
                return

    def _places(self) -> tuple[Place, Place]:
        assert self.source is not None
        assert self.target is not None
        return self.place(self.source), self.place(self.target)

    def _plan(self, chunks: ModelPrompt, source: Place, target: Place) -> Plan:
        holders = self._registry.holders
        here = holders.held(source.number, chunks.prompt.keys)
        there = holders.held(target.number, chunks.prompt.keys)
        reach = next(
            (at for at, held in enumerate(zip(here, there, strict=True)) if not any(held)), len(here)
        )
        part = chunks.first(reach).part(here[:reach])
        return Plan([Part(target.tier, part)], part.num_tokens, len(part.prompt.keys), chunks.model.names[0])

    def _raised(self, source: Place, target: Place, keys: Sequence[ChunkKey]) -> frozenset[ChunkKey]:
        """What the source must bring into its memory first, to let another instance read it there."""
        if source.tier == FIRST or source.member is target.member:
            return frozenset()
        there = self._registry.holders.held(source.member.places[FIRST], keys)
        return frozenset(key for key, held in zip(keys, there, strict=True) if not held)

    async def _leave(
        self, source: Place, keys: Sequence[ChunkKey], raised: Collection[ChunkKey], result: Result
    ) -> None:
        """Take from the source what the target has confirmed, and what was in its memory for the move alone.

        A source that has lost its connection and is back is the same: it is found by its name.
        """
        if not keys:
            return
        assert self.source is not None
        try:
            member, tier = self.place(self.source)
            done = await tell(member, partial(Delete, tier=tier, keys=join_keys(keys)))
            result.removed += done.chunks
            lifted = [key for key in keys if key in raised]
            if lifted:
                await tell(member, partial(Delete, tier=FIRST, keys=join_keys(lifted)))
        except (MemberGone, CommandFailed, UnknownName) as error:
            raise CommandFailed(
                f"the target has confirmed {len(keys)} chunks, but they may still be in the source: {error}"
            ) from error
        end_pins(self._registry, self._pins, member, keys)

    def _why(self, source: Place, reason: str | None) -> str:
        said = reason or "the target does not say why"
        if self._registry.members.get(source.member.id) is not source.member:
            return f"the source {source.member.id!r} went away: {said}"
        return said


class Prefetch(Operation):
    """Into a tier from wherever the chunks are: the instance's other tiers, and the peer that has most."""

    kind = "prefetch"
    deletes = False

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[ModelPrompt],
        *,
        target: Position,
        seconds: float | None,
    ) -> None:
        super().__init__(registry, prompts, target=target)
        self._seconds = seconds

    def plan(self) -> Plan:
        """Of the layouts of the model the one of which there is most."""
        target = self._place()
        return max((self._plan(chunks, target) for chunks in self._prompts), key=lambda plan: plan.num_tokens)

    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Fetch."""
        target = self._place()
        [part] = plan.parts
        for chunks in part.chunks.slices(MOST_KEYS):
            fetch = Fetching(target, plan.peer, part.chunks.model.namespace, chunks, self._seconds)
            arrived = await fetch.carry_out(result, report)
            if len(arrived) < len(chunks.keys):
                break
        if result.chunks >= plan.chunks:
            result.reason = None
        else:
            result.reason = result.reason or "the instance does not say why"

    def _place(self) -> Place:
        assert self.target is not None
        return self.place(self.target)

    def _plan(self, chunks: ModelPrompt, target: Place) -> Plan:
        holders, keys = self._registry.holders, chunks.prompt.keys
        member = target.member
        own = dict.fromkeys(member.places, member.id)
        here = holders.prefixes_of(own, keys).get(member.id, 0)
        peers = holders.prefixes_of(self._peers(member), keys[here:])
        peer = max(peers, key=lambda address: peers[address], default=None)
        known = chunks.first(here + (peers[peer] if peer is not None else 0))
        # What a pool holds is asked for by the instance alone.
        pools = any(tier.shared and tier.type != PEERS for tier in member.hello.tiers)
        return Plan(
            [Part(target.tier, chunks if pools else known)],
            known.num_tokens,
            len(known.prompt.keys),
            chunks.model.names[0],
            peer,
            more=pools,
        )

    def _peers(self, member: Member) -> dict[int, str]:
        """By place: where it can be fetched from. Others serve what is theirs alone."""
        return {
            place: other.hello.peer
            for other in self._registry.members.values()
            if other is not member and other.hello.peer is not None
            for place, tier in zip(other.places, other.hello.tiers, strict=True)
            if not tier.shared
        }


class Fetching(NamedTuple):
    """One command to fetch, and what is made of its answer."""

    target: Place
    peer: str | None
    namespace: bytes
    chunks: Prompt
    seconds: float | None = None

    async def carry_out(self, result: Result, report: Report) -> list[ChunkKey]:
        """The chunks that the target holds now. Raises ``MemberGone`` and ``CommandFailed``."""
        fetch = partial(
            Fetch,
            tier=self.target.tier,
            peer=self.peer,
            namespace=self.namespace,
            keys=join_keys(self.chunks.keys),
            lengths=list(self.chunks.lengths),
            seconds=self.seconds,
        )
        done = await tell(self.target.member, fetch, self._progressed(result, report))
        arrived = confirmed(done, self.chunks.keys)
        held = frozenset(arrived)
        result.chunks += len(arrived)
        result.tokens += sum(
            tokens for key, tokens in zip(self.chunks.keys, self.chunks.tokens, strict=True) if key in held
        )
        result.bytes += done.bytes
        result.reason = done.reason
        report(result.chunks, result.bytes)
        return arrived

    def _progressed(self, result: Result, report: Report) -> Progressed:
        before, transferred = result.chunks, result.bytes

        def progressed(so_far: Progress) -> None:
            report(before + so_far.chunks, transferred + so_far.bytes)

        return progressed
