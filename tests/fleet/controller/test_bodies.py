"""Large and hostile request bodies: what they cost, and how they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvtier.fleet.controller import bodies
from kvtier.fleet.controller.answers import LookupAnswer
from kvtier.fleet.controller.bodies import PromptBody
from tests.rigs.running_controller import RunningController

pytestmark = pytest.mark.anyio

MANY = 100_000
IDS = ",".join(map(str, range(MANY)))
"""More than is decoded at once."""
UNKNOWN = ",".join(f'"k{n}": 1' for n in range(500_000))
WRONG_BODIES = [
    (422, '{"tokens": [IDS, -1, IDS]}', "tokens[100000]: Expected `int` >= 0"),
    (422, '{"tokens": [IDS, 4294967296]}', "tokens[100000]: Expected `int` <= 4294967295"),
    (422, '{"tokens": [IDS, 1.5]}', "tokens[100000]: Expected `int`, got `float`"),
    (422, '{"tokens": [IDS, "1", 2]}', "tokens[100000]: Expected `int`, got `str`"),
    (422, '{"tokens": [IDS, "]"]}', "not valid JSON"),
    (422, '{"tokens": [IDS, [1], 2]}', "Expected `int`, got `array`"),
    (422, '{"tokens": [IDS,]}', "tokens[100000] is missing"),
    (422, '{"tokens": [,IDS]}', "not valid JSON"),
    (422, '{"tokens": [IDS IDS]}', "not valid JSON"),
    (422, '{"tokens": [IDS', "ends within `tokens`"),
    (422, '{"tokens": [IDS]', "not valid JSON"),
    (422, '{"tokens": [IDS], "tokens": [1]}', "`tokens` twice"),
    (422, '{"tokens": [IDS], "tokenz": 1}', "unknown field `tokenz`"),
    (422, '{"tokens": [IDS], "prompt": "x"}', "only one of"),
    (422, '{"model": {"tokens": [IDS]}}', "model: Expected `str | null`, got `object`"),
    (422, '{"x\\"tokens": [IDS], "tokens": [1]}', "unknown field"),
    (422, '{"tokens": [%s]}' % ("1" * MANY), "tokens[0]: Expected `int`"),
    (422, '{"tokens": [%s 1]}' % (" " * MANY), "tokens[0]: Expected `int`"),
    (422, '{"tokens": %s' % ("[" * MANY), "tokens[0]: Expected `int`"),
    (422, '{"tokens": [%s0]}' % ("0," * 4_000_000), "at most 4,000,000"),
    (413, '{"tokens": [IDS], "model": "LONG"}', "longer than 65,536 bytes"),
    (413, '{"model": "LONG", "tokens": [IDS]}', "longer than 65,536 bytes"),
    (413, "{%s}" % (" " * MANY), "longer than 65,536 bytes"),
    (413, "{UNKNOWN}", "longer than 65,536 bytes"),
    (413, '{"tokens": [1], UNKNOWN}', "longer than 65,536 bytes"),
    (413, '{"prompt": "%s"}' % ("\\u00e9" * (2 << 20)), "longer than 8,388,608 bytes"),
]


def filled(body: str) -> str:
    return body.replace("IDS", IDS).replace("UNKNOWN", UNKNOWN).replace("LONG", "x" * MANY)


async def test_large_invalid_body_is_refused_with_a_message(controller: RunningController) -> None:
    for status, body, message in WRONG_BODIES:
        answer = await controller.client.post("/lookup", content=filled(body))
        detail = answer.json()["detail"]
        assert (answer.status_code, message in detail) == (status, True), (body[:20], body[-20:], detail)
        assert len(answer.text) < 500


async def test_ids_of_a_large_body_are_those_that_were_sent(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PromptBody] = []

    async def lookup(query: PromptBody) -> LookupAnswer:
        asked.append(query)
        return LookupAnswer(model="m", num_tokens=0, instances={})

    monkeypatch.setattr(controller.controller.operations, "lookup", lookup)
    for ids in (IDS, IDS.replace(",", " ,\n\t"), IDS + ",4294967295", "0," * 300_000 + "0"):
        body = '{"model": "m", "tokens" : [ IDS ] , "salt": "s"}'.replace("IDS", ids)
        answer = await controller.client.post("/lookup", content=body)
        assert answer.status_code == 200, answer.text
        query = asked.pop()
        assert list(query.tokens or ()) == [int(part) for part in ids.split(",")]
        assert (query.model, query.salt) == ("m", "s")


class Slices:
    """A decoder that records the size of each slice."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self.sizes: list[int] = []
        self._decode = decode

    def __call__(self, text: bytes) -> Any:
        self.sizes.append(len(text))
        return self._decode(text)


async def test_ids_are_decoded_in_slices_between_which_others_are_served(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = Slices(bodies.decode_ids)
    monkeypatch.setattr(bodies, "decode_ids", slices)
    answered_at: list[int] = []

    async def check_health() -> None:
        while True:
            (await controller.client.get("/healthz")).raise_for_status()
            answered_at.append(len(slices.sizes))

    ids = ",".join(["1234567"] * 2_000_000)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(check_health)
        answer = await controller.client.post("/lookup", content=f'{{"tokens": [{ids}, "x", 1]}}')
        tasks.cancel_scope.cancel()
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "tokens[2000000]: Expected `int`, got `str`",
    )
    assert max(slices.sizes) <= bodies.SLICE_BYTES + 2
    assert sum(slices.sizes) >= len(ids) - len(slices.sizes)
    assert len(set(answered_at)) > 5


async def test_nothing_is_decoded_after_the_first_error(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = Slices(bodies.decode_ids)
    monkeypatch.setattr(bodies, "decode_ids", slices)
    for body in ('{"tokens": ["x", IDS]}', "{UNKNOWN}", '{"tokens": [1], UNKNOWN}'):
        slices.sizes.clear()
        answer = await controller.client.post("/lookup", content=filled(body))
        assert answer.is_client_error
        assert len(slices.sizes) <= 1
