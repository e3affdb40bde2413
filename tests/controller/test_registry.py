"""What the registry knows and is asked: instances and tiers by name, holders, history, and changes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kvtier.agent.protocol import HeldBy, Hello, InStep, Lost, TierDescription, WhoHolds
from kvtier.controller import history, registry
from kvtier.controller.checks import MOST_TIERS
from kvtier.controller.errors import RefusedInstance, UnknownInstance, UnknownTier
from kvtier.controller.history import History, Sample, TierSample
from kvtier.controller.member import Member
from kvtier.controller.registry import Registry
from kvtier.keys import join_keys
from tests.controller.registering import (
    DISK,
    PATIENCE,
    POOL,
    RAM,
    TIERS,
    RegisteringInstance,
    RunningRegistry,
    heartbeat,
    hello,
    keys_of,
    running_registry,
)

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 10)


async def admitted(known: Registry, instance: str = "one", **changes: Any) -> Member:
    return await known.admit(hello(instance, **changes), lambda: None)


async def who_holds(instance: RegisteringInstance, ticket: int = 7) -> dict[str, int]:
    await instance.say(WhoHolds(ticket, join_keys(KEYS)))
    answer = await instance.hear()
    assert isinstance(answer, HeldBy)
    assert answer.ticket == ticket
    return dict(zip(answer.peers, answer.chunks, strict=True))


def test_what_heartbeats_and_silence_must_be() -> None:
    with pytest.raises(ValueError, match="no sign of life"):
        Registry(heartbeat=5, silence=5)


async def test_instances_and_tiers_are_found_by_name() -> None:
    known = Registry()
    one = await admitted(known, "one")
    two = await admitted(known, "two", tiers=[*TIERS, TierDescription("fast", "cpu", 1, False)])
    assert known.find("one") is one
    assert known.members == {"one": one, "two": two}
    with pytest.raises(UnknownInstance, match="no instance 'three'; known: one, two") as unknown:
        known.find("three")
    assert unknown.value.known == ["one", "two"]
    assert known.tier(one, "ssd") == known.tier(one, "disk") == DISK
    assert known.tier(one, "cpu") == RAM
    assert known.tier(two, "fast") == 3
    with pytest.raises(UnknownTier, match="no tier 'cpu' in instance 'two'; known: fast, pool, ram, ssd"):
        known.tier(two, "cpu")


async def test_places_of_those_who_left_are_given_again() -> None:
    known = Registry()
    one = await admitted(known, "one")
    known.stored(one, RAM, KEYS)
    known.leave(one, "it is a test")
    known.stored(one, RAM, KEYS)  # Said before, and taken in late.
    two = await admitted(known, "two")
    assert sorted(two.places) == sorted(one.places)
    assert known.holders.prefixes(KEYS) == {}
    known.leave(one, "again")
    assert list(known.members) == ["two"]


async def test_an_instance_is_told_who_else_holds_a_prompt(running: RunningRegistry) -> None:
    async with (
        running.holding("few", KEYS[:2]),
        running.holding("most", KEYS[:6], tier=DISK) as most,
        running.holding("mute", KEYS, peer=None),
        running.holding("pool", KEYS, tier=POOL),
        running.holding("later", KEYS[1:]),
        running.holding("asker", KEYS) as asker,
    ):
        assert await who_holds(asker) == {"most:8200": 6, "few:8200": 2}
        await most.tell(KEYS[6:], RAM)
        await running.until(lambda: running.registry.holders.count(running.member("most").places[RAM]) == 4)
        found = await who_holds(asker)
        assert list(found.items()) == [("most:8200", 10), ("few:8200", 2)], "all its tiers together"
        await most.say(Lost())
        await running.until(lambda: not running.member("most").in_step)
        assert await who_holds(asker) == {"few:8200": 2}
        await most.tell(KEYS[:3], RAM)
        assert (await who_holds(most))["asker:8200"] == 10
        assert await who_holds(asker) == {"most:8200": 3, "few:8200": 2}, "whether it is in step or not"
    await running.until(lambda: not running.registry.members)
    async with running.instance("asker") as asker:
        assert await who_holds(asker) == {}


async def test_no_more_holders_are_named_than_can_be_asked(running: RunningRegistry) -> None:
    known = running.registry
    for number in range(20):
        member = await admitted(known, f"holder-{number}")
        known.stored(member, RAM, KEYS[: number // 2])
    async with running.instance("asker") as asker:
        found = await who_holds(asker)
    assert sorted(found.values(), reverse=True) == [9, 9, 8, 8, 7, 7, 6, 6]


async def test_changes_wake_who_waits_for_them(running: RunningRegistry) -> None:
    watch = running.registry.watch()

    async def changes() -> bool:
        with anyio.move_on_after(PATIENCE) as scope:
            await watch.changed()
        return not scope.cancelled_caught

    async with running.instance("one") as instance:
        assert await changes()
        await instance.say(InStep())
        assert await changes()
        await instance.say(heartbeat(), heartbeat(), heartbeat(used=1))
        await running.until(lambda: _used(running) == 1)
        assert await changes()
        with anyio.move_on_after(0.01) as scope:
            await watch.changed()
        assert scope.cancelled_caught, "many changes were one"
    assert await changes()


def _used(running: RunningRegistry) -> int | None:
    latest = running.member().heartbeat
    return None if latest is None else latest.tiers[RAM].used


async def test_how_instances_were_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SAMPLE_SECONDS", 0.01)
    async with running_registry() as running, running.instance("one") as instance:
        member = running.member()
        assert running.registry.history(member) == ()
        await instance.say(heartbeat(used=4096, looked_up=10, found=3))
        await running.until(lambda: bool(running.registry.history(member)))
        sample = running.registry.history(member)[0]
        assert (sample.looked_up, sample.tiers) == (10, (TierSample(4096, 3),) * len(TIERS))


async def test_a_history_has_an_hour_and_survives_the_connection() -> None:
    known, kept = Registry(), History()
    member = await admitted(known)
    for number in range(400):
        member.heartbeat = heartbeat(used=number)
        kept.sample([member], 10.0 * number)
    samples = kept.of("one")
    assert len(samples) == 360
    assert samples[0] == Sample(400.0, 0, (TierSample(40, 0),) * len(TIERS))
    again = Member(hello("one"), member.places, lambda: None)
    again.heartbeat = heartbeat()
    kept.sample([again], 4500.0)
    assert [sample.time for sample in kept.of("one")][-2:] == [3990.0, 4500.0]
    assert kept.of("one")[0].time == 910.0, "nothing older than an hour"
    other = Member(hello("one", tiers=TIERS[:1]), [0], lambda: None)
    other.heartbeat = heartbeat()
    kept.sample([other], 4510.0)
    assert len(kept.of("one")) == 1, "its tiers are others now"
    kept.sample([], 4509.0 + history.KEPT_SECONDS)
    assert kept.of("one")
    kept.sample([], 4510.0 + history.KEPT_SECONDS)
    assert kept.of("one") == ()


async def test_there_is_a_most_of_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_INSTANCES", 3)
    known, kept = Registry(), History()
    for number in range(5):
        member = await admitted(known, f"i{number}")
        member.heartbeat = heartbeat()
        kept.sample([member], float(number))
    assert [bool(kept.of(f"i{number}")) for number in range(5)] == [False, False, True, True, True]


async def test_there_is_a_most_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_MEMBERS", 2)
    known = Registry()
    await admitted(known, "one")
    await admitted(known, "two")
    with pytest.raises(RefusedInstance, match="has 2 instances, which is its limit"):
        await admitted(known, "three")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "version 1 of the protocol and the instance 99: install the same kvtier"),
        ({"instance": ""}, "no instance id"),
        ({"instance": "a b"}, "no instance id"),
        ({"instance": "a" * 129}, "no instance id"),
        ({"instance": "one\n"}, "no instance id"),
        ({"host": "a\x1b[31mb"}, "not printable"),
        ({"kvtier": ""}, "is empty"),
        ({"peer": "nowhere"}, "where peers reach it: 'nowhere' is no address"),
        ({"peer": "h" * 300 + ":1"}, "over 256 characters"),
        ({"process": -1}, "less than 0"),
        ({"tiers": []}, "it has 0 tiers"),
        ({"tiers": TIERS * MOST_TIERS}, "it has 48 tiers, and can have 1 to 16"),
        ({"tiers": TIERS[:1] * 2}, "two of its tiers have one name"),
        ({"tiers": [TierDescription("", "cpu", 1, False)]}, "its tiers: '' is empty"),
        ({"tiers": [TierDescription("ram", "cpu", 1 << 63, False)]}, "or over"),
    ],
)
async def test_an_instance_that_says_what_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    known = Registry()
    said: Hello = hello(**changes)
    with pytest.raises(RefusedInstance, match=reason):
        await known.admit(said, lambda: None)
    assert not known.members
