"""An instance registers, stays registered, comes back, and is never worse off for its controller."""

from __future__ import annotations

import logging
import os
import socket

import anyio
import pytest

from kvtier import __version__
from kvtier.agent import session as session_module
from kvtier.agent.agent import Agent
from kvtier.agent.protocol import (
    MOST_KEYS,
    VERSION,
    HeldBy,
    Hello,
    Refused,
    TierDescription,
    Unpin,
    Welcome,
)
from kvtier.agent.served import EngineModel, TokenizerSource
from kvtier.keys import split_keys
from kvtier.layout import ChunkLayout, GroupLayout
from kvtier.sockets.frames import MAX_FRAME_BYTES, Message
from kvtier.testing.backend import make_key
from tests.agent.conftest import SECRET, Home, OpenHome
from tests.agent.controlling import Controller, Conversation, controlling, until
from tests.cache.conftest import CHUNK_OBJECT_BYTES

pytestmark = pytest.mark.anyio
LAYOUT = ChunkLayout(256, (GroupLayout(16, (1024,)),))


async def test_an_instance_says_what_it_is(home: OpenHome) -> None:
    peer = {"listen": "0.0.0.0:0", "secret": SECRET}
    async with controlling() as controller, home(controller, ssd=128, peer=peer) as one:
        conversation = await controller.in_step()
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
        await until(lambda: one.status["in_step"])
        assert one.status | {"lost": 0} == {
            "url": controller.url,
            "instance": "one",
            "connected": True,
            "in_step": True,
            "told_anew": 0,
            "commands": 0,
            "refused": None,
            "trouble": "",
            "lost": 0,
        }
        assert one.instance.name.startswith("one:")


@pytest.mark.parametrize(
    ("listen", "address"),
    [("localhost:0", "localhost"), ("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1")],
)
async def test_peers_are_told_the_host_of_the_settings_unless_that_is_none(
    listen: str, address: str, home: OpenHome
) -> None:
    async with (
        controlling() as controller,
        home(controller, peer={"listen": listen, "secret": SECRET}) as one,
    ):
        hello = (await controller.conversation()).hello
        assert hello is not None
        assert one.instance.server is not None
        assert hello.peer == f"{address}:{one.instance.server.address[1]}"


async def test_who_serves_nobody_has_no_address(home: OpenHome) -> None:
    async with controlling() as controller, home(controller):
        hello = (await controller.conversation()).hello
        assert hello is not None
        assert (hello.peer, hello.transport) == (None, None)


