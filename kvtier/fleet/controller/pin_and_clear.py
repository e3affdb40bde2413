"""Operations that pin, unpin and clear chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvtier.fleet.controller.events import Result
from kvtier.fleet.controller.operation import (
    Operation,
    Part,
    Plan,
    Report,
    TierRef,
    confirmed_keys,
    run_command,
)
from kvtier.fleet.controller.pin_restore import settle_pins
from kvtier.fleet.controller.prompts import ModelPrompt
from kvtier.fleet.member.protocol import MAX_KEYS, Delete, DeleteAll, Pin, Unpin
from kvtier.memory.keys import join_keys


class _PinOperation(Operation):
    """Base of pin and unpin."""

    def _held(self) -> list[ModelPrompt]:
        """Return the prefix of the prompt that the tier holds, in each layout."""
        number, holders = self.target_tier().number, self._registry.holders
        return [chunks.first(holders.prefixes(chunks.prompt.keys).get(number, 0)) for chunks in self._prompts]


class PinChunks(_PinOperation):
    """Protect the prefix of a prompt that a tier holds from eviction."""

    kind = "pin"
    exclusive = False

    def plan(self) -> Plan:
        """Plan for the layout with the longest prefix held."""
        chunks = max(self._held(), key=lambda held: held.num_tokens)
        self._pins.check(len(chunks.prompt.keys), self._registry.members)
        part = Part(self.target_tier().tier, chunks)
        return Plan([part], chunks.num_tokens, len(chunks.prompt.keys), chunks.model.names[0])

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Pin the chunks on the instance, and persist the pins."""
        member = self.target_tier().member
        [part] = plan.parts
        for chunks in part.chunks.slices(MAX_KEYS):
            keys = chunks.keys
            pin = partial(Pin, keys=join_keys(keys), seconds=self._seconds)
            done = await run_command(member, pin)
            pinned = confirmed_keys(done, keys)
            self._pins.add(member.id, pinned, self._seconds, self._registry.members)
            held = frozenset(pinned)
            result.chunks += len(pinned)
            result.tokens += sum(count for key, count in zip(keys, chunks.tokens, strict=True) if key in held)
            result.reason = done.reason or result.reason
            report(result.chunks, 0)


class UnpinChunks(_PinOperation):
    """Allow all chunks of a prompt to be evicted again, including those not held now."""

    kind = "unpin"
    # Else the answer of a pin could be processed after the unpin, and list what is not protected.
    exclusive = True

    def plan(self) -> Plan:
        """Plan for the whole prompt, in every layout."""
        held = max(self._held(), key=lambda chunks: chunks.num_tokens)
        return Plan(
            [Part(self.target_tier().tier, chunks) for chunks in self._prompts],
            held.num_tokens,
            len(held.prompt.keys),
            self._prompts[0].model.names[0],
            more=True,
        )

    async def execute(self, plan: Plan, result: Result, report: Report) -> None:
        """Unpin the chunks, and delete the persisted pins."""
        member = self.target_tier().member
        result.tokens, result.chunks = plan.num_tokens, plan.chunks
        for part in plan.parts:
            for chunks in part.chunks.slices(MAX_KEYS):
                keys = chunks.keys
                result.unpinned += len(self._pins.drop(member.id, keys))
                done = await run_command(member, partial(Unpin, keys=join_keys(keys)))
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
        for chunks in self._prompts:
            there = [holders.held(ref.number, chunks.prompt.keys) for ref in refs]
            parts += (
                Part(ref.tier, chunks.selected(held) if _is_fully_indexed(ref) else chunks)
                for ref, held in zip(refs, there, strict=True)
            )
            known += sum(map(sum, there))
            held_somewhere = [any(held) for held in zip(*there, strict=True)]
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
        for part in plan.parts:
            for chunks in part.chunks.slices(MAX_KEYS):
                done = await run_command(member, partial(Delete, tier=part.tier, keys=join_keys(chunks.keys)))
                result.chunks += done.chunks
                result.removed += done.chunks
                result.bytes += done.bytes
                result.reason = done.reason or result.reason
                report(result.chunks, result.bytes)
        keys = [key for _, prompt in self._prompts for key in prompt.keys]
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
