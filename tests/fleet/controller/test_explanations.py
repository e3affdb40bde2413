"""Why tokens were not hits, asked of all instances through the controller."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.catalog.misses import ADVICE, Miss, MissReason
from kvtier.fleet.controller import explanations
from kvtier.fleet.member.protocol import Counters, Explain, ExplainPrompt, Tokenize
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import PromptReport, RequestReport, WhyReport
from tests.rigs.running_controller import (
    MODEL,
    Gate,
    RunningController,
    ScriptedInstance,
    heartbeat,
    running_controller,
)

pytestmark = pytest.mark.anyio

NOTHING = Counters([0] * 3, [0] * 3, [], [], [], [])
DIVERGES = Miss(MissReason.DIVERGES, 136, position=288)


def report(request: str, at: float) -> RequestReport:
    return RequestReport(at, request, "engine", 424, 0, {"ram": 288}, [DIVERGES], 0.1)


def breaker(place: str, parted: int, tokens: float) -> Breaker:
    return Breaker(288, parted, 2 * parted, parted, tokens, 60.0, place)


@asynccontextmanager
async def explaining(
    controller: RunningController, name: str, **changes: Any
) -> AsyncIterator[ScriptedInstance]:
    """Run an instance whose version explains misses."""
    async with controller.instance(name, **changes) as instance:
        await instance.send(heartbeat(counters=NOTHING))
        await controller.wait_until(lambda: controller.member(name).explains)
        yield instance


async def test_requests_of_all_instances_the_newest_first(running: RunningController) -> None:
    async with explaining(running, "a") as a, explaining(running, "b") as b, running.instance("old"):
        a.report_why = WhyReport([report("cmpl-3", 3.0), report("cmpl-1", 1.0)], [breaker("x", 4, 100.0)])
        b.report_why = WhyReport([report("cmpl-2", 2.0)], [breaker("y", 3, 150.0), breaker("x", 6, 200.0)])
        answer = await running.get("/why", request="cmpl", last=2)
        assert [(each["instance"], each["request"]) for each in answer["requests"]] == [
            ("a", "cmpl-3"),
            ("b", "cmpl-2"),
        ]
        [miss] = answer["requests"][0]["misses"]
        assert miss == {
            "reason": "diverges",
            "tokens": 136,
            "tier": "",
            "seconds": 0.0,
            "ago": 0.0,
            "position": 288,
            "field": "",
            "text": "136 diverges (from token 288 on)",
            "advice": ADVICE[MissReason.DIVERGES],
        }
        places = [(each["place"], each["parted"], each["passed"]) for each in answer["breakers"]]
        assert places == [("x", 10, 20), ("y", 3, 6)], "a place is one, wherever it was seen"
        assert answer["breakers"][0]["seconds_per_day"] == 120.0
        assert answer["unanswered"] == {"old": explanations.OLD}
        [command] = [each for each in a.commands if isinstance(each, Explain)]
        assert (command.request, command.last) == ("cmpl", 2)
        of_one = await running.get("/why", instance="b")
        assert [each["request"] for each in of_one["requests"]] == ["cmpl-2"]
        assert (await running.client.get("/why", params={"instance": "c"})).status_code == 404
        assert (await running.client.get("/why", params={"last": 101})).status_code == 422


async def test_a_prompt_at_each_instance_that_serves_its_model(running: RunningController) -> None:
    async with (
        explaining(running, "a") as a,
        explaining(running, "b") as b,
        explaining(running, "other", models=()) as other,
    ):
        a.prompts = [PromptReport("meta/llama", 3, [], [Miss(MissReason.NEVER_STORED, 3)])]
        b.prompts = [PromptReport("meta/llama", 3, [("ram", 2), ("ssd", 1)], [])]
        answer = await running.post("/why", tokens=[7, 8, 9], model="llama", salt="s")
        assert [(each["instance"], each["hits"]) for each in answer["prompts"]] == [
            ("b", [["ram", 2], ["ssd", 1]]),
            ("a", []),
        ]
        [command] = [each for each in a.commands if isinstance(each, ExplainPrompt)]
        assert (command.model, command.salt) == ("llama", "s")
        assert list(memoryview(command.tokens).cast("I")) == [7, 8, 9]
        assert not other.commands
        messages = [{"role": "user", "content": "Grüße"}]
        await running.post("/why", messages=messages)
        [tokenize] = [each for each in [*a.commands, *b.commands] if isinstance(each, Tokenize)]
        assert (tokenize.prompt, tokenize.chat) == ('[{"role":"user","content":"Grüße"}]', True)
        looked_up = await running.post("/lookup", messages=messages)
        assert looked_up["num_tokens"] == len(tokenize.prompt.encode())
        await running.post_refused("/why", 404, tokens=[1], model="unknown")


async def test_chat_messages_are_not_taken_for_a_text_by_an_older_version(
    running: RunningController,
) -> None:
    async with running.instance("old") as old:
        refused = await running.post_refused("/why", 422, messages=[{"role": "user", "content": "x"}])
        assert "send `tokens` instead" in refused["detail"]
        assert not old.commands


async def test_an_instance_that_does_not_answer_is_named(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "ANSWER_SECONDS", 0.5)
    async with (
        explaining(running, "quiet", before=Gate(Explain)) as quiet,
        explaining(running, "fails") as fails,
        explaining(running, "works") as works,
    ):
        fails.refuse = "it is on fire"
        works.report_why = WhyReport([report("cmpl-1", 1.0)], [])
        answer = await running.get("/why")
        assert [each["instance"] for each in answer["requests"]] == ["works"]
        assert answer["unanswered"] == {
            "quiet": "no answer within 0.5 s",
            "fails": "fails: it is on fire",
        }
        await running.wait_until(lambda: quiet.cancelled)


async def test_an_instance_that_disconnects_meanwhile_is_named(running: RunningController) -> None:
    gate = Gate(ExplainPrompt)
    async with explaining(running, "dies", before=gate) as dies, anyio.create_task_group() as tasks:

        async def kill() -> None:
            await gate.reached.wait()
            await dies.websocket.close()

        tasks.start_soon(kill)
        answer = await running.post("/why", tokens=[1])
        assert answer["prompts"] == []
        assert "instance 'dies' has disconnected" in answer["unanswered"]["dies"]


async def test_too_long_prompts_are_refused(
    running: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "MAX_TOKENS", 10)
    async with explaining(running, "a"):
        refused = await running.post_refused("/why", 422, tokens=[1] * 11)
        assert refused["detail"] == "the prompt has 11 tokens, more than 10"


async def test_nothing_of_a_prompt_is_kept_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = [77_123_457, 77_123_458]
    with caplog.at_level(logging.INFO):
        async with running_controller(tmp_path) as controller, explaining(controller, "a"):
            await controller.post("/why", tokens=secret, salt="top-secret", model=MODEL.names[0])
            await controller.post("/why", prompt="my-secret-text")
            await controller.post("/why", messages=[{"role": "user", "content": "my-secret-text"}])
            await controller.post_refused("/why", 422, tokens=secret, prompt="my-secret-text")
            shown = [await controller.get(path) for path in ("/events", "/instances", "/history", "/why")]
            metrics = (await controller.client.get("/metrics")).text
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    for text in ("77123457", "top-secret", "my-secret-text"):
        assert text not in f"{shown}{metrics}{caplog.text}"
        assert text.encode() not in kept
    assert secret[0].to_bytes(4, "little") not in kept
