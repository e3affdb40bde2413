"""The text around the position at which prompts part, through the engine's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bridge import client
from kvtier.fleet.member.tokenizer import MARK
from tests.rigs.vllm import models
from tests.rigs.waiting import wait_until
from tests.vllm.conftest import MakeCache, StartEngine

TEMPLATE = "You are a helpful assistant of a library in a small town, and you answer in one sentence. " * 6
QUESTION = "Which books about the sea do you have for children of nine years? " * 6
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]


@pytest.mark.parametrize("allowed", [True, False])
def test_text_of_a_date_in_the_middle_of_a_template(
    tmp_path: Path, make_cache: MakeCache, start: StartEngine, allowed: bool
) -> None:
    model = models.add_tokenizer(models.make_llama(tmp_path / "model"))
    cache = make_cache(partial_chunks=True, why={"show_text": allowed}).start()
    with start(model, cache, skip_tokenizer_init=False) as engine:
        for number, day in enumerate(DAYS):
            engine.generate(f"{TEMPLATE}Today is {day}. {QUESTION}")
            engine.reset_prefix_cache()
            cache.wait_until_idle()
            wait_until(
                lambda wanted=number + 1: len(client.why(cache.socket, seconds=120).requests) == wanted
            )
        report = client.why(cache.socket, seconds=120)
        breakers = [breaker for breaker in report.breakers if breaker.parted == len(DAYS) - 1]
        assert len(breakers) == 1
        text = breakers[0].text
        if allowed:
            assert MARK in text
            assert "Today is Sunday" in text.replace(MARK, "")
        else:
            assert text == ""
            assert "Sunday" not in f"{report}{client.status(cache.socket)}"
        assert "Sunday" not in cache.log.read_text()
