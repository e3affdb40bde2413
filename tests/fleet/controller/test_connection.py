"""Instances and the controller over a real WebSocket: registration, duplicates, invalid messages."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.abc import TaskStatus
from websockets.exceptions import ConnectionClosed

from kvtier import http
from kvtier.errors import ChannelClosed
from kvtier.fleet.controller import connection, registry
from kvtier.fleet.controller.checks import MAX_MODELS
from kvtier.fleet.member.protocol import (
    MAX_KEYS,
    VERSION,
    Changed,
    Done,
    HeldBy,
    Model,
    Serves,
    TierDescription,
    TierState,
    UpToDate,
    Welcome,
    WhoHolds,
    WhoServes,
)
from kvtier.memory.keys import KEY_BYTES, join_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.frames import MAX_FRAME_BYTES, Ping, Pong, Refused, encode_body
from tests.rigs.running_controller import (
    DISK,
    MODEL,
    RAM,
    TIERS,
    RunningController,
    heartbeat,
    hello,
    keys_of,
    running_controller,
    unconnected,
)

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 5)


async def test_instance_registers_reports_its_chunks_and_disconnects(running: RunningController) -> None:
    registered = running.registry
    async with running.connect() as instance:
        welcome = await instance.register("one")
        assert (welcome.heartbeat, welcome.idle_timeout) == (2.0, 60.0)
        member = running.member()
        await instance.send(Serves([MODEL]))
        await instance.report(KEYS[:3], RAM)
        await instance.report(KEYS, DISK, removed=keys_of("never reported", 2))
        await running.wait_until(lambda: registered.holders.count(member.places[DISK]) == 5)
        assert not member.up_to_date
        await instance.send(UpToDate(), heartbeat(used=8192))
        await running.wait_until(lambda: member.heartbeat is not None)
        assert member.up_to_date
        assert member.heartbeat is not None
        assert member.heartbeat.tiers[RAM].used == 8192
        assert member.models == (MODEL,)
        assert registered.holders.prefixes(KEYS) == {member.places[RAM]: 3, member.places[DISK]: 5}
        await instance.report(KEYS[2:3], RAM, removed=KEYS)
        await running.wait_until(lambda: registered.holders.count(member.places[RAM]) == 1)
        assert registered.holders.held(member.places[RAM], KEYS) == [False, False, True, False, False]
    await running.wait_until(lambda: not registered.members)
    assert registered.holders.prefixes(KEYS) == {}
    await running.wait_until(lambda: len(registered.holders) == 0)
    assert registered.models.find("llama") == [MODEL], "known although no instance serves it now"


async def test_messages_of_the_maximum_number_of_keys(running: RunningController) -> None:
    many, others = keys_of("many", MAX_KEYS), keys_of("others", MAX_KEYS)
    async with running.connect("one") as instance:
        await instance.report(many, RAM)
        await instance.report(others, RAM, removed=many)
        await instance.send(WhoHolds(1, join_keys(many)))
        assert isinstance(await instance.receive(), HeldBy)
        assert running.registry.holders.prefixes(others) == {running.member().places[RAM]: MAX_KEYS}
        assert running.registry.holders.prefixes(many) == {}


async def test_restarted_controller_receives_all_reports_again(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as before, before.holding("one", KEYS) as instance:
        port = before.port
        assert before.registry.holders.prefixes(KEYS)
    assert not before.registry.members
    await instance.wait_closed()
    async with running_controller(tmp_path, listen=f"127.0.0.1:{port}") as after:
        assert after.registry.holders.prefixes(KEYS) == {}
        async with after.holding("one", KEYS):
            assert after.registry.holders.prefixes(KEYS) == {after.member().places[RAM]: 5}


async def test_unresponsive_instance_is_disconnected(tmp_path: Path) -> None:
    async with running_controller(tmp_path, heartbeat=0.05, instance_timeout=0.3) as running:
        async with running.holding("one", KEYS) as instance:
            assert await instance.refusal() == "no message for 0.3 s"
        assert not running.registry.members
        async with running.connect("one") as instance:
            for _ in range(10):
                await anyio.sleep(0.05)
                await instance.send(heartbeat())
            assert running.member().closed_reason is None


async def test_connection_without_hello_is_closed(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.1)
    async with running.connect() as instance:
        assert await instance.refusal() == "no message within 0.1 s"


# Duplicate ids.


async def test_second_instance_with_the_same_id_is_refused(running: RunningController) -> None:
    async with running.connect("one", host="first-host", process=11) as first, running.connect() as second:
        await second.send(hello("one"))
        ping = await first.receive()
        assert isinstance(ping, Ping)
        await first.send(Pong(ping.ticket))
        assert await second.refusal() == (
            "instance id 'one' is in use by process 11 on host first-host: set another "
            "controller.instance_id (KVTIER_CONTROLLER__INSTANCE_ID)"
        )
        assert running.member().hello.process == 11


async def test_any_message_answers_the_ping(running: RunningController) -> None:
    async with running.connect("one") as first, running.connect() as second:
        await second.send(hello("one"))
        await first.receive()
        await first.send(heartbeat())
        assert "is in use" in await second.refusal()


async def test_unresponsive_instance_is_replaced(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PING_SECONDS", 0.1)
    async with (
        running.holding("one", KEYS, process=11) as first,
        running.connect("one", process=12),
    ):
        assert running.member().hello.process == 12
        assert running.registry.holders.prefixes(KEYS) == {}
        assert await first.refusal() == (
            "another instance with its id has connected, and it did not answer a ping"
        )
        assert running.member().hello.process == 12, "the end of the first is not the end of the second"
        assert len(running.registry.members) == 1


async def test_reconnected_instance_replaces_its_old_connection(running: RunningController) -> None:
    async with (
        running.holding("one", KEYS, incarnation=5) as first,
        running.connect("one", incarnation=5),
    ):
        assert await first.refusal() == "it has reconnected"
        assert running.registry.holders.prefixes(KEYS) == {}
        assert len(running.registry.members) == 1


async def test_one_of_many_concurrent_duplicates_is_registered(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for an answer on the busiest machine; the unresponsive instance costs as much.
    monkeypatch.setattr(registry, "PING_SECONDS", 2.0)
    answers: list[str] = []

    async def register(*, task_status: TaskStatus[None]) -> None:
        async with running.connect() as instance:
            await instance.send(hello("one"))
            task_status.started()
            answers.append(type(await instance.receive()).__name__)
            with suppress(ConnectionClosed):
                while True:  # A registered instance answers pings.
                    await instance.websocket.recv()
                    await instance.send(heartbeat())

    async with running.connect("one") as unresponsive, anyio.create_task_group() as tasks:
        for _ in range(5):
            await tasks.start(register)
        await unresponsive.wait_closed()
        await running.wait_until(lambda: len(answers) == 5)
        assert sorted(answers) == ["Refused"] * 4 + ["Welcome"]
        assert len(running.registry.members) == 1
        tasks.cancel_scope.cancel()


async def test_one_message_answers_all_pings(running: RunningController) -> None:
    answers: list[bool] = []

    async def ask() -> None:
        answers.append(await running.member().responds(60.0))

    async with running.connect("one") as instance, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
            await instance.receive()
        await instance.send(heartbeat())
        await running.wait_until(lambda: answers == [True] * 3)


# Invalid messages.


def layout(**changes: Any) -> ChunkLayout:
    return ChunkLayout(**{"chunk_tokens": 256, "groups": (GroupLayout(32, (1024,)),), **changes})


def serves(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"names": ["m"], "namespace": bytes(32), "layout": layout(), "tokenizer": False}
    return encode_body(Serves([Model(**{**fields, **changes})]))


def pack(*elements: object) -> bytes:
    return msgspec.msgpack.encode(elements)


INVALID_MESSAGES = {
    "nothing": (b"", "sends text or nothing"),
    "garbage": (b"\xc1" * 100, "not a message from an instance"),
    "noise": (random.Random(0).randbytes(1000), "not a message from an instance"),
    "no tag": (pack(99, 1), "not a message from an instance"),
    "truncated": (encode_body(heartbeat())[:-3], "not a message from an instance"),
    "deep": (b"\x91" * 100_000, "not a message from an instance"),
    "long list": (pack(14, [], 0, [""] * 300_000, 0, 0), "is over 262144"),
    "too long": (bytes([0x94, 11, 0, 0xC6]) + bytes(MAX_FRAME_BYTES - 10), "not a message from an instance"),
    "hello again": (encode_body(hello()), "unexpected Hello"),
    "process": (encode_body(hello(process=-1)), ">= 0 - at `$[6]`"),
    "capacity": (
        encode_body(hello(tiers=[TierDescription("ram", "cpu", 1 << 63, False)])),
        "Expected `int` <= ",
    ),
    "welcome": (encode_body(Welcome(VERSION, 1.0, 1.0)), "not a message from an instance"),
    "no keys": (encode_body(Changed(RAM, bytes(33), b"")), "33 bytes are not a whole number"),
    "nothing removed": (encode_body(Changed(RAM, b"", bytes(1))), "1 bytes are not a whole number"),
    "too many keys": (
        encode_body(Changed(RAM, bytes(KEY_BYTES * (MAX_KEYS + 1)), b"")),
        "names 32769 chunks in one message",
    ),
    "asks for too many": (encode_body(WhoHolds(1, bytes(KEY_BYTES * (MAX_KEYS + 1)))), "more than 32768"),
    "too many addresses": (encode_body(WhoServes(1, ["a:1"] * 33)), "Expected `array` of length <= 32"),
    "tier 3": (encode_body(Changed(3, b"", b"")), "reports on tier 3, but has 3 tiers"),
    "tier -1": (encode_body(Changed(-1, b"", b"")), "reports on tier -1"),
    "ticket": (encode_body(Done(77, b"", 0, 0)), "Done answers a request that was not sent"),
    "fewer tiers": (pack(14, [], 0, [], 0, 0), "0 tiers, but it registered 3"),
    "negative bytes": (
        pack(14, [TierState(-1, 0, True, 0)] * 3, 0, [], 0, 0),
        ">= 0 - at `$[1][0][0]`",
    ),
    "huge count": (pack(14, [TierState(1 << 63, 0, True, 0)] * 3, 0, [], 0, 0), "Expected `int` <= "),
    "engines": (pack(14, [TierState(0, 0, True, 0)] * 3, 0, ["e"] * 500, 0, 0), "500 engines"),
    "engine": (pack(14, [TierState(0, 0, True, 0)] * 3, 0, ["\x07"], 0, 0), "not printable"),
    "no names": (serves(names=[]), "has 0 names"),
    "name": (serves(names=["<b>\n"]), "not printable"),
    "namespace": (serves(namespace=b"short"), "has 5 bytes, not 32"),
    "models": (encode_body(Serves([MODEL] * (MAX_MODELS + 1))), "serves 65 models"),
    "chunk": (pack(10, [[["m"], bytes(32), [0, [[32, [1], 0]], 1, ""], False]]), "at least one token"),
    "block": (pack(10, [[["m"], bytes(32), [256, [[0, [1], 0]], 1, ""], False]]), "at least one token"),
    "odd block": (pack(10, [[["m"], bytes(32), [256, [[33, [1], 0]], 1, ""], False]]), "not a multiple of"),
    "window": (serves(layout=layout(groups=(GroupLayout(32, (1,), -1),))), "is invalid"),
    "page": (serves(layout=layout(groups=(GroupLayout(32, (-1,)),))), "is invalid"),
    "big": (serves(layout=layout(groups=(GroupLayout(32, (1 << 40,)),))), "is invalid"),
    "groups": (serves(layout=layout(groups=(GroupLayout(32, (1,)),) * 65)), "is invalid"),
    "ranks": (pack(10, [[["m"], bytes(32), [256, [[32, [1], 0]], 0, ""], False]]), "0 ranks, not 1 to"),
}


@pytest.mark.parametrize("name", INVALID_MESSAGES)
async def test_invalid_message_ends_only_that_connection(running: RunningController, name: str) -> None:
    body, reason = INVALID_MESSAGES[name]
    async with running.holding("well", KEYS) as well, running.holding("bad", KEYS) as bad:
        await bad.websocket.send(body)
        assert reason in await bad.refusal()
        assert list(running.registry.members) == ["well"]
        assert running.registry.holders.prefixes(KEYS) == {running.member("well").places[RAM]: 5}
        await well.send(WhoHolds(1, join_keys(KEYS)))
        assert await well.receive() == HeldBy(1, [], [])


async def test_text_is_refused(running: RunningController) -> None:
    async with running.connect() as instance:
        await instance.websocket.send("hello")
        assert "sends text" in await instance.refusal()


@pytest.mark.parametrize("message", [heartbeat(), UpToDate(), Changed(RAM, join_keys(KEYS), b"")])
async def test_messages_before_hello_are_refused(running: RunningController, message: Any) -> None:
    async with running.connect() as instance:
        await instance.send(message)
        assert await instance.refusal() == f"the first message is {type(message).__name__}, not Hello"
        assert not running.registry.members


async def test_instance_of_another_version_is_refused(running: RunningController) -> None:
    async with running.connect() as instance:
        await instance.send(hello("one", version=99))
        reason = f"the client speaks protocol version 99 and the server version {VERSION}: install"
        assert reason in await instance.refusal()
        assert not running.registry.members


async def test_refused_registration_has_a_reason(running: RunningController) -> None:
    async with running.connect() as instance:
        await instance.send(hello("one", tiers=TIERS * 6))
        assert await instance.refusal() == "the instance has 18 tiers, not 1 to 16"


async def test_oversized_frame_is_not_read(running: RunningController) -> None:
    async with running.connect("one") as instance:
        with suppress(ConnectionClosed):
            await instance.websocket.send(bytes(2 * MAX_FRAME_BYTES))
        await instance.wait_closed()
        await running.wait_until(lambda: not running.registry.members)


# Instances that read nothing.


async def test_instance_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, heartbeat=0.1, instance_timeout=0.5) as running,
        running.connect("stalled") as stalled,
    ):
        for number in range(8):  # So that WhoHolds has a long answer.
            message = hello(f"holder-{number}", peer="h" * 240 + ":8200")
            holder = await running.registry.admit(message, unconnected())
            running.registry.stored(holder, RAM, KEYS)
        member = running.member("stalled")
        stalled.websocket.transport.pause_reading()
        question = encode_body(WhoHolds(1, join_keys(KEYS)))

        async def send_questions() -> None:  # It is not idle.
            while True:
                await stalled.websocket.send(question)
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_questions)
            await running.wait_until(lambda: "stalled" not in running.registry.members)
            tasks.cancel_scope.cancel()
        assert member.closed_reason == "the other side has read nothing for 0.5 s"
        stalled.websocket.transport.abort()


async def test_send_queue_is_bounded(running: RunningController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 1 << 20)
    async with running.connect("stalled") as stalled:
        member = running.member("stalled")
        stalled.websocket.transport.pause_reading()
        sent = 0
        with suppress(ChannelClosed):
            while sent < 200:
                member.endpoint.send(Refused("x" * 100_000))
                sent += 1
                await anyio.lowlevel.checkpoint()
        assert 5 < sent < 200
        assert member.closed_reason == "the other side has not read for too long"
        await running.wait_until(lambda: not running.registry.members)
        stalled.websocket.transport.abort()


async def test_socket_of_an_instance_that_reads_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "UNREAD_SECONDS", 1.0)
    async with (
        running_controller(tmp_path, heartbeat=0.1, instance_timeout=0.5) as running,
        running.connect("stalled") as stalled,
    ):
        stalled.websocket.transport.pause_reading()
        member = running.member("stalled")
        for _ in range(3):
            member.endpoint.send(Refused("x" * 3_000_000))
        await running.wait_until(lambda: not running.registry.members)
        assert accepted(running.port) == 1, "unread data is still queued"
        await running.wait_until(lambda: accepted(running.port) == 0)
        stalled.websocket.transport.abort()


def accepted(port: int) -> int:
    """Return the number of accepted connections to a port."""
    suffix = f":{port:04X}"
    lines = [line for line in Path("/proc/self/net/tcp").read_text().splitlines() if suffix in line]
    connections = [line.split() for line in lines]
    return sum(local.endswith(suffix) and state == "01" for _, local, _, state, *_ in connections)


async def test_long_reports_are_indexed_in_slices_and_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else requests would have no turn while a thousand instances report all that they hold."""
    monkeypatch.setattr(connection, "SLICE_BYTES", 8 * KEY_BYTES)
    indexed: list[str] = []
    index: Any = SimpleNamespace(
        indexing=anyio.CapacityLimiter(registry.MAX_INDEXING),
        removed=lambda member, tier, keys: None,
        stored=lambda member, tier, keys: indexed.append(member.id),
    )
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as counting:
        counting.start_soon(count_turns)
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                member: Any = SimpleNamespace(id=name, places=[0])
                tasks.start_soon(connection._index, index, member, Changed(0, bytes(80 * KEY_BYTES), b""))
        counting.cancel_scope.cancel()
    assert sorted(indexed) == sorted("abc" * 10)
    assert set(indexed[:18]) == {"a", "b"}
    assert turns >= 10