async def test_models_are_told_when_engines_bring_them(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        served = one.instance.served
        served.came("engine-1", b"n" * 32, LAYOUT, None)
        served.came("engine-1", b"n" * 32, LAYOUT, EngineModel(["llama", "/models/llama"]))
        served.came("engine-2", b"n" * 32, LAYOUT, EngineModel(["chat"], TokenizerSource("/models/llama")))
        await until(lambda: conversation.models)
        await until(lambda: conversation.models[0].names == ["llama", "/models/llama", "chat"])
        (model,) = conversation.models
        assert (model.namespace, model.layout, model.tokenizer) == (b"n" * 32, LAYOUT, True)
        await until(lambda: conversation.heartbeats[-1].engines == ["engine-1", "engine-2"])
        served.left("engine-1")
        await until(lambda: conversation.heartbeats[-1].engines == ["engine-2"])
        assert conversation.models == [model]


async def test_heartbeats_tell_how_the_tiers_are(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
        await one.store(4)
        assert await one.is_whole(4)
        seen = len(conversation.heartbeats)
        await until(lambda: len(conversation.heartbeats) > seen + 1)
        beat = conversation.heartbeats[-1]
        assert [(tier.chunks, tier.available) for tier in beat.tiers] == [(4, True), (4, True)]
        assert [tier.used for tier in beat.tiers] == [4 * CHUNK_OBJECT_BYTES] * 2
        assert (beat.tiers[0].found, beat.looked_up, beat.leases, beat.pending_bytes) == (4, 4, 0, 0)


async def test_a_controller_that_is_not_there_costs_nothing(
    home: OpenHome, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Controller()
    await controller.start()
    await controller.kill()
    with caplog.at_level(logging.INFO, "kvtier"):
        async with home(controller.url) as one:
            await one.store(4)
            assert await one.is_whole(4)
            await until(lambda: one.status["trouble"])
            assert one.status["connected"] is False
            # It comes at last, and once is enough to say so.
            await controller.start()
            await controller.in_step()
    await controller.kill()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "going on without it" in warnings[0]
    assert [record.message for record in caplog.records if "registered again" in record.message] == [
        f"controller {controller.url}: this instance, one, is registered again"
    ]


async def test_it_comes_back_to_a_controller_that_was_killed(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        keys = await one.store(4)
        first = await controller.in_step()
        await until(lambda: first.held == one.held())
        await controller.kill()
        await until(lambda: not one.status["connected"])
        await one.cache.clear(keys[2:], tiers=["ram"])
        await controller.start()
        second = await controller.in_step(1)
        assert second.hello == first.hello
        assert second.held == one.held() == {0: set(keys[:2]), 1: set(keys)}


async def test_a_wrong_token_is_refused_and_said(home: OpenHome, caplog: pytest.LogCaptureFixture) -> None:
    async with controlling() as controller:
        controller.token = "another one"
        async with home(controller) as one:
            await until(lambda: one.status["refused"])
            assert "controller.token" in one.status["refused"]
            await until(lambda: controller.attempts > 2)
            controller.token = None
            await controller.in_step()
            assert one.status["refused"] is None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert "a token of these tests" not in caplog.text


async def test_what_is_no_controller_is_said(home: OpenHome) -> None:
    async with controlling() as controller, home(controller.url + "/elsewhere") as one:
        await until(lambda: "HTTP 404" in one.status["trouble"])


async def test_an_id_that_is_in_use_is_said(home: OpenHome) -> None:
    async def refuse(conversation: Conversation) -> bool:
        await conversation.say(Refused("instance id 'one' is taken by process 7\non host b"))
        return False

    async with controlling() as controller:
        controller.greeting = refuse
        async with home(controller) as one:
            await until(lambda: one.status["refused"])
            assert one.status["refused"] == "instance id 'one' is taken by process 7?on host b"
            controller.greeting = None
            await controller.in_step()


NONSENSE: dict[str, Message | bytes | str] = {
    "garbage": b"\xff" * 100,
    "nothing": b"",
    "text": "welcome",
    "deep": b"\x91" * 100_000,
    "no_greeting": HeldBy(1, [], []),
    "another_version": Welcome(VERSION + 1, 1.0, 10.0),
    "no_heartbeat": Welcome(VERSION, 0.0, 10.0),
    "never_silent": Welcome(VERSION, 1.0, float("inf")),
    "not_a_number": Welcome(VERSION, float("nan"), 10.0),
    "too_long": bytes(MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_for_a_greeting_ends_the_connection_and_nothing_else(
    kind: str, home: OpenHome
) -> None:
    async def talk_nonsense(conversation: Conversation) -> bool:
        await conversation.say(NONSENSE[kind])
        await conversation.socket.wait_closed()
        return False

    async with controlling() as controller:
        controller.greeting = talk_nonsense
        async with home(controller) as one:
            await until(lambda: one.status["trouble"])
            controller.greeting = None
            await controller.in_step()
            await one.store(2)
            assert await one.is_whole(2)


LATER_NONSENSE: dict[str, Message | bytes | str] = {
    **{kind: NONSENSE[kind] for kind in ("garbage", "text", "deep", "too_long")},
    "welcome_again": Welcome(VERSION, 1.0, 10.0),
    "refused_at_last": Refused("not any more"),
    "answer_of_no_sense": HeldBy(1, ["a:1"], []),
}


@pytest.mark.parametrize("kind", LATER_NONSENSE)
async def test_nonsense_in_a_conversation_ends_it_and_nothing_else(kind: str, home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        await conversation.say(LATER_NONSENSE[kind])
        await conversation.socket.wait_closed()
        again = await controller.in_step(1)
        keys = await one.store(2)
        await until(lambda: again.held == {0: set(keys)})


async def test_an_answer_that_nobody_waits_for_is_passed_over(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        await conversation.say(HeldBy(99, ["a:1"], [1]))
        assert (await conversation.done(lambda ticket: Unpin(ticket, b""))).reason is None
        assert one.status["lost"] == 0


async def test_a_controller_that_falls_silent_is_left_and_found_again(home: OpenHome) -> None:
    async with controlling(silence=0.3) as controller, home(controller) as one:
        conversation = await controller.in_step()
        conversation.socket.transport.pause_reading()
        again = await controller.in_step(1)
        assert again is not conversation
        assert one.status["connected"]
        assert one.status["lost"] == 1


async def test_one_that_never_greets_holds_nobody_up(home: OpenHome) -> None:
    async def wait(conversation: Conversation) -> bool:
        await conversation.socket.wait_closed()
        return False

    async with controlling() as controller:
        controller.greeting = wait
        async with home(controller) as one:
            await until(lambda: controller.attempts)
            await one.store(2)
            assert await one.is_whole(2)


async def test_an_instance_ends_while_its_controller_is_silent(home: OpenHome) -> None:
    async with controlling() as controller:
        with anyio.fail_after(30):
            async with home(controller):
                conversation = await controller.in_step()
                conversation.socket.transport.pause_reading()
        conversation.socket.transport.resume_reading()


async def test_an_instance_says_farewell(home: OpenHome) -> None:
    async with controlling() as controller:
        async with home(controller):
            conversation = await controller.in_step()
        await conversation.socket.wait_closed()
        assert conversation.socket.close_code == 1000


# Asking who holds what.


async def test_who_holds_is_answered(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        conversation.holders = (["b:1", "[::1]:2"], [5, 3])
        keys = [make_key(number) for number in range(6)]
        assert await agent_of(one).who_holds(keys) == [("b:1", 5), ("[::1]:2", 3)]
        assert split_keys(conversation.questions[0].keys) == keys


async def test_nobody_waits_for_a_controller_that_does_not_answer(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, peer={"patience": "50ms"}) as one:
        conversation = await controller.in_step()
        conversation.holders = None
        with anyio.fail_after(30):
            assert await agent_of(one).who_holds([make_key(1)]) == []
        await until(lambda: conversation.questions)
        await conversation.say(HeldBy(conversation.questions[0].ticket, ["b:1"], [1]))  # Late.
        conversation.holders = (["c:1"], [1])
        await until_answered(one, [("c:1", 1)])
        await controller.kill()
        await until(lambda: not one.status["connected"])
        assert await agent_of(one).who_holds([make_key(1)]) == []


async def test_of_very_many_keys_the_first_are_asked_for(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, peer={"patience": "10s"}) as one:
        conversation = await controller.in_step()
        keys = [make_key(number % 100) for number in range(MOST_KEYS + 1)]
        await agent_of(one).who_holds(keys)
        assert split_keys(conversation.questions[0].keys) == keys[:MOST_KEYS]


async def test_questions_at_once_are_bounded(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST_QUESTIONS", 2)
    async with controlling() as controller, home(controller, peer={"patience": "10s"}) as one:
        conversation = await controller.in_step()
        conversation.holders = None
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(agent_of(one).who_holds, [make_key(1)])
            await until(lambda: len(conversation.questions) == 2)
            assert await agent_of(one).who_holds([make_key(1)]) == []
            tasks.cancel_scope.cancel()


async def test_a_look_up_finds_what_only_the_controller_knows_of(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer={"secret": SECRET, "patience": "10s"}, prefetch={"policy": "wait"}) as one,
        home(controller, name="two", peer={"listen": "127.0.0.1:0", "secret": SECRET}) as two,
    ):
        keys = await two.store(4)
        await controller.in_step(1)
        for conversation in controller.conversations:
            assert two.instance.server is not None
            conversation.holders = ([f"127.0.0.1:{two.instance.server.address[1]}"], [len(keys)])
        assert await one.is_whole(4)


def agent_of(home: Home) -> Agent:
    agent = home.instance._agent
    assert agent is not None
    return agent


async def until_answered(home: Home, answer: list[tuple[str, int]]) -> None:
    with anyio.fail_after(60):
        while await agent_of(home).who_holds([make_key(1)]) != answer:
            await anyio.sleep(0.005)
