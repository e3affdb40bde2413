"""Hand-overs from staging buffer to staging buffer beside the KV of real engines, on a CPU in its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.cache_process import CHUNK, MIB, CacheProcess, is_idle
from tests.vllm.conftest import Oracle
from tests.vllm.engine import Engines
from tests.vllm.test_disaggregated import (
    EXPECT_SECONDS,
    LENGTH,
    STEP,
    Hosts,
    Pair,
    around_a_chunk,
    fresh,
    handed_over,
    is_quiet,
    test_a_chat_goes_on_with_what_both_have,
    test_a_decoder_that_is_killed_amid_its_answer,
    test_a_hybrid_model,
    test_a_link_that_is_paused_holds_nobody_up_at_the_prefiller,
    test_a_prefiller_that_is_killed_amid_a_push,
    test_an_abort_at_the_prefiller_ends_the_hand_over,
    test_one_prompt_twice_at_once,
    test_one_that_is_preempted_is_handed_over_anew,
    test_without_hints_the_decoder_finds_what_is_there,
)

pytestmark = pytest.mark.slow
__all__ = [
    "test_a_chat_goes_on_with_what_both_have",
    "test_a_decoder_that_is_killed_amid_its_answer",
    "test_a_hybrid_model",
    "test_a_link_that_is_paused_holds_nobody_up_at_the_prefiller",
    "test_a_prefiller_that_is_killed_amid_a_push",
    "test_an_abort_at_the_prefiller_ends_the_hand_over",
    "test_one_prompt_twice_at_once",
    "test_one_that_is_preempted_is_handed_over_anew",
    "test_without_hints_the_decoder_finds_what_is_there",
]
"""The same holds whichever way chunks go."""

STAGED = {"device": "cuda", "patience": EXPECT_SECONDS, "buffer": 16 * MIB, "reserve": "5s"}
CHUNKS = -(-LENGTH // CHUNK)


def counts(cache: CacheProcess) -> dict[str, int]:
    """What became of all chunks that were handed over."""
    return dict(cache.status()["hand_overs"]["counts"])


@pytest.fixture(scope="module")
def hosts(engines: Engines) -> Hosts:
    return Hosts(engines, "nixl", hand_over=STAGED)


@pytest.fixture(scope="module")
def running(hosts: Hosts, llama: Path) -> Iterator[Pair]:
    with hosts.pair(llama, **STEP) as pair:
        for cache in (pair.here, pair.there):
            cache.wait_until(lambda status: len(status["staging"]) == 1)
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """Two engines for many tests: after each, nobody may hold anything any more."""
    yield running
    running.prefiller.let_go()
    for cache, engine in ((running.here, running.prefiller), (running.there, running.decoder)):
        cache.wait_until(is_quiet)
        engine.wait_until_free()


def test_all_goes_from_buffer_to_buffer(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """Of prompts of any length, while later chunks are computed, past the decoder's first tier."""
    before = counts(pair.here)
    around_a_chunk(llama, oracle, pair)
    tokens = fresh()
    pair.prefiller.hold()
    prefilling = pair.submit(tokens)
    decoding = pair.expect(tokens)
    while not any(buffer["leases"] for buffer in pair.there.status()["staging"]):
        assert not pair.prefiller.finished(prefilling)
        pair.prefiller.step()
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decoder.answer(decoding)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)
    pair.here.wait_until(is_quiet)
    after = counts(pair.here)
    assert after["staged"] - before.get("staged", 0) == after["ok"] - before.get("ok", 0) >= 2 * CHUNKS


def test_an_abort_at_the_decoder_leaves_nothing(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    pair.decoder.abort(pair.wait_for(tokens))
    pair.there.wait_until(lambda status: status["pushed"]["waiting"] == 0 and is_idle(status))
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    pair.here.wait_until(is_quiet)
    pair.there.wait_until(is_quiet)
    assert pair.decode(tokens).tokens == oracle(llama, tokens)


def test_what_finds_no_room_goes_through_the_first_tier(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    with (
        hosts.cache(hand_over={**STAGED, "buffer": MIB}) as there,
        hosts.engine(llama, there, "kv_consumer") as engine,
    ):
        small = pair._replace(decoder=engine, there=there)
        for _ in range(2):
            # All of it may not find room in time: the buffer's size is also what may be reserved at once.
            tokens = fresh()
            assert small.serve(tokens).tokens == oracle(llama, tokens)
        assert there.status()["tiers"][0]["chunks"] > 0
