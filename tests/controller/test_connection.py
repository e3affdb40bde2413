"""Instances and the controller over a real WebSocket: who comes, who goes, and what may not be said."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.abc import TaskStatus
from websockets.exceptions import ConnectionClosed

from kvtier import http
from kvtier.agent.protocol import (
    MOST_KEYS,
    Changed,
    Done,
    HeldBy,
    InStep,
    Model,
    Refused,
    Serves,
    TierState,
    Unpin,
    Welcome,
    WhoHolds,
)
from kvtier.controller import connection, registry
from kvtier.controller import member as member_module
from kvtier.controller.checks import MOST_MODELS
from kvtier.controller.errors import MemberGone
from kvtier.keys import KEY_BYTES, join_keys
from kvtier.layout import ChunkLayout, GroupLayout
from kvtier.sockets.frames import MAX_FRAME_BYTES, encode_body
from tests.controller.registering import (
    DISK,
    MODEL,
    RAM,
    TIERS,
    RunningRegistry,
    heartbeat,
    hello,
    keys_of,
    running_registry,
)

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 5)


async def test_an_instance_registers_tells_what_it_holds_and_leaves(running: RunningRegistry) -> None:
    known = running.registry
    async with running.instance() as instance:
        welcome = await instance.register("one")
        assert (welcome.heartbeat, welcome.silence) == (2.0, 60.0)
        member = running.member()
        await instance.say(Serves([MODEL]))
        await instance.tell(KEYS[:3], RAM)
        await instance.tell(KEYS, DISK, removed=keys_of("never told", 2))
        await running.until(lambda: known.holders.count(member.places[DISK]) == 5)
        assert not member.in_step
        await instance.say(InStep(), heartbeat(used=8192))
        await running.until(lambda: member.heartbeat is not None)
        assert member.in_step
        assert member.heartbeat is not None
        assert member.heartbeat.tiers[RAM].used == 8192
        assert member.models == (MODEL,)
        assert known.holders.prefixes(KEYS) == {member.places[RAM]: 3, member.places[DISK]: 5}
        await instance.tell(KEYS[2:3], RAM, removed=KEYS)
        await running.until(lambda: known.holders.count(member.places[RAM]) == 1)
        assert known.holders.held(member.places[RAM], KEYS) == [False, False, True, False, False]
    await running.until(lambda: not known.members)
    assert known.holders.prefixes(KEYS) == {}
    await running.until(lambda: len(known.holders) == 0)
    assert known.models.find("llama") == [MODEL], "known although nobody serves it now"


async def test_as_many_keys_as_fit_are_taken_in(running: RunningRegistry) -> None:
    many, others = keys_of("many", MOST_KEYS), keys_of("others", MOST_KEYS)
    async with running.instance("one") as instance:
        await instance.tell(many, RAM)
        await instance.tell(others, RAM, removed=many)
        await instance.say(WhoHolds(1, join_keys(many)))
        assert isinstance(await instance.hear(), HeldBy)
        assert running.registry.holders.prefixes(others) == {running.member().places[RAM]: MOST_KEYS}
        assert running.registry.holders.prefixes(many) == {}


async def test_a_controller_that_is_restarted_is_told_all_again() -> None:
    async with running_registry() as before, before.holding("one", KEYS) as instance:
        port = before.port
        assert before.registry.holders.prefixes(KEYS)
    assert not before.registry.members
    await instance.closed()
    async with running_registry(port) as after:
        assert after.registry.holders.prefixes(KEYS) == {}
        async with after.holding("one", KEYS):
            assert after.registry.holders.prefixes(KEYS) == {after.member().places[RAM]: 5}


async def test_one_who_says_nothing_is_dropped() -> None:
    async with running_registry(heartbeat=0.05, silence=0.3) as running:
        async with running.holding("one", KEYS) as instance:
            assert await instance.refusal() == "it has said nothing for 0.3 s"
        assert not running.registry.members
        async with running.instance("one") as instance:
            for _ in range(10):
                await anyio.sleep(0.05)
                await instance.say(heartbeat())
            assert running.member().over is None


async def test_one_who_does_not_say_who_it_is_is_let_go(
    running: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.1)
    async with running.instance() as instance:
        assert await instance.refusal() == "it has said nothing for 0.1 s"


# Two of one name.


async def test_a_second_instance_of_a_name_is_refused(running: RunningRegistry) -> None:
    async with running.instance("one", host="first-host", process=11) as first, running.instance() as second:
        await second.say(hello("one"))
        ping = await first.hear()
        assert isinstance(ping, Unpin)
        assert not ping.keys
        await first.say(Done(ping.ticket, b"", 0, 0))
        assert await second.refusal() == (
            "instance id 'one' is taken by process 11 on host first-host, which is alive: set another "
            "controller.instance_id"
        )
        assert running.member().hello.process == 11


async def test_whatever_the_first_says_shows_that_it_is_alive(running: RunningRegistry) -> None:
    async with running.instance("one") as first, running.instance() as second:
        await second.say(hello("one"))
        await first.hear()
        await first.say(heartbeat())
        assert "is alive" in await second.refusal()


async def test_one_that_does_not_answer_gives_way(
    running: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PING_SECONDS", 0.1)
    async with running.holding("one", KEYS, process=11) as first, running.instance("one", process=12):
        assert running.member().hello.process == 12
        assert running.registry.holders.prefixes(KEYS) == {}
        assert await first.refusal() == "another instance of its id has come, and it has not answered"
        assert running.member().hello.process == 12, "the end of the first is not the end of the second"
        assert len(running.registry.members) == 1


async def test_one_that_connects_anew_takes_its_own_place_at_once(running: RunningRegistry) -> None:
    async with running.holding("one", KEYS, incarnation=5) as first, running.instance("one", incarnation=5):
        assert await first.refusal() == "it has connected anew"
        assert running.registry.holders.prefixes(KEYS) == {}
        assert len(running.registry.members) == 1


async def test_of_many_that_come_at_once_one_is_registered(
    running: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for one that is there to answer on the busiest machine; the silent one costs as much.
    monkeypatch.setattr(registry, "PING_SECONDS", 2.0)
    answers: list[str] = []

    async def come(*, task_status: TaskStatus[None]) -> None:
        async with running.instance() as instance:
            await instance.say(hello("one"))
            task_status.started()
            answers.append(type(await instance.hear()).__name__)
            with suppress(ConnectionClosed):
                while True:  # One that is registered answers for its name.
                    await instance.websocket.recv()
                    await instance.say(heartbeat())

    async with running.instance("one") as silent, anyio.create_task_group() as tasks:
        for _ in range(5):
            await tasks.start(come)
        await silent.closed()
        await running.until(lambda: len(answers) == 5)
        assert sorted(answers) == ["Refused"] * 4 + ["Welcome"]
        assert len(running.registry.members) == 1
        tasks.cancel_scope.cancel()


async def test_a_sign_of_life_is_one_to_each_who_asks(running: RunningRegistry) -> None:
    answers: list[bool] = []

    async def ask() -> None:
        answers.append(await running.member().responds(60.0))

    async with running.instance("one") as instance, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
            await instance.hear()
        await instance.say(heartbeat())
        await running.until(lambda: answers == [True] * 3)


# What may not be said.


def layout(**changes: Any) -> ChunkLayout:
    return ChunkLayout(**{"chunk_tokens": 256, "groups": (GroupLayout(32, (1024,)),), **changes})


def serves(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"names": ["m"], "namespace": bytes(32), "layout": layout(), "tokenizer": False}
    return encode_body(Serves([Model(**{**fields, **changes})]))


def pack(*elements: object) -> bytes:
    return msgspec.msgpack.encode(elements)


HOSTILE = {
    "nothing": (b"", "sends text or nothing"),
    "garbage": (b"\xc1" * 100, "not a message of an instance"),
    "noise": (random.Random(0).randbytes(1000), "not a message of an instance"),
    "no tag": (pack(99, 1), "not a message of an instance"),
    "truncated": (encode_body(heartbeat())[:-3], "not a message of an instance"),
    "deep": (b"\x91" * 100_000, "not a message of an instance"),
    "long list": (pack(8, [], 0, [""] * 300_000, 0, 0), "is over 262144"),
    "too long": (bytes([0x94, 5, 0, 0xC6]) + bytes(MAX_FRAME_BYTES - 10), "not a message of an instance"),
    "hello again": (encode_body(hello()), "Hello twice"),
    "welcome": (encode_body(Welcome(1, 1.0, 1.0)), "not a message of an instance"),
    "no keys": (encode_body(Changed(RAM, bytes(33), b"")), "33 bytes are not a whole number"),
    "nothing removed": (encode_body(Changed(RAM, b"", bytes(1))), "1 bytes are not a whole number"),
    "too many keys": (
        encode_body(Changed(RAM, bytes(KEY_BYTES * (MOST_KEYS + 1)), b"")),
        "names 32769 chunks in one message",
    ),
    "asks for too many": (encode_body(WhoHolds(1, bytes(KEY_BYTES * (MOST_KEYS + 1)))), "more than 32768"),
    "tier 3": (encode_body(Changed(3, b"", b"")), "tells of tier 3, and has 3 of them"),
    "tier -1": (encode_body(Changed(-1, b"", b"")), "tells of tier -1"),
    "ticket": (encode_body(Done(77, b"", 0, 0)), "ticket 77"),
    "fewer tiers": (pack(8, [], 0, [], 0, 0), "0 tiers where it said 3"),
    "negative bytes": (pack(8, [TierState(-1, 0, True, 0)] * 3, 0, [], 0, 0), "-1 is less than 0"),
    "huge count": (pack(8, [TierState(1 << 63, 0, True, 0)] * 3, 0, [], 0, 0), "or over"),
    "engines": (pack(8, [TierState(0, 0, True, 0)] * 3, 0, ["e"] * 500, 0, 0), "500 engines"),
    "engine": (pack(8, [TierState(0, 0, True, 0)] * 3, 0, ["\x07"], 0, 0), "not printable"),
    "no names": (serves(names=[]), "has 0 names"),
    "name": (serves(names=["<b>\n"]), "not printable"),
    "namespace": (serves(namespace=b"short"), "has 5 bytes, not 32"),
    "models": (encode_body(Serves([MODEL] * (MOST_MODELS + 1))), "serves 65 models"),
    "chunk": (serves(layout=layout(chunk_tokens=0)), "makes no sense"),
    "block": (pack(4, [[["m"], bytes(32), [256, [[0, [1], 0]], 1, ""], False]]), "makes no sense"),
    "odd block": (pack(4, [[["m"], bytes(32), [256, [[33, [1], 0]], 1, ""], False]]), "makes no sense"),
    "window": (serves(layout=layout(groups=(GroupLayout(32, (1,), -1),))), "makes no sense"),
    "page": (serves(layout=layout(groups=(GroupLayout(32, (-1,)),))), "makes no sense"),
    "big": (serves(layout=layout(groups=(GroupLayout(32, (1 << 40,)),))), "makes no sense"),
    "groups": (serves(layout=layout(groups=(GroupLayout(32, (1,)),) * 65)), "makes no sense"),
    "ranks": (serves(layout=layout(ranks=0)), "makes no sense"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_may_not_be_said_ends_that_connection_alone(running: RunningRegistry, name: str) -> None:
    body, reason = HOSTILE[name]
    async with running.holding("well", KEYS) as well, running.holding("bad", KEYS) as bad:
        await bad.websocket.send(body)
        assert reason in await bad.refusal()
        assert list(running.registry.members) == ["well"]
        assert running.registry.holders.prefixes(KEYS) == {running.member("well").places[RAM]: 5}
        await well.say(WhoHolds(1, join_keys(KEYS)))
        assert await well.hear() == HeldBy(1, [], [])


async def test_text_is_refused(running: RunningRegistry) -> None:
    async with running.instance() as instance:
        await instance.websocket.send("hello")
        assert "sends text" in await instance.refusal()


@pytest.mark.parametrize("message", [heartbeat(), InStep(), Changed(RAM, join_keys(KEYS), b"")])
async def test_nothing_is_heard_before_hello(running: RunningRegistry, message: Any) -> None:
    async with running.instance() as instance:
        await instance.say(message)
        assert await instance.refusal() == f"it says {type(message).__name__} before Hello"
        assert not running.registry.members


async def test_one_that_may_not_register_is_told_why(running: RunningRegistry) -> None:
    async with running.instance() as instance:
        await instance.say(hello("one", tiers=TIERS * 6))
        assert await instance.refusal() == "it has 18 tiers, and can have 1 to 16"


async def test_a_frame_that_is_longer_than_may_be_is_not_read(running: RunningRegistry) -> None:
    async with running.instance("one") as instance:
        with suppress(ConnectionClosed):
            await instance.websocket.send(bytes(2 * MAX_FRAME_BYTES))
        await instance.closed()
        await running.until(lambda: not running.registry.members)


# One that reads nothing.


async def test_one_that_reads_nothing_is_dropped() -> None:
    async with running_registry(heartbeat=0.1, silence=0.5) as running, running.instance("deaf") as deaf:
        for number in range(8):  # So that its questions have long answers.
            said = hello(f"holder-{number}", peer="h" * 240 + ":8200")
            holder = await running.registry.admit(said, lambda: None)
            running.registry.stored(holder, RAM, KEYS)
        member = running.member("deaf")
        deaf.websocket.transport.pause_reading()
        question = encode_body(WhoHolds(1, join_keys(KEYS)))

        async def ask_without_end() -> None:  # Silent it is not.
            while True:
                await deaf.websocket.send(question)
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_without_end)
            await running.until(lambda: "deaf" not in running.registry.members)
            tasks.cancel_scope.cancel()
        assert member.over == "it has taken nothing in for 0.5 s"
        deaf.websocket.transport.abort()


async def test_what_waits_for_one_that_reads_nothing_is_bounded(
    running: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "MOST_UNSENT_BYTES", 1 << 20)
    async with running.instance("deaf") as deaf:
        member = running.member("deaf")
        deaf.websocket.transport.pause_reading()
        told = 0
        with suppress(MemberGone):
            while told < 200:
                member.say(Refused("x" * 100_000))
                told += 1
                await anyio.lowlevel.checkpoint()
        assert 5 < told < 200
        assert member.over == "it takes in nothing of what it is told"
        await running.until(lambda: not running.registry.members)
        deaf.websocket.transport.abort()


async def test_the_socket_of_one_that_reads_nothing_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD_SECONDS", 1.0)
    async with running_registry(heartbeat=0.1, silence=0.5) as running, running.instance("deaf") as deaf:
        deaf.websocket.transport.pause_reading()
        member = running.member("deaf")
        for _ in range(3):
            member.say(Refused("x" * 3_000_000))
        await running.until(lambda: not running.registry.members)
        assert accepted(running.port) == 1, "what it has not read is still to be sent"
        await running.until(lambda: accepted(running.port) == 0)
        deaf.websocket.transport.abort()


def accepted(port: int) -> int:
    """How many connections to a port there are, seen from where they were accepted."""
    ends_in = f":{port:04X}"
    lines = [line for line in Path("/proc/self/net/tcp").read_text().splitlines() if ends_in in line]
    connections = [line.split() for line in lines]
    return sum(local.endswith(ends_in) and state == "01" for _, local, _, state, *_ in connections)
