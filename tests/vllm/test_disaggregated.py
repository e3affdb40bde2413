"""One real engine computes prompts and hands them over to another: here the test is the proxy."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.testing.servers.base import free_port
from tests.vllm.cache_process import CHUNK, MIB, CacheProcess, is_idle
from tests.vllm.conftest import Oracle
from tests.vllm.engine import Answer, Engine, Engines
from tests.vllm.models import prompt

LENGTH = 1000
FIRST_CHUNKS = 2
"""Of eight. One or two more may have been computed by the time that these are seen at the decoder."""
SECRET = "sixteen or more characters"
EXPECT_SECONDS = 60.0
"""Nothing is judged by it: what is not pushed any longer is not waited for."""
STEP = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16}
"""One chunk is computed in a step: an engine that may take no further step stops amid its prefill."""
ROLES = ("kv_producer", "kv_consumer")

_starts = itertools.count(0, 4000)


def fresh(length: int = LENGTH) -> list[int]:
    """A prompt that no other test has."""
    return prompt(length, start=next(_starts))


class Pair(NamedTuple):
    """A prefiller and a decoder, each with its cache process."""

    prefiller: Engine
    decoder: Engine
    here: CacheProcess
    """The prefiller's."""
    there: CacheProcess

    def submit(self, tokens: list[int]) -> int:
        """Ask the prefiller, as a proxy does."""
        return self.prefiller.submit(tokens, 1, params={"kvtier": {"hand_over": {"to": address(self.there)}}})

    def begin(self, tokens: list[int]) -> int:
        """Ask it, and hold it amid its prefill, when the first chunks have been pushed."""
        stored, pushed = computed(self.here.status()), arrived(self.there.status())
        self.prefiller.hold()
        request = self.submit(tokens)
        # Its first steps may do nothing: whether it has the prompt in some tier is not known yet.
        while computed(self.here.status()) < stored + FIRST_CHUNKS:
            assert not self.prefiller.finished(request)
            self.prefiller.step()
        self.there.wait_until(lambda status: arrived(status) >= pushed + FIRST_CHUNKS)
        return request

    def prefill(self, tokens: list[int]) -> Answer:
        return self.prefiller.answer(self.submit(tokens))

    def expect(self, tokens: list[int], count: int | None = None, new: int = 16) -> int:
        """Ask the decoder, as a proxy does that was told by the prefiller that so many tokens come."""
        expected = {"tokens": len(tokens) if count is None else count, "seconds": EXPECT_SECONDS}
        return self.decoder.submit(tokens, new, params={"kvtier": {"expect": expected}})

    def wait_for(self, tokens: list[int]) -> int:
        """Ask the decoder, and come back when it waits for what is to be pushed."""
        request = self.expect(tokens)
        self.there.wait_until(lambda status: status["pushed"]["waiting"] == 1)
        return request

    def decode(self, tokens: list[int], count: int | None = None) -> Answer:
        return self.decoder.answer(self.expect(tokens, count))

    def serve(self, tokens: list[int]) -> Answer:
        """All that a proxy does for one request."""
        told = handed_over(self.prefill(tokens))
        return self.decode(tokens, told) if told else self.decoder.generate(tokens)

    def check(self, model: Path, oracle: Oracle, tokens: list[int]) -> None:
        """The answer is right, and the decoder has computed nothing of the prompt but its last token.

        Which vLLM counts as cached, too: its KV is loaded, and computed again to go on from there.
        """
        answer = self.serve(tokens)
        assert answer.tokens == oracle(model, tokens)
        assert answer.cached == len(tokens), self.here.tail() + self.there.tail()


def address(cache: CacheProcess) -> str:
    """Where an instance listens for peers."""
    return str(cache.settings["peer"]["listen"])


def handed_over(answer: Answer) -> int:
    """How many tokens the prefiller has promised."""
    assert answer.params is not None
    return int(answer.params["kvtier"].get("handed_over", {"tokens": 0})["tokens"])


def computed(status: dict[str, Any]) -> int:
    """How many chunks engines have computed for a cache process so far."""
    return int(status["counts"].get("stored", 0))


