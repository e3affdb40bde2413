"""Operations that transfer chunks into a tier: move, copy and prefetch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from kvtier.fleet.controller.errors import CommandFailed, MemberGone, UnknownName, WrongRequest
from kvtier.fleet.controller.events import Kind, Result
from kvtier.fleet.controller.member import PEERS, TierRef
from kvtier.fleet.controller.operation import Operation, Part, Plan, Report, count_confirmed, run_command
from kvtier.fleet.controller.pin_and_clear import settle_pins
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.member.protocol import Delete, Fetch
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.tiers.planner import FIRST


class Move(Operation):
    """Move chunks to another tier, of the same or another instance.

    Moves the chunks that the source holds, up to the first chunk that neither tier holds. So repeating an
    interrupted move completes it.
    """

    kind: Kind = "move"
    exclusive = True

    def plan(self) -> Plan:
        """Plan for the layout with the most tokens to move."""
        source, target = self._refs()
        return max(
            (self._plan(chunks, source, target) for chunks in self._prompts), key=lambda plan: plan.num_tokens
        )

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Fetch, then delete exactly the confirmed chunks from the source, in slices of ``MAX_KEYS``."""
        source, target = self._refs()
        peer = source.member.hello.peer if source.member is not target.member else None
        if source.member is not target.member and peer is None:
            raise CommandFailed(
                f"instance {source.member.id!r} does not serve peers: set peer.listen in its settings"
            )
        for _, chunks in plan.slices():
            # Before the fetch, in which the source reads them into memory.
            promoted = self._keys_to_promote(source, target, chunks.keys)
            try:
                arrived = await fetch_chunks(target, peer, chunks, result, report)
            except MemberGone as error:
                raise MemberGone(
                    f"the target {target.member.id!r} disconnected before it confirmed all chunks ({error}): "
                    "the source keeps the unconfirmed ones"
                ) from error
            if self.exclusive:
                await self._remove_from_source(source, arrived, promoted, result)
            if len(arrived) < len(chunks.keys):
                result.reason = self._shortfall_reason(source, result.reason)
                return

    def _refs(self) -> tuple[TierRef, TierRef]:
        """Return the source and the target. Raises: WrongRequest: they are the same, or the source a pool."""
        assert self.source is not None
        source, target = self._registry.find_tier(self.source), self.target_tier()
        if source == target:
            raise WrongRequest("`old_position` and `new_position` are the same")
        if source.shared:
            raise WrongRequest(
                f"tier {self.source[1]!r} of instance {self.source[0]!r} is a shared pool, whose content is "
                "not indexed: use /prefetch to fetch from it"
            )
        return source, target

    def _plan(self, chunks: PromptChunks, source: TierRef, target: TierRef) -> Plan:
        holders = self._registry.holders
        here = holders.held(source.number, chunks.keys)
        there = holders.held(target.number, chunks.keys)
        reach = next(
            (at for at, held in enumerate(zip(here, there, strict=True)) if not any(held)), len(here)
        )
        return Plan.of(target.tier, chunks.first(reach).selected(here[:reach]))

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
            member, tier = self._registry.find_tier(self.source)
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


class Copy(Move):
    """A move after which the source keeps the chunks."""

    kind = "copy"
    exclusive = False


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
        for _, chunks in plan.slices():
            arrived = await fetch_chunks(target, plan.peer, chunks, result, report, self._seconds)
            if len(arrived) < len(chunks.keys):
                break
        if result.chunks >= plan.chunks:
            result.reason = None
        else:
            result.reason = result.reason or "the instance gave no reason"

    def _plan(self, chunks: PromptChunks, target: TierRef) -> Plan:
        member = target.member
        here = self._registry.held(member.id, chunks.keys)
        peers = self._registry.peers_with(member, chunks.keys[here:])
        peer, further = (peers[0][0].hello.peer, peers[0][1]) if peers else (None, 0)
        known = chunks.first(here + further)
        # Only the instance can look up shared pools, so request all chunks.
        pools = any(tier.shared and tier.type != PEERS for tier in member.hello.tiers)
        plan = Plan.of(target.tier, known)._replace(peer=peer, more=pools)
        return plan._replace(parts=[Part(target.tier, chunks)]) if pools else plan


async def fetch_chunks(
    target: TierRef,
    peer: str | None,
    chunks: PromptChunks,
    result: Result,
    report: Report,
    seconds: float | None = None,
) -> list[ChunkKey]:
    """Fetch chunks, and return those that the target then holds. Raises: MemberGone, CommandFailed."""
    before, transferred = result.chunks, result.bytes
    fetch = partial(
        Fetch,
        tier=target.tier,
        peer=peer,
        namespace=chunks.model.namespace,
        keys=join_keys(chunks.keys),
        lengths=list(chunks.lengths),
        seconds=seconds,
    )
    done = await run_command(
        target.member, fetch, lambda current: report(before + current.chunks, transferred + current.bytes)
    )
    arrived = count_confirmed(done, chunks, result)
    result.bytes += done.bytes
    report(result.chunks, result.bytes)
    return arrived
