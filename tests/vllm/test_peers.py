"""Real engines whose cache processes are peers: no engine recomputes what another has computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import SECRET, MakeCache, Oracle, StartEngine, check_answers, peer_settings

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(4)]
LATER = prompt(LENGTH, start=9000)
DEADLINE_SECONDS = 2.0
TRANSPORTS: dict[str, dict[str, Any]] = {"tcp": {"type": "tcp"}, "nixl": {"type": "nixl"}}

MakePeers = Callable[..., list[CacheProcess]]


# Differences between transports are tested in tests/transports. NIXL doubles the time here.
@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TRANSPORTS[request.param]


@pytest.fixture
def make_peers(make_cache: MakeCache, transport: dict[str, Any]) -> MakePeers:
    """``make_peers(count)``: cache processes configured as peers of each other, not yet started."""

    def make(
        count: int,
        secrets: Sequence[str] = (),
        rams: Sequence[dict[str, Any]] = (),
        deadline: float = TIMEOUT_SECONDS,
        **settings: Any,
    ) -> list[CacheProcess]:
        peers = peer_settings(count, transport={**transport, "deadline": deadline})
        for peer, secret in zip(peers, secrets, strict=False):
            peer["secret"] = secret
        return [
            make_cache(peer=peer, ram=ram, **settings)
            for peer, ram in zip(peers, rams or [None] * count, strict=True)
        ]

    return make


def store(
    cache: CacheProcess, start: StartEngine, llama: Path, prompts: Sequence[list[int]] = PROMPTS
) -> None:
    """Compute prompts in an engine, and leave them in its cache process."""
    chunks = len(prompts) * WHOLE_CHUNKS // CHUNK
    with start(llama, cache) as engine:
        for tokens in prompts:
            engine.generate(tokens)
            cache.wait_until_idle()  # In a small memory, what is not on disk yet leaves no room.
        cache.wait_until(lambda status: status["tiers"][1]["chunks"] >= chunks)


def wait_until_no_grants(cache: CacheProcess) -> None:
    cache.wait_until(lambda status: status["serving"]["grants"] == 0)
    cache.wait_until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
def test_peer_hits_what_another_engine_computed(
    llama: Path, make_peers: MakePeers, start: StartEngine, oracle: Oracle
) -> None:
    """Chunks come from the first one's memory, or from its disk if they do not fit into its memory."""
    first, second = (cache.start() for cache in make_peers(2, rams=[{"capacity": 10 * MIB}, {}]))
    store(first, start, llama)
    with start(llama, second) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    assert second.status()["counts"]["found_peers"] == len(PROMPTS) * WHOLE_CHUNKS // CHUNK
    wait_until_no_grants(first)
    wait_until_no_grants(second)


@pytest.mark.slow
def test_one_of_three_peers_is_killed(
    llama: Path, make_peers: MakePeers, start: StartEngine, oracle: Oracle
) -> None:
    first, second, third = (cache.start() for cache in make_peers(3))
    store(first, start, llama)
    with start(llama, second) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    first.kill()
    with start(llama, third) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    assert third.status()["counts"]["found_peers"] == len(PROMPTS) * WHOLE_CHUNKS // CHUNK
    wait_until_no_grants(second)
    wait_until_no_grants(third)


@pytest.mark.parametrize("outage", ["killed", pytest.param("paused", marks=pytest.mark.slow)])
def test_peer_outage_during_loads_costs_misses(
    llama: Path, make_peers: MakePeers, start: StartEngine, oracle: Oracle, outage: str
) -> None:
    """After it recovers, its chunks are hit again."""
    first, second = (
        cache.start() for cache in make_peers(2, rams=[{"capacity": 10 * MIB}, {}], deadline=DEADLINE_SECONDS)
    )
    store(first, start, llama, [*PROMPTS, LATER])
    with start(llama, second) as engine:
        requests = [engine.submit(tokens) for tokens in PROMPTS]
        second.wait_until(lambda status: status["flights"] > 0)
        if outage == "killed":
            first.kill()
        else:
            first.pause()
        expected = [oracle(llama, tokens) for tokens in PROMPTS]
        assert [engine.answer(request).tokens for request in requests] == expected
        engine.reset_prefix_cache()
        check_answers(engine, oracle, llama, PROMPTS)
        if outage == "killed":
            first.start()
        else:
            first.resume()
        # Grants from before the outage may use up its limit until their leases expire.
        wait_until_no_grants(first)
        second.wait_until(lambda status: status["peers"][0]["linked"])
        second.wait_until(lambda status: status["peers"][0]["state"] == "connected")
        second.wait_until(lambda status: status["tiers"][2]["available"])
        answer = engine.generate(LATER)
        assert (answer.tokens, answer.cached) == (oracle(llama, LATER), WHOLE_CHUNKS), second.tail()
    wait_until_no_grants(first)
    wait_until_no_grants(second)


@pytest.mark.slow  # tests/peers covers secrets without an engine.
def test_peer_with_another_secret_is_not_used(
    llama: Path, make_peers: MakePeers, start: StartEngine, oracle: Oracle
) -> None:
    first, second = (cache.start() for cache in make_peers(2, secrets=[SECRET, SECRET[::-1]]))
    store(first, start, llama)
    with start(llama, second) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
    log = second.log.read_text()
    assert log.count("WARNING") == 2, log  # One as the client, one as the server.
    assert log.count("peer.secret") == 2
    assert SECRET not in log + first.log.read_text()


@pytest.mark.slow
def test_target_without_room_recomputes(
    llama: Path, make_peers: MakePeers, start: StartEngine, oracle: Oracle
) -> None:
    first, second = (cache.start() for cache in make_peers(2, rams=[{}, {"capacity": 2 * MIB}]))
    store(first, start, llama)
    with start(llama, second) as engine:
        check_answers(engine, oracle, llama, PROMPTS)
    wait_until_no_grants(first)
