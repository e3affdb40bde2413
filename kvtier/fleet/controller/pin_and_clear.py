"""Operations that pin, unpin and clear chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import anyio

from kvtier.concurrency.locks import LockManager, LockRequest
from kvtier.fleet.controller.errors import CommandFailed, MemberGone
from kvtier.fleet.controller.events import Result
from kvtier.fleet.controller.member import Member, TierRef
from kvtier.fleet.controller.operation import (
    Operation,
    Part,
    Plan,
    Report,
    confirmed_keys,
    count_confirmed,
    run_command,
)
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.prompts import without_repeats
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import MAX_KEYS, Delete, DeleteAll, Pin, Unpin
from kvtier.memory.keys import ChunkKey, join_keys

logger = logging.getLogger("kvtier.controller")
PAUSE_SECONDS = 0.1
"""Pause between two passes, as every heartbeat counts as a change of the registry."""


class _PinOperation(Operation):
    """Base of pin and unpin."""

    def _plan_for_held(self) -> Plan:
        """Plan for the longest prefix of the prompt that the tier holds, of all layouts."""
        target, holders = self.target_tier(), self._registry.holders
        held = (chunks.first(holders.prefixes(chunks.keys).get(target.number, 0)) for chunks in self._prompts)
        return Plan.of(target.tier, max(held, key=lambda chunks: chunks.num_tokens))


class PinChunks(_PinOperation):
    """Protect the prefix of a prompt that a tier holds from eviction."""

    kind = "pin"
    exclusive = False

    def plan(self) -> Plan:
        """Plan for the layout with the longest prefix held."""
        plan = self._plan_for_held()
        self._pins.check(plan.chunks, self._registry.members)
        return plan

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Pin the chunks on the instance, and persist the pins."""
        member = self.target_tier().member
        for _, chunks in plan.slices():
            pin = partial(Pin, keys=join_keys(chunks.keys), seconds=self._seconds)
            pinned = count_confirmed(await run_command(member, pin), chunks, result)
            self._pins.add(member.id, pinned, self._seconds, self._registry.members)
            report(result.chunks, 0)


class UnpinChunks(_PinOperation):
    """Allow all chunks of a prompt to be evicted again, including those not held now."""

    kind = "unpin"
    # Else the answer of a pin could be processed after the unpin, and list what is not protected.
    exclusive = True

    def plan(self) -> Plan:
        """Plan for the whole prompt, in every layout."""
        parts = [Part(self.target_tier().tier, chunks) for chunks in without_repeats(self._prompts)]
        return self._plan_for_held()._replace(parts=parts, more=True)

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Unpin the chunks, and delete the persisted pins."""
        member = self.target_tier().member
        result.tokens, result.chunks = plan.num_tokens, plan.chunks
        for _, chunks in plan.slices():
            result.unpinned += len(self._pins.drop(member.id, chunks.keys))
            done = await run_command(member, partial(Unpin, keys=join_keys(chunks.keys)))
            result.reason = done.reason or result.reason


class Clear(Operation):
    """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance.

    Without prompts, all chunks.
    """

    kind = "clear"
    exclusive = True

    def plan(self) -> Plan:
        """Plan for all held chunks of the prompt, in any layout, including those beyond a gap."""
        holders, refs = self._registry.holders, self._refs()
        if not self._prompts:
            known = sum(holders.count(ref.number) for ref in refs)
            return Plan(chunks=known, more=not all(_is_fully_indexed(ref) for ref in refs))
        parts: list[Part] = []
        known = tokens = 0
        for chunks, new in zip(self._prompts, without_repeats(self._prompts), strict=True):
            there = [holders.held(ref.number, new.keys) for ref in refs]
            parts += (
                Part(ref.tier, new.selected(held) if _is_fully_indexed(ref) else new)
                for ref, held in zip(refs, there, strict=True)
            )
            known += sum(map(sum, there))
            whole = (holders.held(ref.number, chunks.keys) for ref in refs)
            held_somewhere = [any(held) for held in zip(*whole, strict=True)]
            tokens = max(tokens, chunks.selected(held_somewhere).num_tokens)
        more = not all(_is_fully_indexed(ref) for ref in refs)
        return Plan(parts, tokens, known, self._prompts[0].model.names[0], more=more)

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Delete the chunks, tier by tier."""
        result.tokens = plan.num_tokens
        refs = self._refs()
        member = refs[0].member
        if not self._prompts:
            await self._remove_all(refs, result)
        for tier, chunks in plan.slices():
            done = await run_command(member, partial(Delete, tier=tier, keys=join_keys(chunks.keys)))
            result.chunks += done.chunks
            result.removed += done.chunks
            result.bytes += done.bytes
            result.reason = done.reason or result.reason
            report(result.chunks, result.bytes)
        keys = [key for chunks in self._prompts for key in chunks.keys]
        result.unpinned = await settle_pins(
            self._registry, self._pins, member, keys if self._prompts else self._pins.keys(member.id)
        )

    async def _remove_all(self, refs: Sequence[TierRef], result: Result) -> None:
        tier = None if self._all_tiers else refs[0].tier
        done = await run_command(refs[0].member, partial(DeleteAll, tier=tier))
        result.chunks = result.removed = done.chunks
        result.bytes = done.bytes
        result.reason = done.reason

    @property
    def _all_tiers(self) -> bool:
        return self.target[1] is None

    def _refs(self) -> list[TierRef]:
        if not self._all_tiers:
            return [self.target_tier()]
        instance, _ = self.target
        member = self._registry.find(instance)
        refs = [TierRef(member, tier) for tier in range(len(member.hello.tiers))]
        return [ref for ref in refs if not ref.is_peers]


