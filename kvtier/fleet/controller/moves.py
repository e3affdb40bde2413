"""Operations that transfer chunks into a tier: move, copy and prefetch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.fleet.controller.errors import CommandFailed, MemberGone, UnknownName, WrongRequest
from kvtier.fleet.controller.events import Kind, Position, Result
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.operation import (
    PEERS,
    Operation,
    Part,
    Plan,
    Report,
    TierRef,
    confirmed_keys,
    run_command,
)
from kvtier.fleet.controller.pin_and_clear import settle_pins
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import MAX_KEYS, Delete, Fetch, Progress
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.tiers.planner import FIRST

Progressed = Callable[[Progress], None]


class Move(Operation):
    """Move chunks to another tier, of the same or another instance. With ``copy`` the source keeps them.

    Moves the chunks that the source holds, up to the first chunk that neither tier holds. So repeating an
    interrupted move completes it.
    """

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[PromptChunks],
        pins: Pins,
        *,
        source: Position,
        target: Position,
        copy: bool,
    ) -> None:
        """Raises: WrongRequest: source and target are the same, or the source is a shared pool."""
        super().__init__(registry, prompts, pins, source=source, target=target)
        self._copy = copy
        self.kind: Kind = "copy" if copy else "move"
        self.exclusive = not copy
        old, new = self.find(source), self.find(target)
        if old == new:
            raise WrongRequest("`old_position` and `new_position` are the same")
        if old.shared:
            raise WrongRequest(
                f"tier {source[1]!r} of instance {source[0]!r} is a shared pool, whose content is not "
                "indexed: use /prefetch to fetch from it"
            )

    def plan(self) -> Plan:
        """Plan for the layout with the most tokens to move."""
        source, target = self._refs()
        return max(
            (self._plan(chunks, source, target) for chunks in self._prompts), key=lambda plan: plan.num_tokens
        )

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Fetch, then delete exactly the confirmed chunks from the source, in slices of ``MAX_KEYS``."""
        source, target = self._refs()
        [part] = plan.parts
        promoted = self._keys_to_promote(source, target, part.chunks.keys)
        peer = source.member.hello.peer if source.member is not target.member else None
        if source.member is not target.member and peer is None:
            raise CommandFailed(
                f"instance {source.member.id!r} does not serve peers: set peer.listen in its settings"
            )
        for chunks in part.chunks.slices(MAX_KEYS):
            fetch = FetchChunks(target, peer, chunks)
            try:
                arrived = await fetch.execute(result, report)
            except MemberGone as error:
                raise MemberGone(
                    f"the target {target.member.id!r} disconnected before it confirmed all chunks ({error}): "
                    "the source keeps the unconfirmed ones"
                ) from error
            if not self._copy:
                await self._remove_from_source(source, arrived, promoted, result)
            if len(arrived) < len(chunks.keys):
                result.reason = self._shortfall_reason(source, result.reason)
                return

    def _refs(self) -> tuple[TierRef, TierRef]:
        assert self.source is not None
        return self.find(self.source), self.target_tier()

    def _plan(self, chunks: PromptChunks, source: TierRef, target: TierRef) -> Plan:
        holders = self._registry.holders
        here = holders.held(source.number, chunks.keys)
        there = holders.held(target.number, chunks.keys)
        reach = next(
            (at for at, held in enumerate(zip(here, there, strict=True)) if not any(held)), len(here)
        )
        part = chunks.first(reach).selected(here[:reach])
        return Plan([Part(target.tier, part)], part.num_tokens, len(part.keys), chunks.model.names[0])

    def _keys_to_promote(
        self, source: TierRef, target: TierRef, keys: Sequence[ChunkKey]
    ) -> frozenset[ChunkKey]:
        """Return the keys that the source must first promote to memory, where other instances read them."""
        if source.tier == FIRST or source.member is target.member:
            return frozenset()
        there = self._registry.holders.held(source.member.places[FIRST], keys)
        return frozenset(key for key, held in zip(keys, there, strict=True) if not held)

    async def _remove_from_source(
        self, source: TierRef, keys: Sequence[ChunkKey], promoted: Collection[ChunkKey], result: Result
    ) -> None:
        """Delete confirmed chunks from the source, and those that it promoted to memory just for this move.

        The source is looked up by id, as it may have reconnected in the meantime.
        """
        if not keys:
            return
        assert self.source is not None
        try:
            member, tier = self.find(self.source)
            done = await run_command(member, partial(Delete, tier=tier, keys=join_keys(keys)))
            result.removed += done.chunks
            promoted_here = [key for key in keys if key in promoted]
            if promoted_here:
                await run_command(member, partial(Delete, tier=FIRST, keys=join_keys(promoted_here)))
        except (MemberGone, CommandFailed, UnknownName) as error:
            raise CommandFailed(
                f"the target has confirmed {len(keys)} chunks, but the source may still hold them: {error}"
            ) from error
        result.unpinned += await settle_pins(self._registry, self._pins, member, keys)

    def _shortfall_reason(self, source: TierRef, reason: str | None) -> str:
        text = reason or "the target gave no reason"
        if self._registry.members.get(source.member.id) is not source.member:
            return f"the source {source.member.id!r} disconnected: {text}"
        return text


