"""Instances and the controller over a real WebSocket: who comes, who goes, and what they say."""

from __future__ import annotations

import pytest

from kvtier.agent.protocol import InStep, Serves
from tests.controller.registering import DISK, MODEL, RAM, RunningRegistry, heartbeat, keys_of

pytestmark = pytest.mark.anyio


async def test_an_instance_registers_tells_what_it_holds_and_leaves(running: RunningRegistry) -> None:
    registry = running.registry
    keys = keys_of("prompt", 5)
    async with running.instance() as instance:
        welcome = await instance.register("one")
        assert (welcome.heartbeat, welcome.silence) == (2.0, 60.0)
        member = running.member()
        await instance.say(Serves([MODEL]))
        await instance.tell(keys[:3], RAM)
        await instance.tell(keys, DISK, removed=keys_of("never told", 2))
        await running.until(lambda: registry.holders.count(member.places[DISK]) == 5)
        assert not member.in_step
        await instance.say(InStep(), heartbeat(used=8192))
        await running.until(lambda: member.heartbeat is not None)
        assert member.in_step
        assert member.heartbeat is not None
        assert member.heartbeat.tiers[RAM].used == 8192
        assert member.models == (MODEL,)
        assert registry.holders.prefixes(keys) == {member.places[RAM]: 3, member.places[DISK]: 5}
    await running.until(lambda: not registry.members)
    assert registry.holders.prefixes(keys) == {}
    assert registry.models.find("llama") == [MODEL], "known although nobody serves it now"