def _is_fully_indexed(ref: TierRef) -> bool:
    """Return whether the index is complete for a tier: not for shared pools and instances out of date."""
    return ref.member.up_to_date and not ref.shared


async def settle_pins(registry: Registry, pins: Pins, member: Member, keys: Sequence[ChunkKey]) -> int:
    """End the pins on those ``keys`` of which an instance has no copy left. Return how many were pinned.

    An instance forgets the pin on a chunk with its last copy. If it stores the chunk again meanwhile, it may
    have kept the pin, or hold an unpinned copy: so it has to unpin the one, and pin the other again.
    """
    stale = set(keys)
    for place in member.places:
        stale -= {key for key, held in zip(keys, registry.holders.held(place, keys), strict=True) if held}
    dropped = pins.drop(member.id, stale)
    try:
        for part in _parts(dropped):
            await run_command(member, partial(Unpin, keys=join_keys(part)))
        left = frozenset(keys) - stale
        for pinned, seconds in pins.of(member.id):
            for part in _parts([key for key in pinned if key in left]):
                lost = set(part).difference(await _pin(member, part, seconds))
                dropped += pins.drop(member.id, lost)
    except (CommandFailed, MemberGone) as error:
        logger.warning("instance %s: its pins may differ from those that are listed: %s", member.id, error)
    return len(dropped)


def _parts(keys: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    """Split keys for commands."""
    return (keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS))


async def _pin(member: Member, keys: Sequence[ChunkKey], seconds: float | None) -> list[ChunkKey]:
    """Pin chunks; return those that the instance holds. Raises: MemberGone, CommandFailed."""
    command = partial(Pin, keys=join_keys(keys), seconds=seconds)
    return confirmed_keys(await run_command(member, command))


async def restore_pins(registry: Registry, pins: Pins, locks: LockManager) -> None:
    """Restore the pins of each instance that has connected, until cancelled."""
    restored: set[Member] = set()
    seen = registry.changes.count
    async with anyio.create_task_group() as tasks:
        while True:
            restored &= set(registry.members.values())
            for member in registry.members.values():
                if member.up_to_date and member not in restored:
                    restored.add(member)
                    if pins.count(member.id):
                        tasks.start_soon(_restore, member, pins, locks)
            seen = await registry.changes.after(seen)
            await anyio.sleep(PAUSE_SECONDS)


async def _restore(member: Member, pins: Pins, locks: LockManager) -> None:
    count = 0
    # Else an unpin or a clear could end pins before they are given again.
    async with locks.held(LockRequest(None, frozenset((member.id,)), exclusive=False)):
        try:
            for keys, seconds in pins.of(member.id):
                for part in _parts(keys):
                    count += len(await _pin(member, part, seconds))
        except (CommandFailed, MemberGone) as error:
            logger.warning("instance %s: pins could not be restored: %s", member.id, error)
        else:
            logger.info("instance %s: pins restored on %d chunks", member.id, count)
