"""The controller knows the models of programs that use kvtier as a library, without any engine."""

from __future__ import annotations

import pytest

from kvtier.instance import Instance
from tests.fleet.controller.controlling import RunningController
from tests.fleet.controller.holding import BUILT_IN, TOKEN_BYTES, prompt, rows, settings_of

pytestmark = pytest.mark.anyio


async def test_models_of_programs_are_known(controller: RunningController) -> None:
    tokens = prompt(4)
    settings = settings_of("program", controller.url, ram=16, token=controller.token)
    async with Instance.open(settings, plugins=BUILT_IN) as instance:
        model = instance.cache.model("my-model", token_bytes=TOKEN_BYTES)
        await model.store(tokens, rows(tokens))
        await controller.wait_until(lambda: len(controller.registry.holders) == 4)
        await controller.wait_until(controller.registry.models.all)
        (found,) = (await controller.get("/instances"))["instances"]
        assert (found["models"], found["engines"]) == (["my-model"], [])
        held = await controller.held(model="my-model", tokens=tokens)
        assert held == {"program": {"ram": len(tokens)}}
