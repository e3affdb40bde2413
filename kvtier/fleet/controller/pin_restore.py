"""Restores the pins of instances that reconnect, and ends those on removed chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from kvtier.fleet.controller.errors import CommandFailed, MemberGone
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.operation import confirmed_keys, run_command
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import MAX_KEYS, Unpin
from kvtier.fleet.member.protocol import Pin as PinCommand
from kvtier.memory.keys import ChunkKey, join_keys

logger = logging.getLogger("kvtier.controller")

PAUSE_SECONDS = 0.1
"""Pause between two passes, as every heartbeat counts as a change of the registry."""


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
    command = partial(PinCommand, keys=join_keys(keys), seconds=seconds)
    return confirmed_keys(await run_command(member, command), keys)


async def restore_pins(registry: Registry, pins: Pins) -> None:
    """Restore pins until cancelled."""
    restored: set[Member] = set()
    watch = registry.watch()
    async with anyio.create_task_group() as tasks:
        while True:
            restored &= set(registry.members.values())
            _start_restoring(registry, pins, restored, tasks)
            await watch.changed()
            await anyio.sleep(PAUSE_SECONDS)


def _start_restoring(registry: Registry, pins: Pins, restored: set[Member], tasks: TaskGroup) -> None:
    for member in registry.members.values():
        if member.up_to_date and member not in restored:
            restored.add(member)
            if pins.has(member.id):
                tasks.start_soon(_restore, member, pins)


async def _restore(member: Member, pins: Pins) -> None:
    count = 0
    try:
        for keys, seconds in pins.of(member.id):
            for part in _parts(keys):
                count += len(await _pin(member, part, seconds))
    except (CommandFailed, MemberGone) as error:
        logger.warning("instance %s: pins could not be restored: %s", member.id, error)
    else:
        logger.info("instance %s: pins restored on %d chunks", member.id, count)
