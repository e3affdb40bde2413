"""What is kept and what is not: pins, and clearing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvtier.agent.protocol import MOST_KEYS, Delete, DeleteAll, Pin, Unpin
from kvtier.controller.events import Position, Result
from kvtier.controller.operation import Operation, Part, Place, Plan, Report, confirmed, tell
from kvtier.controller.pinning import end_pins
from kvtier.controller.pins import Pins
from kvtier.controller.prompts import ModelPrompt
from kvtier.controller.registry import Registry
from kvtier.keys import join_keys


class _Pinning(Operation):
    """What pins and their inverse have in common."""

    deletes = False

    def __init__(
        self, registry: Registry, prompts: Sequence[ModelPrompt], pins: Pins, *, target: Position
    ) -> None:
        super().__init__(registry, prompts, target=target)
        self._pins = pins

    def _place(self) -> Place:
        assert self.target is not None
        return self.place(self.target)

    def _held(self) -> list[ModelPrompt]:
        """What the tier holds of the beginning of the prompt, in each layout."""
        number, holders = self._place().number, self._registry.holders
        return [chunks.first(holders.prefixes(chunks.prompt.keys).get(number, 0)) for chunks in self._prompts]


class PinChunks(_Pinning):
    """Keep what a tier holds of the beginning of a prompt from being evicted."""

    kind = "pin"

    def __init__(
        self,
        registry: Registry,
        prompts: Sequence[ModelPrompt],
        pins: Pins,
        *,
        target: Position,
        seconds: float | None,
    ) -> None:
        super().__init__(registry, prompts, pins, target=target)
        self._seconds = seconds

    def plan(self) -> Plan:
        """Of the layouts of the model the one of which most is held."""
        chunks = max(self._held(), key=lambda held: held.num_tokens)
        self._pins.check(len(chunks.prompt.keys), self._registry.members)
        part = Part(self._place().tier, chunks)
        return Plan([part], chunks.num_tokens, len(chunks.prompt.keys), chunks.model.names[0])

    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Pin, and remember it."""
        member = self._place().member
        [part] = plan.parts
        for chunks in part.chunks.slices(MOST_KEYS):
            keys = chunks.keys
            pin = partial(Pin, keys=join_keys(keys), seconds=self._seconds)
            done = await tell(member, pin)
            pinned = confirmed(done, keys)
            self._pins.add(member.id, pinned, self._seconds, self._registry.members)
            held = frozenset(pinned)
            result.chunks += len(pinned)
            result.tokens += sum(count for key, count in zip(keys, chunks.tokens, strict=True) if key in held)
            result.reason = done.reason or result.reason
            report(result.chunks, 0)


class UnpinChunks(_Pinning):
    """Let a prompt be evicted again, whatever of it is held now."""

    kind = "unpin"

    def plan(self) -> Plan:
        """The whole prompt, in every layout."""
        held = max(self._held(), key=lambda chunks: chunks.num_tokens)
        return Plan(
            [Part(self._place().tier, chunks) for chunks in self._prompts],
            held.num_tokens,
            len(held.prompt.keys),
            self._prompts[0].model.names[0],
            more=True,
        )

    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Unpin, and forget it."""
        member = self._place().member
        result.tokens, result.chunks = plan.num_tokens, plan.chunks
        for part in plan.parts:
            for chunks in part.chunks.slices(MOST_KEYS):
                keys = chunks.keys
                self._pins.drop(member.id, keys)
                done = await tell(member, partial(Unpin, keys=join_keys(keys)))
                result.reason = done.reason or result.reason


class Clear(Operation):
    """Remove a prompt, or everything, from one tier of an instance or from all."""

    kind = "clear"
    deletes = True

    def __init__(
        self, registry: Registry, prompts: Sequence[ModelPrompt], pins: Pins, *, target: Position
    ) -> None:
        """Without ``prompts`` everything is meant."""
        super().__init__(registry, prompts, target=target)
        self._pins = pins

    def plan(self) -> Plan:
        """What is held there of the prompt, in any layout, at its beginning or not."""
        holders, places = self._registry.holders, self._places()
        if not self._prompts:
            known = sum(holders.count(place.number) for place in places)
            return Plan(chunks=known, more=not all(_is_known(place) for place in places))
        parts: list[Part] = []
        known = tokens = 0
        for chunks in self._prompts:
            there = [holders.held(place.number, chunks.prompt.keys) for place in places]
            parts += (
                Part(place.tier, chunks.part(held) if _is_known(place) else chunks)
                for place, held in zip(places, there, strict=True)
            )
            known += sum(map(sum, there))
            held_somewhere = [any(held) for held in zip(*there, strict=True)]
            tokens = max(tokens, chunks.part(held_somewhere).num_tokens)
        more = not all(_is_known(place) for place in places)
        return Plan(parts, tokens, known, self._prompts[0].model.names[0], more=more)

    async def carry_out(self, plan: Plan, result: Result, report: Report) -> None:
        """Delete, tier by tier."""
        result.tokens = plan.num_tokens
        places = self._places()
        member = places[0].member
        if not self._prompts:
            await self._remove_all(places, result)
        for part in plan.parts:
            for chunks in part.chunks.slices(MOST_KEYS):
                done = await tell(member, partial(Delete, tier=part.tier, keys=join_keys(chunks.keys)))
                result.chunks += done.chunks
                result.removed += done.chunks
                result.bytes += done.bytes
                result.reason = done.reason or result.reason
                report(result.chunks, result.bytes)
        keys = [key for _, prompt in self._prompts for key in prompt.keys]
        end_pins(self._registry, self._pins, member, keys if self._prompts else self._pins.keys(member.id))

    async def _remove_all(self, places: Sequence[Place], result: Result) -> None:
        tier = None if self._everywhere else places[0].tier
        done = await tell(places[0].member, partial(DeleteAll, tier=tier))
        result.chunks = result.removed = done.chunks
        result.bytes = done.bytes
        result.reason = done.reason

    @property
    def _everywhere(self) -> bool:
        return self.target is not None and self.target[1] is None

    def _places(self) -> list[Place]:
        assert self.target is not None
        instance, _ = self.target
        if not self._everywhere:
            return [self.place(self.target)]
        member = self._registry.find(instance)
        places = [Place(member, tier) for tier in range(len(member.hello.tiers))]
        return [place for place in places if not place.is_of_peers]


def _is_known(place: Place) -> bool:
    """Whether all that it holds is known: not what is in a shared pool, nor what is still being told."""
    return place.member.in_step and not place.shared
