"""A paused cache process delays no step of a real vLLM, and serves again after it resumes."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.cache_process import CHUNK, is_idle
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(3)]
NEW = 40
WAITS = 20 * 0.002
"""Limit in seconds of the scheduler's waits during the pause: at most 2 ms per outage, with a wide margin."""


def test_paused_cache_process_delays_no_step_and_serves_again(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(prefetch={"policy": "timeout", "deadline": "60s"}).start()
    expected = [oracle(llama, tokens, NEW) for tokens in PROMPTS]
    with start(llama, cache) as engine:
        assert engine.generate(PROMPTS[0], NEW).tokens == expected[0]
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        before = engine.metrics()
        cache.pause()
        try:
            answers = engine.generate_all(PROMPTS, NEW)
            paused = engine.metrics()
            engine.wait_until_free()
        finally:
            cache.resume()
        assert [answer.tokens for answer in answers] == expected
        assert {answer.cached for answer in answers} == {0}, "unreachable chunks are computed"
        assert paused["waited"] - before["waited"] < WAITS
        engine.reset_prefix_cache()
        cache.wait_until(lambda status: True)
        assert engine.generate(PROMPTS[1], NEW).tokens == expected[1]
        cache.wait_until_stored(2 * WHOLE_CHUNKS)
        engine.reset_prefix_cache()
        warm = engine.generate(PROMPTS[1], NEW)
        assert warm.tokens == expected[1]
        assert warm.cached >= WHOLE_CHUNKS
    log = engine.log.read_text()
    assert log.count("the cache process has not answered for") == 1
    assert log.count("the cache process answers again") >= 1


def test_requests_in_flight_during_a_pause_complete(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    """The pause hits decoding, a prefill and a load. No block stays reserved."""
    cache = make_cache(prefetch={"policy": "timeout", "deadline": "60s"}).start()
    expected = [oracle(llama, tokens, NEW) for tokens in PROMPTS]
    with start(llama, cache, max_num_batched_tokens=256) as engine:
        engine.generate(PROMPTS[0], NEW)
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        engine.hold()
        numbers = [engine.submit(tokens, NEW) for tokens in PROMPTS]
        for _ in range(6):
            engine.step()
        cache.pause()
        try:
            engine.resume()
            answers = [engine.answer(number) for number in numbers]
            engine.wait_until_free()
        finally:
            cache.resume()
        assert [answer.tokens for answer in answers] == expected
        # A late grant is returned in the step after it arrives.
        engine.generate(PROMPTS[0][:CHUNK], 1)
        while not is_idle(cache.status()):
            engine.generate(PROMPTS[0][:CHUNK], 1)
