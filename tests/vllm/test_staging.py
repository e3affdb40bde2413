"""KV transfers between staging buffers of real engines. On a CPU the buffers are in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, MIB, CacheProcess, is_idle
from tests.rigs.vllm.engine import Engines
from tests.vllm.conftest import Oracle
from tests.vllm.test_disaggregated import (
    EXPECT_SECONDS,
    LENGTH,
    STEP,
    Hosts,
    Pair,
    check_lengths_around_a_chunk,
    fresh,
    is_quiet,
    pair,
    test_abort_at_the_prefiller_ends_the_transfer,
    test_chat_transfers_cached_chunks_too,
    test_decoder_hits_transferred_chunks_without_hints,
    test_decoder_killed_during_a_transfer,
    test_hybrid_model,
    test_paused_target_does_not_delay_the_prefiller,
    test_preempted_request_is_transferred_again,
    test_prefiller_killed_during_a_transfer,
    test_same_prompt_twice_concurrently,
    transferred,
)

pytestmark = pytest.mark.slow
__all__ = [
    "pair",
    "test_abort_at_the_prefiller_ends_the_transfer",
    "test_chat_transfers_cached_chunks_too",
    "test_decoder_hits_transferred_chunks_without_hints",
    "test_decoder_killed_during_a_transfer",
    "test_hybrid_model",
    "test_paused_target_does_not_delay_the_prefiller",
    "test_preempted_request_is_transferred_again",
    "test_prefiller_killed_during_a_transfer",
    "test_same_prompt_twice_concurrently",
]
"""These tests hold for both paths of a transfer."""

STAGED = {"device": "cuda", "timeout": EXPECT_SECONDS, "buffer": 16 * MIB, "reserve": "5s"}
CHUNKS = -(-LENGTH // CHUNK)


def counts(cache: CacheProcess) -> dict[str, int]:
    """Return the outcomes of all transferred chunks."""
    return dict(cache.status()["kv_transfers"]["counts"])


@pytest.fixture(scope="module")
def hosts(engines: Engines) -> Hosts:
    return Hosts(engines, "nixl", kv_transfer=STAGED)


@pytest.fixture(scope="module")
def running(hosts: Hosts, llama: Path) -> Iterator[Pair]:
    with hosts.pair(llama, **STEP) as pair:
        for cache in (pair.source, pair.target):
            cache.wait_until(lambda status: len(status["staging"]) == 1)
        yield pair


def test_every_chunk_goes_through_the_staging_buffers(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """For prompts of any length, while later chunks are computed, and bypassing the decoder's first tier."""
    before = counts(pair.source)
    check_lengths_around_a_chunk(llama, oracle, pair)
    tokens = fresh()
    pair.prefiller.hold()
    prefilling = pair.submit(tokens)
    decoding = pair.expect(tokens)
    while not any(buffer["leases"] for buffer in pair.target.status()["staging"]):
        assert not pair.prefiller.finished(prefilling)
        pair.prefiller.step()
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decoder.answer(decoding)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)
    pair.source.wait_until(is_quiet)
    after = counts(pair.source)
    assert after["staged"] - before.get("staged", 0) == after["ok"] - before.get("ok", 0) >= 2 * CHUNKS


def test_abort_at_the_decoder_releases_everything(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    pair.decoder.abort(pair.wait_for(tokens))
    pair.target.wait_until(lambda status: status["pushed"]["waiting"] == 0 and is_idle(status))
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    pair.source.wait_until(is_quiet)
    pair.target.wait_until(is_quiet)
    assert pair.decode(tokens).tokens == oracle(llama, tokens)


def test_first_tier_is_used_when_the_buffer_is_full(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    with (
        hosts.cache(kv_transfer={**STAGED, "buffer": MIB}) as target,
        hosts.engine(llama, target, "kv_consumer") as engine,
    ):
        small = pair._replace(decoder=engine, target=target)
        for _ in range(2):
            # Not every chunk may find room in time: the buffer's size also limits what is reserved at once.
            tokens = fresh()
            assert small.serve(tokens).tokens == oracle(llama, tokens)
        assert target.status()["tiers"][0]["chunks"] > 0