def arrived(status: dict[str, Any]) -> int:
    """How many chunks were pushed to a cache process so far, and could be found there."""
    return int(status["serving"]["reserving"]["counts"].get("committed", 0))


def is_quiet(status: dict[str, Any]) -> bool:
    """Whether no lease, reservation, grant or hand-over is left, and nobody who waits for one."""
    handing, taking = status["hand_overs"], status["serving"]["reserving"]
    counts = (
        handing["open"],
        handing["leased_bytes"],
        handing["awaited"],
        taking["reserved_bytes"],
        taking["reservations"],
        taking["announcements"],
        status["serving"]["grants"],
        status["pushed"]["coming"],
        status["pushed"]["waiting"],
        *(buffer[what] for buffer in status.get("staging", ()) for what in ("leases", "chunks", "grants")),
    )
    return is_idle(status) and not any(counts)


class Hosts:
    """Starts cache processes that are peers of nobody, and engines on them."""

    def __init__(self, engines: Engines, transport: str, **settings: Any) -> None:
        """``settings`` are those of every cache process."""
        self._engines = engines
        self._transport = transport
        self._settings = settings

    @contextmanager
    def cache(self, **settings: Any) -> Iterator[CacheProcess]:
        peer = {
            "listen": f"127.0.0.1:{free_port()}",
            "secret": SECRET,
            "transport": {"type": self._transport},
            "share": 0.9,
        }
        folder = Path(tempfile.mkdtemp(prefix="kvt-"))
        settings = {"hand_over": {"patience": EXPECT_SECONDS}, **self._settings, **settings}
        cache = CacheProcess(folder, peer=peer, **settings)
        try:
            cache.start()
            yield cache
        finally:
            cache.kill()
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def engine(self, model: Path, cache: CacheProcess, kv_role: str, **arguments: Any) -> Iterator[Engine]:
        """At the end nobody may hold anything any more."""
        if self._settings.get("hand_over", {}).get("device") == "cuda":
            arguments = {"stages_on_cpu": True, **arguments}
        with self._engines.engine(model, cache.connector, kv_role=kv_role, **arguments) as engine:
            yield engine
            if engine.process.is_alive():
                cache.wait_until(is_quiet)
                engine.wait_until_free()

    @contextmanager
    def pair(self, model: Path, **arguments: Any) -> Iterator[Pair]:
        with ExitStack() as stack:
            here, there = (stack.enter_context(self.cache()) for _ in range(2))
            started = [
                stack.enter_context(self.engine(model, cache, role, **arguments))
                for cache, role in zip((here, there), ROLES, strict=True)
            ]
            yield Pair(started[0], started[1], here, there)


@pytest.fixture(scope="module")
def hosts(engines: Engines) -> Hosts:
    return Hosts(engines, "tcp")


@pytest.fixture(scope="module")
def running(hosts: Hosts, llama: Path) -> Iterator[Pair]:
    with hosts.pair(llama, **STEP) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """Two engines for many tests: after each, nobody may hold anything any more."""
    yield running
    running.prefiller.let_go()
    for cache, engine in ((running.here, running.prefiller), (running.there, running.decoder)):
        cache.wait_until(is_quiet)
        engine.wait_until_free()


def around_a_chunk(model: Path, oracle: Oracle, pair: Pair) -> None:
    for length in (20, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH):
        pair.check(model, oracle, fresh(length))


