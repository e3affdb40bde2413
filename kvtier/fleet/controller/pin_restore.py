"""Restores the pins of instances that reconnect, and drops pins on removed chunks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from kvtier.fleet.controller.errors import CommandFailed, MemberGone
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.operation import run_command
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import MAX_KEYS, Unpin
from kvtier.fleet.member.protocol import Pin as PinCommand
from kvtier.memory.keys import ChunkKey, join_keys

logger = logging.getLogger("kvtier.controller")

PAUSE_SECONDS = 0.1
"""Pause between two passes, as every heartbeat counts as a change of the registry."""


async def drop_stale_pins(registry: Registry, pins: Pins, member: Member, keys: Sequence[ChunkKey]) -> int:
    """Drop the pins on those ``keys`` of which an instance has no copy left. Return how many were pinned.

    An instance forgets these itself, but not those that it is storing again meanwhile: it has to be told.
    """
    stale = set(keys)
    for place in member.places:
        stale -= {key for key, held in zip(keys, registry.holders.held(place, keys), strict=True) if held}
    dropped = pins.drop(member.id, stale)
    try:
        for start in range(0, len(dropped), MAX_KEYS):
            part = join_keys(dropped[start : start + MAX_KEYS])
            await run_command(member, partial(Unpin, keys=part))
    except (CommandFailed, MemberGone) as error:
        logger.warning("instance %s: chunks could not be unpinned: %s", member.id, error)
    return len(dropped)


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
            for start in range(0, len(keys), MAX_KEYS):
                part = join_keys(keys[start : start + MAX_KEYS])
                done = await run_command(member, partial(PinCommand, keys=part, seconds=seconds))
                count += done.chunks
    except (CommandFailed, MemberGone) as error:
        logger.warning("instance %s: pins could not be restored: %s", member.id, error)
    else:
        logger.info("instance %s: pins restored on %d chunks", member.id, count)
