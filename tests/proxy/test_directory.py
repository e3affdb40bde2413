"""The proxy asks a real controller who holds a prompt, and does without one that does not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.proxy.engine import Role
from tests.controller.controlling import KEYS, TOKENS, running_controller
from tests.controller.registering import MODEL

from .conftest import Place, running
from .stub import Stub, hangs, says

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("the controller describes its calls")]


@asynccontextmanager
async def known(folder: Path, held: int, **settings: Any) -> AsyncIterator[Place]:
    """Two decoders, of which the second holds so many chunks of the prompt."""
    async with (
        running_controller(folder) as controller,
        running(1, 2, controller=controller.url, least_prefill=64, **settings) as place,
    ):
        first, second = place.proxy.fleet.of(Role.DECODE)
        first.peer, second.peer = "127.0.0.1:1001", "127.0.0.1:1002"
        first.named_peer, second.named_peer = first.peer, second.peer
        async with (
            controller.instance("first", peer=first.peer),
            controller.instance("second", peer=second.peer, ram=KEYS[:held]),
        ):
            directory = place.proxy.directory
            assert directory is not None
            await directory._learn_names()
            assert (first.instance, second.instance) == ("first", "second")
            yield place


async def ask(place: Place) -> None:
    answer = await place.ask(model=MODEL.names[0], prompt=TOKENS)
    assert answer.status_code == 200


async def test_who_holds_most_is_chosen_and_most_is_enough(tmp_path: Path) -> None:
    async with known(tmp_path, len(KEYS)) as place:
        for _ in range(3):
            await ask(place)
        assert [len(decoder.asked) for decoder in place.decoders] == [0, 3]
        assert place.prefillers[0].asked == []
        assert place.proxy.statistics.skipped == {"cached": 3}
        assert place.proxy.statistics.look_ups == {"answered": 3}


async def test_the_rest_is_prefilled_where_some_is_held(tmp_path: Path) -> None:
    async with known(tmp_path, 1) as place:
        await ask(place)
        assert [len(decoder.asked) for decoder in place.decoders] == [0, 1]
        assert place.prefillers[0].asked[0].ours == {"hand_over": {"to": "127.0.0.1:1002"}}


async def test_a_chat_is_tokenized_by_an_engine(tmp_path: Path) -> None:
    async with known(tmp_path, len(KEYS)) as place:
        for decoder in place.decoders:
            decoder.tokenize = says(200, {"count": len(TOKENS), "tokens": TOKENS})
        body = {"model": MODEL.names[0], "messages": [{"role": "user", "content": "long " * 500}]}
        for _ in range(3):
            assert (await place.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert [len(decoder.asked) for decoder in place.decoders] == [0, 3]


async def test_what_it_refuses_is_chosen_by_memory(tmp_path: Path) -> None:
    async with known(tmp_path, len(KEYS)) as place:
        for _ in range(2):
            assert (await place.ask(model="unknown", prompt=TOKENS)).status_code == 200
        assert place.proxy.statistics.look_ups == {"refused": 2}
        assert sorted(len(decoder.asked) for decoder in place.decoders) == [0, 2]


@pytest.mark.parametrize("fault", [hangs, says(200, b"no json"), says(500), None])
async def test_one_that_does_not_answer_is_done_without(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    controller = Stub()
    async with controller.serving():
        controller.always = fault or says(200)
        if fault is None:
            controller.port = 9
        async with running(controller=controller.url) as place:
            for _ in range(2):
                assert (await place.ask()).status_code == 200
            assert place.proxy.statistics.skipped == {"cached": 1}
            await place.until(lambda: "the controller does not answer" in caplog.text or fault is hangs)
