"""An instance registers, reconnects, and never suffers from a faulty controller."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from dataclasses import replace

import anyio
import pytest

from kvtier import __version__
from kvtier.fleet.member import session
from kvtier.fleet.member import session as session_module
from kvtier.fleet.member.controller_client import Controllers
from kvtier.fleet.member.protocol import (
    MAX_KEYS,
    VERSION,
    HeldBy,
    Hello,
    TierDescription,
    Welcome,
    WhatIf,
)
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.instance import Instance
from kvtier.memory.keys import split_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.observability.whatif.report import Report
from kvtier.rpc.frames import MAX_FRAME_BYTES, Message, Refused
from kvtier.testing.backend import make_key
from tests.cache.conftest import CHUNK_OBJECT_BYTES
from tests.fleet.member.conftest import SECRET, Node, OpenNode, Registered
from tests.rigs.scripted_controller import Conversation, ScriptedController, scripted_controller
from tests.rigs.waiting import until
from tests.rigs.whatif_reports import REPORT

pytestmark = pytest.mark.anyio
LAYOUT = ChunkLayout(256, (GroupLayout(16, (1024,)),))


async def test_hello_describes_the_instance(open_node: OpenNode) -> None:
    peer = {"listen": "0.0.0.0:0", "secret": SECRET}
    async with scripted_controller() as controller, open_node(controller, ssd=128, peer=peer) as one:
        conversation = await controller.up_to_date()
        hello = conversation.hello
        assert hello is not None
        assert one.instance.server is not None
        assert hello == Hello(
            VERSION,
            "one",
            hello.incarnation,
            __version__,
            socket.gethostname(),
            os.getpid(),
            f"127.0.0.1:{one.instance.server.address[1]}",
            "tcp",
            [
                TierDescription("ram", "cpu", 64 * CHUNK_OBJECT_BYTES, False),
                TierDescription("ssd", "disk", 128 * CHUNK_OBJECT_BYTES, False),
                TierDescription("peers", "peers", None, True),
            ],
        )
        await until(lambda: one.status["up_to_date"])
        assert one.status | {"lost": 0} == {
            "url": controller.url,
            "instance": "one",
            "connected": True,
            "up_to_date": True,
            "resyncs": 0,
            "commands": 0,
            "refused": None,
            "last_error": "",
            "lost": 0,
        }
        assert one.instance.name.startswith("one:")


@pytest.mark.parametrize(
    ("listen", "address"),
    [("localhost:0", "localhost"), ("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1")],
)
async def test_hello_names_the_configured_host_unless_it_is_a_wildcard(
    listen: str, address: str, open_node: OpenNode
) -> None:
    async with (
        scripted_controller() as controller,
        open_node(controller, peer={"listen": listen, "secret": SECRET}) as one,
    ):
        hello = (await controller.conversation()).hello
        assert hello is not None
        assert one.instance.server is not None
        assert hello.peer == f"{address}:{one.instance.server.address[1]}"


async def test_instance_without_a_listener_reports_no_address(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller):
        hello = (await controller.conversation()).hello
        assert hello is not None
        assert (hello.peer, hello.transport) == (None, None)


async def test_models_are_reported_when_engines_connect(registered: Registered) -> None:
    async with registered() as (conversation, one):
        served = one.instance.served
        served.add("engine-1", b"n" * 32, LAYOUT, None)
        served.add("engine-1", b"n" * 32, LAYOUT, EngineModel(["llama", "/models/llama"]))
        served.add("engine-2", b"n" * 32, LAYOUT, EngineModel(["chat"], TokenizerSource("/models/llama")))
        names = ["llama", "/models/llama", "chat"]
        await until(lambda: [model.names for model in conversation.models] == [["llama"], names])
        own, model = conversation.models
        assert (model.namespace, model.layout, model.tokenizer) == (b"n" * 32, LAYOUT, True)
        await until(lambda: conversation.heartbeats[-1].engines == ["engine-1", "engine-2"])
        served.remove("engine-1")
        await until(lambda: conversation.heartbeats[-1].engines == ["engine-2"])
        assert conversation.models == [own, model]


async def test_models_of_programs_are_reported_once(registered: Registered) -> None:
    async with registered() as (conversation, one):
        qwen = one.cache.model("qwen", token_bytes=32)
        await until(lambda: [model.names for model in conversation.models] == [["llama"], ["qwen"]])
        found = conversation.models[1]
        assert (found.namespace, found.layout, found.tokenizer) == (qwen.namespace, qwen.layout, False)
        seen = one.instance.served.changes.count
        one.cache.model("qwen", token_bytes=32, salt="tenant")
        assert one.instance.served.changes.count == seen
        assert one.instance.served.engines == []


async def test_heartbeats_report_the_tiers(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        await one.store(4)
        assert await one.is_intact(4)
        seen = len(conversation.heartbeats)
        await until(lambda: len(conversation.heartbeats) > seen + 1)
        beat = conversation.heartbeats[-1]
        assert [(tier.chunks, tier.available) for tier in beat.tiers] == [(4, True), (4, True)]
        assert [tier.used for tier in beat.tiers] == [4 * CHUNK_OBJECT_BYTES] * 2
        assert (beat.tiers[0].found, beat.looked_up, beat.leases, beat.pending_bytes) == (4, 4, 0, 0)


async def test_absent_controller_costs_nothing(open_node: OpenNode, caplog: pytest.LogCaptureFixture) -> None:
    controller = ScriptedController()
    await controller.start()
    await controller.kill()
    with caplog.at_level(logging.INFO, "kvtier"):
        async with open_node(controller.url) as one:
            await one.store(4)
            assert await one.is_intact(4)
            await until(lambda: one.status["last_error"])
            assert one.status["connected"] is False
            # It starts later, and this is logged once.
            await controller.start()
            await controller.up_to_date()
    await controller.kill()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "continuing without it" in warnings[0]
    assert [record.message for record in caplog.records if "registered again" in record.message] == [
        f"controller {controller.url}: this instance, one, is registered again"
    ]


async def test_instance_reconnects_after_the_controller_was_killed(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller, ssd=128) as one:
        keys = await one.store(4)
        first = await controller.up_to_date()
        await until(lambda: first.held == one.held())
        await controller.kill()
        await until(lambda: not one.status["connected"])
        await one.cache.clear(keys[2:], tiers=["ram"])
        await controller.start()
        second = await controller.up_to_date(1)
        assert second.hello == first.hello
        assert second.held == one.held() == {0: set(keys[:2]), 1: set(keys)}


async def test_wrong_token_is_refused_and_reported(
    open_node: OpenNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_controller() as controller:
        controller.token = "another one"
        async with open_node(controller) as one:
            await until(lambda: one.status["refused"])
            assert "controller.token" in one.status["refused"]
            await until(lambda: controller.attempts > 2)
            controller.token = None
            await controller.up_to_date()
            assert one.status["refused"] is None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert "a token of these tests" not in caplog.text


async def test_url_of_another_server_is_reported(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller.url + "/elsewhere") as one:
        await until(lambda: "HTTP 404" in one.status["last_error"])


async def test_duplicate_instance_id_is_reported(open_node: OpenNode) -> None:
    async def refuse(conversation: Conversation) -> bool:
        await conversation.send(Refused("instance id 'one' is taken by process 7\non host b"))
        return False

    async with scripted_controller() as controller:
        controller.greeting = refuse
        async with open_node(controller) as one:
            await until(lambda: one.status["refused"])
            assert one.status["refused"] == "instance id 'one' is taken by process 7?on host b"
            controller.greeting = None
            await controller.up_to_date()


MALFORMED_GREETINGS: dict[str, Message | bytes | str] = {
    "garbage": b"\xff" * 100,
    "nothing": b"",
    "text": "welcome",
    "deep": b"\x91" * 100_000,
    "not_a_welcome": HeldBy(1, [], []),
    "another_version": Welcome(VERSION + 1, 1.0, 10.0),
    "no_heartbeat": Welcome(VERSION, 0.0, 10.0),
    "infinite_idle_timeout": Welcome(VERSION, 1.0, float("inf")),
    "not_a_number": Welcome(VERSION, float("nan"), 10.0),
    "too_long": bytes(MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("kind", MALFORMED_GREETINGS)
async def test_malformed_greeting_ends_only_the_connection(kind: str, open_node: OpenNode) -> None:
    async def send_malformed_greeting(conversation: Conversation) -> bool:
        await conversation.send(MALFORMED_GREETINGS[kind])
        await conversation.socket.wait_closed()
        return False

    async with scripted_controller() as controller:
        controller.greeting = send_malformed_greeting
        async with open_node(controller) as one:
            await until(lambda: one.status["last_error"])
            controller.greeting = None
            await controller.up_to_date()
            await one.store(2)
            assert await one.is_intact(2)


MALFORMED_LATER: dict[str, Message | bytes | str] = {
    **{kind: MALFORMED_GREETINGS[kind] for kind in ("garbage", "text", "deep", "too_long")},
    "welcome_again": Welcome(VERSION, 1.0, 10.0),
    "refused_late": Refused("not any more"),
    "unexpected_answer": HeldBy(99, ["a:1"], [1]),
}


@pytest.mark.parametrize("kind", MALFORMED_LATER)
async def test_malformed_message_ends_only_the_connection(kind: str, open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller) as one:
        conversation = await controller.up_to_date()
        await conversation.send(MALFORMED_LATER[kind])
        await conversation.socket.wait_closed()
        again = await controller.up_to_date(1)
        keys = await one.store(2)
        await until(lambda: again.held == {0: set(keys)})


async def test_unresponsive_controller_is_disconnected_and_reconnected(open_node: OpenNode) -> None:
    async with scripted_controller(idle_timeout=0.3) as controller, open_node(controller) as one:
        conversation = await controller.up_to_date()
        conversation.socket.transport.pause_reading()
        again = await controller.up_to_date(1)
        assert again is not conversation
        assert one.status["connected"]
        assert one.status["lost"] == 1


async def test_idle_controller_stays_connected(open_node: OpenNode) -> None:
    async with scripted_controller(idle_timeout=0.3) as controller, open_node(controller) as one:
        conversation = await controller.up_to_date()
        await until(lambda: conversation.pings > 15)  # At least three times its idle timeout.
        assert one.status["lost"] == 0


async def test_missing_welcome_does_not_block_the_instance(open_node: OpenNode) -> None:
    async def wait(conversation: Conversation) -> bool:
        await conversation.socket.wait_closed()
        return False

    async with scripted_controller() as controller:
        controller.greeting = wait
        async with open_node(controller) as one:
            await until(lambda: controller.attempts)
            await one.store(2)
            assert await one.is_intact(2)


async def test_instance_closes_while_the_controller_is_unresponsive(open_node: OpenNode) -> None:
    async with scripted_controller() as controller:
        with anyio.fail_after(30):
            async with open_node(controller):
                conversation = await controller.up_to_date()
                conversation.socket.transport.pause_reading()
        conversation.socket.transport.resume_reading()


async def test_instance_closes_the_connection_normally(open_node: OpenNode) -> None:
    async with scripted_controller() as controller:
        async with open_node(controller):
            conversation = await controller.up_to_date()
        await conversation.socket.wait_closed()
        assert conversation.socket.close_code == 1000


# WhoHolds.


async def test_who_holds_is_answered(registered: Registered) -> None:
    async with registered() as (conversation, one):
        conversation.holders = (["b:1", "[::1]:2"], [5, 3])
        keys = [make_key(number) for number in range(6)]
        assert await client_of(one).who_holds(keys) == [("b:1", 5), ("[::1]:2", 3)]
        assert split_keys(conversation.questions[0].keys) == keys


async def test_who_holds_times_out_without_an_answer(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller, peer={"timeout": "50ms"}) as one:
        conversation = await controller.up_to_date()
        conversation.holders = None
        with anyio.fail_after(30):
            assert await client_of(one).who_holds([make_key(1)]) == []
        await until(lambda: conversation.questions)
        await conversation.send(HeldBy(conversation.questions[0].ticket, ["b:1"], [1]))  # Late.
        conversation.holders = (["c:1"], [1])
        await until_answered(one, [("c:1", 1)])
        await controller.kill()
        await until(lambda: not one.status["connected"])
        assert await client_of(one).who_holds([make_key(1)]) == []


async def test_malformed_holders_end_only_the_connection(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller, peer={"timeout": "10s"}) as one:
        conversation = await controller.up_to_date()
        conversation.holders = (["a:1"], [])
        assert await client_of(one).who_holds([make_key(1)]) == []
        await conversation.socket.wait_closed()
        assert conversation.refusal == "HeldBy has 1 peers, but 0 chunk counts"
        await controller.up_to_date(1)


async def test_who_holds_sends_at_most_max_keys(registered: Registered) -> None:
    async with registered(peer={"timeout": "10s"}) as (conversation, one):
        keys = [make_key(number % 100) for number in range(MAX_KEYS + 1)]
        await client_of(one).who_holds(keys)
        assert split_keys(conversation.questions[0].keys) == keys[:MAX_KEYS]


async def test_concurrent_questions_are_bounded(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_QUESTIONS", 2)
    async with registered(peer={"timeout": "10s"}) as (conversation, one):
        conversation.holders = None
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(client_of(one).who_holds, [make_key(1)])
            await until(lambda: len(conversation.questions) == 2)
            assert await client_of(one).who_holds([make_key(1)]) == []
            tasks.cancel_scope.cancel()


async def test_lookup_finds_chunks_through_the_controller(open_node: OpenNode) -> None:
    async with (
        scripted_controller() as controller,
        open_node(controller, peer={"secret": SECRET, "timeout": "10s"}, prefetch={"policy": "wait"}) as one,
        open_node(controller, name="two", peer={"listen": "127.0.0.1:0", "secret": SECRET}) as two,
    ):
        keys = await two.store(4)
        await controller.up_to_date(1)
        for conversation in controller.conversations:
            assert two.instance.server is not None
            conversation.holders = ([f"127.0.0.1:{two.instance.server.address[1]}"], [len(keys)])
        assert await one.is_intact(4)


def client_of(node: Node) -> Controllers:
    controllers = node.instance._controllers
    assert controllers is not None
    return controllers


async def until_answered(node: Node, answer: list[tuple[str, int]]) -> None:
    with anyio.fail_after(60):
        while await client_of(node).who_holds([make_key(1)]) != answer:
            await anyio.sleep(0.005)


async def test_report_is_sent_when_there_is_one_and_when_it_changes(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Report | None] = [None]
    monkeypatch.setattr(Instance, "what_if", lambda _: known[-1])
    monkeypatch.setattr(session, "WHAT_IF_SECONDS", 0.01)
    async with registered() as (conversation, _):
        later = replace(REPORT, sampled=REPORT.sampled + 1)
        for report in (REPORT, later):
            seen = len(conversation.heartbeats)
            known.append(report)
            await until(lambda report=report: conversation.what_ifs[-1:] == [WhatIf(report)])
            await until(lambda seen=seen: len(conversation.heartbeats) > seen + 2)
        assert conversation.what_ifs == [WhatIf(REPORT), WhatIf(later)]


async def test_changes_are_reported_at_an_interval(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)
    monkeypatch.setattr(Instance, "what_if", lambda _: replace(REPORT, sampled=next(calls)))
    monkeypatch.setattr(session, "WHAT_IF_SECONDS", 600.0)
    async with registered() as (conversation, _):
        await until(lambda: len(conversation.heartbeats) > 5)
        assert [message.report.sampled for message in conversation.what_ifs] == [1]


async def test_new_connection_gets_the_report_again(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: REPORT)
    async with scripted_controller() as controller, open_node(controller):
        first = await controller.up_to_date()
        await until(lambda: first.what_ifs)
        await controller.kill()
        await controller.start()
        second = await controller.up_to_date(1)
        await until(lambda: second.what_ifs)
        assert first.what_ifs == second.what_ifs == [WhatIf(REPORT)]


async def test_reason_of_a_stopped_estimate_is_printable_and_short(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: replace(REPORT, stopped="ValueError: \n" * 100))
    async with registered() as (conversation, _):
        await until(lambda: conversation.what_ifs)
    (message,) = conversation.what_ifs
    assert message.report.stopped.startswith("ValueError: ?ValueError")
    assert len(message.report.stopped) == 256