class Prefetch(Operation):
    """Fetch chunks into a tier: from other tiers, and from the peer that holds most of the rest."""

    kind = "prefetch"
    exclusive = False

    def plan(self) -> Plan:
        """Plan for the layout with the most tokens to fetch."""
        target = self.target_tier()
        return max((self._plan(chunks, target) for chunks in self._prompts), key=lambda plan: plan.num_tokens)

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Fetch the planned chunks."""
        target = self.target_tier()
        [part] = plan.parts
        for chunks in part.chunks.slices(MAX_KEYS):
            fetch = FetchChunks(target, plan.peer, chunks, self._seconds)
            arrived = await fetch.execute(result, report)
            if len(arrived) < len(chunks.keys):
                break
        if result.chunks >= plan.chunks:
            result.reason = None
        else:
            result.reason = result.reason or "the instance gave no reason"

    def _plan(self, chunks: PromptChunks, target: TierRef) -> Plan:
        holders, keys = self._registry.holders, chunks.keys
        member = target.member
        own = dict.fromkeys(member.places, member.id)
        here = holders.prefixes_of(own, keys).get(member.id, 0)
        peers = holders.prefixes_of(self._peers(member), keys[here:])
        peer = max(peers, key=lambda address: peers[address], default=None)
        known = chunks.first(here + (peers[peer] if peer is not None else 0))
        # Only the instance can look up shared pools, so request all chunks.
        pools = any(tier.shared and tier.type != PEERS for tier in member.hello.tiers)
        return Plan(
            [Part(target.tier, chunks if pools else known)],
            known.num_tokens,
            len(known.keys),
            chunks.model.names[0],
            peer,
            more=pools,
        )

    def _peers(self, member: Member) -> dict[int, str]:
        """Return the peer addresses by place. Instances do not serve chunks from shared pools."""
        return {
            place: other.hello.peer
            for other in self._registry.members.values()
            if other is not member and other.hello.peer is not None
            for place, tier in zip(other.places, other.hello.tiers, strict=True)
            if not tier.shared
        }


class FetchChunks(NamedTuple):
    """One fetch command, and the evaluation of its answer."""

    target: TierRef
    peer: str | None
    chunks: PromptChunks
    seconds: float | None = None

    async def execute(self, result: Result, report: Report) -> list[ChunkKey]:
        """Fetch, and return the chunks that the target then holds. Raises: MemberGone, CommandFailed."""
        fetch = partial(
            Fetch,
            tier=self.target.tier,
            peer=self.peer,
            namespace=self.chunks.model.namespace,
            keys=join_keys(self.chunks.keys),
            lengths=list(self.chunks.lengths),
            seconds=self.seconds,
        )
        done = await run_command(self.target.member, fetch, self._progress_callback(result, report))
        arrived = confirmed_keys(done, self.chunks.keys)
        held = frozenset(arrived)
        result.chunks += len(arrived)
        result.tokens += sum(
            tokens for key, tokens in zip(self.chunks.keys, self.chunks.tokens, strict=True) if key in held
        )
        result.bytes += done.bytes
        result.reason = done.reason
        report(result.chunks, result.bytes)
        return arrived

    def _progress_callback(self, result: Result, report: Report) -> Progressed:
        before, transferred = result.chunks, result.bytes

        def progressed(current: Progress) -> None:
            report(before + current.chunks, transferred + current.bytes)

        return progressed