def test_the_decoder_computes_the_last_token_alone(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """Of a prompt shorter than a block, of a chunk less a token, of one, of one and a token, and of many."""
    around_a_chunk(llama, oracle, pair)


def test_answers_say_where_peers_are_and_what_was_handed_over(pair: Pair) -> None:
    here = address(pair.here)
    assert pair.prefill(fresh()).params == {
        "kvtier": {"peer": here, "handed_over": {"tokens": LENGTH, "from": here}}
    }
    asked = pair.decoder.generate([1, 2, 3], 1, params={"kvtier": {}})
    assert asked.params == {"kvtier": {"peer": address(pair.there)}}
    assert pair.decoder.generate([1, 2, 3], 1).params is None
    assert pair.prefiller.metrics()["kvtier_handed_over_tokens_total"] >= LENGTH


def test_a_chat_goes_on_with_what_both_have(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """What the prefiller has in its memory, or vLLM in its own, is handed over like what was computed."""
    conversation: list[int] = []
    for length in (300, 200, 150):
        conversation += fresh(length)
        answer = pair.serve(conversation)
        assert (answer.tokens, answer.cached) == (oracle(llama, conversation), len(conversation))
        conversation += answer.tokens
    pair.here.wait_until(is_quiet)
    pair.there.wait_until(is_quiet)
    # The decoder has lost all of it: what the prefiller has is handed over again, from memory and from disk.
    pair.here.wait_until_stored(LENGTH // 2)
    pair.decoder.reset_prefix_cache()
    pair.prefiller.reset_prefix_cache()
    pair.check(llama, oracle, conversation)


def test_chunks_are_pushed_while_later_ones_are_computed(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decoder.answer(decoding)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_one_prompt_twice_at_once(llama: Path, pair: Pair, oracle: Oracle) -> None:
    prompts = [fresh()] * 2 + [fresh()]
    prefilling = [pair.submit(tokens) for tokens in prompts]
    decoding = [pair.expect(tokens) for tokens in reversed(prompts)]
    for request in prefilling:
        assert handed_over(pair.prefiller.answer(request)) == LENGTH
    for request, tokens in zip(decoding, reversed(prompts), strict=True):
        answer = pair.decoder.answer(request)
        assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_without_hints_the_decoder_finds_what_is_there(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    pair.prefill(tokens)
    pair.here.wait_until(is_quiet)
    answer = pair.decoder.generate(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


@pytest.mark.parametrize(
    "hints",
    [
        {"kvtier": {"hand_over": {"to": "127.0.0.1:1"}}},
        {"kvtier": {"hand_over": {"to": "nonsense"}}},
        {"kvtier": {"expect": {"tokens": LENGTH}}},
        {"kvtier": 7},
        {"other": {"kvtier": 1}},
    ],
    ids=["nobody-there", "no-address", "not-its-role", "no-mapping", "not-ours"],
)
def test_hints_that_are_of_no_use_cost_nothing(
    llama: Path, pair: Pair, oracle: Oracle, hints: dict[str, Any]
) -> None:
    tokens = fresh(300)
    answer = pair.prefiller.generate(tokens, params=hints)
    assert answer.tokens == oracle(llama, tokens)
    assert (answer.params is None) == ("kvtier" not in hints)


def test_an_abort_at_the_prefiller_ends_the_hand_over(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.prefiller.abort(prefilling)
    answer = pair.decoder.answer(decoding)
    assert answer.tokens == oracle(llama, tokens)
    assert FIRST_CHUNKS * CHUNK <= answer.cached < LENGTH


def test_an_abort_at_the_decoder_ends_the_wait(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    pair.decoder.abort(pair.wait_for(tokens))
    pair.there.wait_until(lambda status: status["pushed"]["waiting"] == 0 and is_idle(status))
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    pair.here.wait_until(is_quiet)
    assert pair.decode(tokens) == Answer(
        oracle(llama, tokens), LENGTH, "length", {"kvtier": {"peer": address(pair.there)}}
    )


def test_one_that_is_preempted_is_handed_over_anew(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    before = pair.here.status()["hand_overs"]["counts"].get("hand_overs", 0)
    prefilling = pair.begin(tokens)
    pair.prefiller.preempt()
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decode(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)
    status = pair.here.wait_until(is_quiet)
    assert status["hand_overs"]["counts"]["hand_overs"] == before + 2


def test_a_link_that_is_paused_holds_nobody_up_at_the_prefiller(
    llama: Path, pair: Pair, oracle: Oracle
) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.there.pause()
    try:
        pair.prefiller.let_go()
        answer = pair.prefiller.answer(prefilling)
        assert answer.tokens == oracle(llama, tokens)[:1]
    finally:
        pair.there.resume()
    assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)


def test_a_prefiller_that_is_killed_amid_a_push(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    tokens = fresh()
    with hosts.engine(llama, pair.here, "kv_producer", **STEP) as engine:
        dying = pair._replace(prefiller=engine)
        dying.begin(tokens)
        decoding = dying.wait_for(tokens)
        engine.kill()
        answer = pair.decoder.answer(decoding)
    assert answer.tokens == oracle(llama, tokens)
    assert FIRST_CHUNKS * CHUNK <= answer.cached < LENGTH


def test_a_decoder_that_is_killed_amid_its_answer(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    """Once while it waits, once while it decodes. What it was sent is there for the next."""
    tokens = fresh()
    with hosts.engine(llama, pair.there, "kv_consumer") as engine:
        dying = pair._replace(decoder=engine)
        prefilling = dying.begin(tokens)
        dying.wait_for(tokens)
        engine.kill()
    pair.prefiller.let_go()
    assert handed_over(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decode(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_a_decoder_without_room_computes_itself(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    with (
        hosts.cache(ram={"capacity": 2 * MIB}) as there,
        hosts.engine(llama, there, "kv_consumer") as engine,
    ):
        full = pair._replace(decoder=engine, there=there)
        for _ in range(2):
            tokens = fresh()
            answer = full.serve(tokens)
            assert answer.tokens == oracle(llama, tokens)
            assert answer.cached < LENGTH
        pair.here.wait_until(is_quiet)


def test_layouts_that_differ_are_refused_in_words(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    with (
        hosts.cache() as there,
        hosts.engine(llama, there, "kv_consumer", block_size=64) as engine,
    ):
        other = pair._replace(decoder=engine, there=there)
        for _ in range(3):
            tokens = fresh()
            answer = other.serve(tokens)
            assert (answer.tokens, answer.cached) == (oracle(llama, tokens), 0)
        pair.here.wait_until(is_quiet)
        assert there.status()["tiers"][0]["chunks"] == 3 * (LENGTH // CHUNK), "its own alone"
    said = [line for line in pair.here.log.read_text().splitlines() if "blocks of 64" in line]
    assert len(said) == 1, said
    assert address(there) in said[0]
    assert f"chunks of {CHUNK} tokens in blocks of 64" in said[0]
    assert f"here: chunks of {CHUNK} tokens in blocks of 32" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["here", "there"])
def test_a_cache_process_that_is_killed_amid_a_push(
    llama: Path, hosts: Hosts, oracle: Oracle, side: str
) -> None:
    tokens = fresh()
    with hosts.pair(llama, **STEP) as pair:
        prefilling = pair.begin(tokens)
        decoding = pair.wait_for(tokens)
        cache: CacheProcess = getattr(pair, side)
        cache.kill()
        pair.prefiller.let_go()
        assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)
        assert pair.prefiller.answer(prefilling).tokens == oracle(llama, tokens)[:1]
        cache.start()
        for _ in range(2):  # With the first both halves of the engine find the new one.
            last = fresh()
            assert pair.serve(last).tokens == oracle(llama, last)
        pair.check(llama, oracle, fresh())


@pytest.mark.slow
def test_over_nixl(llama: Path, engines: Engines, oracle: Oracle) -> None:
    with Hosts(engines, "nixl").pair(llama, **STEP) as pair:
        around_a_chunk(llama, oracle, pair)
        tokens = fresh()
        prefilling = pair.begin(tokens)
        decoding = pair.wait_for(tokens)
        pair.prefiller.abort(prefilling)
        assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)
        pair.prefiller.let_go()
        pair.check(llama, oracle, fresh())


@pytest.mark.slow
def test_a_hybrid_model(hybrid: Path, hosts: Hosts, oracle: Oracle) -> None:
    with hosts.pair(hybrid) as pair:
        around_a_chunk(hybrid, oracle, pair)


@pytest.mark.slow
def test_tensor_parallel(llama: Path, hosts: Hosts, oracle: Oracle) -> None:
    """All ranks' slices are in one chunk, which is pushed when all of them are there."""
    with hosts.pair(llama, tensor_parallel_size=2) as pair:
        around_a_chunk(llama, oracle, pair)
