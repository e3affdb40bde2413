"""Gives each instance that registers anew its pins again, and ends those on chunks that it has no longer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from kvtier.agent.protocol import MOST_KEYS
from kvtier.agent.protocol import Pin as PinCommand
from kvtier.controller.errors import CommandFailed, MemberGone
from kvtier.controller.member import Member
from kvtier.controller.operation import tell
from kvtier.controller.pins import Pins
from kvtier.controller.registry import Registry
from kvtier.keys import ChunkKey, join_keys

logger = logging.getLogger("kvtier.controller")

PAUSE_SECONDS = 0.1
"""Between two looks at who is there: heartbeats change the registry all the time."""


def end_pins(registry: Registry, pins: Pins, member: Member, keys: Sequence[ChunkKey]) -> None:
    """Forget the pins on those of ``keys`` of which an instance has no copy left."""
    gone = set(keys)
    for place in member.places:
        gone -= {key for key, held in zip(keys, registry.holders.held(place, keys), strict=True) if held}
    pins.drop(member.id, gone)


async def give_pins(registry: Registry, pins: Pins) -> None:
    """Go on giving pins until cancelled."""
    given: set[Member] = set()
    watch = registry.watch()
    async with anyio.create_task_group() as tasks:
        while True:
            given &= set(registry.members.values())
            _give_to_new(registry, pins, given, tasks)
            await watch.changed()
            await anyio.sleep(PAUSE_SECONDS)


def _give_to_new(registry: Registry, pins: Pins, given: set[Member], tasks: TaskGroup) -> None:
    for member in registry.members.values():
        if member.in_step and member not in given:
            given.add(member)
            if pins.has(member.id):
                tasks.start_soon(_give, member, pins)


async def _give(member: Member, pins: Pins) -> None:
    count = 0
    try:
        for keys, seconds in pins.of(member.id):
            for start in range(0, len(keys), MOST_KEYS):
                part = join_keys(keys[start : start + MOST_KEYS])
                done = await tell(member, partial(PinCommand, keys=part, seconds=seconds))
                count += done.chunks
    except (CommandFailed, MemberGone) as error:
        logger.warning("the pins of instance %s could not be given again: %s", member.id, error)
    else:
        logger.info("instance %s has its pins again: %d chunks", member.id, count)
