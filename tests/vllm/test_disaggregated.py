"""KV transfer from one real engine to another; the test plays the proxy."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, MIB, CacheProcess, ForkedCacheProcess, is_idle
from tests.rigs.vllm.engine import Answer, Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import Oracle

LENGTH = 1000
FIRST_CHUNKS = 2
"""Of eight. One or two more may have been computed by the time these arrive at the decoder."""
SECRET = "sixteen or more characters"
EXPECT_SECONDS = 60.0
"""No assertion depends on it: the decoder stops waiting when a transfer ends early."""
MAX_CACHES = 32
"""Of one ``Hosts``. Each may transfer KV to any other one."""
STEP = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16}
"""One chunk per step: an engine that is held stops in the middle of its prefill."""
ROLES = ("kv_producer", "kv_consumer")

_starts = itertools.count(0, 4000)


def fresh(length: int = LENGTH) -> list[int]:
    """Return a prompt that no other test uses."""
    return prompt(length, start=next(_starts))


class Pair(NamedTuple):
    """A prefiller and a decoder, each with its cache process."""

    prefiller: Engine
    decoder: Engine
    source: CacheProcess
    """The prefiller's."""
    target: CacheProcess
    """The decoder's."""

    def submit(self, tokens: list[int]) -> int:
        """Send the prompt to the prefiller, as a proxy does."""
        return self.prefiller.submit(
            tokens, 1, params={"kvtier": {"kv_transfer": {"to": address(self.target)}}}
        )

    def begin(self, tokens: list[int]) -> int:
        """Send the prompt, and hold the prefiller halfway, once the first chunks have been pushed."""
        stored, pushed = computed(self.source.status()), arrived(self.target.status())
        self.prefiller.hold()
        request = self.submit(tokens)
        # The first steps may do nothing, while the lookup in the tiers is pending.
        while computed(self.source.status()) < stored + FIRST_CHUNKS:
            assert not self.prefiller.finished(request)
            self.prefiller.step()
        self.target.wait_until(lambda status: arrived(status) >= pushed + FIRST_CHUNKS)
        return request

    def prefill(self, tokens: list[int]) -> Answer:
        return self.prefiller.answer(self.submit(tokens))

    def expect(self, tokens: list[int], count: int | None = None, new: int = 16) -> int:
        """Send the prompt to the decoder, as a proxy does with the token count from the prefiller."""
        expected = {"tokens": len(tokens) if count is None else count, "seconds": EXPECT_SECONDS}
        return self.decoder.submit(tokens, new, params={"kvtier": {"expect": expected}})

    def wait_for(self, tokens: list[int]) -> int:
        """Send the prompt to the decoder, and return once it waits for the transfer."""
        request = self.expect(tokens)
        self.target.wait_until(lambda status: status["pushed"]["waiting"] == 1)
        return request

    def decode(self, tokens: list[int], count: int | None = None) -> Answer:
        return self.decoder.answer(self.expect(tokens, count))

    def serve(self, tokens: list[int]) -> Answer:
        """Do all that a proxy does for one request."""
        count = transferred(self.prefill(tokens))
        return self.decode(tokens, count) if count else self.decoder.generate(tokens)

    def settle(self) -> None:
        """Wait until nothing is leased or in flight."""
        self.prefiller.resume()
        for cache, engine in ((self.source, self.prefiller), (self.target, self.decoder)):
            cache.wait_until(is_quiet)
            engine.wait_until_free()

    def check(self, model: Path, oracle: Oracle, tokens: list[int], *, windows: bool = False) -> None:
        """Check the answer, and that the decoder computed only the last token of the prompt.

        vLLM counts that token as cached, too: its KV is loaded, and then computed again to sample from it.
        Unless the model has ``windows``: then kvtier does not report it.
        """
        answer = self.serve(tokens)
        assert answer.tokens == oracle(model, tokens)
        assert answer.cached == len(tokens) - windows, self.source.tail() + self.target.tail()


def address(cache: CacheProcess) -> str:
    """Return the address on which an instance listens for peers."""
    return str(cache.settings["peer"]["listen"])


def transferred(answer: Answer) -> int:
    """Return the number of tokens that the prefiller has promised."""
    assert answer.params is not None
    return int(answer.params["kvtier"].get("transferred", {"tokens": 0})["tokens"])


def computed(status: dict[str, Any]) -> int:
    """Return the number of chunks that engines have computed for a cache process so far."""
    return int(status["counts"].get("stored", 0))


def arrived(status: dict[str, Any]) -> int:
    """Return the number of pushed chunks that a cache process has committed so far."""
    return int(status["serving"]["reserving"]["counts"].get("committed", 0))


def is_quiet(status: dict[str, Any]) -> bool:
    """Whether no lease, reservation, grant or transfer is left, and no request waits for one."""
    transfer, taking = status["kv_transfers"], status["serving"]["reserving"]
    counts = (
        transfer["open"],
        transfer["leased_bytes"],
        transfer["awaited"],
        taking["reserved_bytes"],
        taking["reservations"],
        taking["announcements"],
        status["serving"]["grants"],
        status["pushed"]["announced"],
        status["pushed"]["waiting"],
        *(buffer[key] for buffer in status.get("staging", ()) for key in ("leases", "chunks", "grants")),
    )
    return is_idle(status) and not any(counts)


class Hosts:
    """Starts cache processes without configured peers, and engines on them."""

    def __init__(self, engines: Engines, transport: str, **settings: Any) -> None:
        """``settings`` apply to every cache process."""
        self._engines = engines
        self._transport = transport
        self._settings = settings
        self._ports = [free_port() for _ in range(MAX_CACHES)]
        self._unused = iter(self._ports)

    @contextmanager
    def cache(self, **settings: Any) -> Iterator[CacheProcess]:
        peer = {
            "listen": f"127.0.0.1:{next(self._unused)}",
            "secret": SECRET,
            "transport": {"type": self._transport},
            "share": 0.9,
        }
        folder = Path(tempfile.mkdtemp(prefix="kvt-"))
        settings = {"kv_transfer": {"timeout": EXPECT_SECONDS}, **self._settings, **settings}
        targets = [f"127.0.0.1:{port}" for port in (*self._ports, 1)]
        settings["kv_transfer"] = {"targets": targets, **settings["kv_transfer"]}
        cache = ForkedCacheProcess(folder, peer=peer, **settings)
        try:
            cache.start()
            yield cache
        finally:
            cache.kill()
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def engine(self, model: Path, cache: CacheProcess, kv_role: str, **arguments: Any) -> Iterator[Engine]:
        """Run an engine. At its end nothing may be leased or in flight."""
        if self._settings.get("kv_transfer", {}).get("device") == "cuda":
            arguments = {"stages_on_cpu": True, **arguments}
        with self._engines.engine(model, cache.connector, kv_role=kv_role, **arguments) as engine:
            yield engine
            if engine.process.is_alive():
                cache.wait_until(is_quiet)
                engine.wait_until_free()

    @contextmanager
    def pair(self, model: Path, **arguments: Any) -> Iterator[Pair]:
        with ExitStack() as stack:
            source, target = (stack.enter_context(self.cache()) for _ in range(2))
            started = [
                stack.enter_context(self.engine(model, cache, role, **arguments))
                for cache, role in zip((source, target), ROLES, strict=True)
            ]
            yield Pair(started[0], started[1], source, target)


@pytest.fixture(scope="module")
def hosts(engines: Engines) -> Hosts:
    return Hosts(engines, "tcp")


@pytest.fixture(scope="module")
def running(hosts: Hosts, llama: Path) -> Iterator[Pair]:
    with hosts.pair(llama, **STEP) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """Two engines for many tests. After each test nothing may be leased or in flight."""
    yield running
    running.settle()


def check_lengths_around_a_chunk(model: Path, oracle: Oracle, pair: Pair, *, windows: bool = False) -> None:
    for length in (20, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH):
        pair.check(model, oracle, fresh(length), windows=windows)


def test_decoder_computes_only_the_last_token(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """Lengths: below a block, a chunk less one token, a chunk, a chunk and one token, many chunks."""
    check_lengths_around_a_chunk(llama, oracle, pair)


def test_answers_report_the_peer_address_and_transferred_tokens(pair: Pair) -> None:
    here = address(pair.source)
    assert pair.prefill(fresh()).params == {
        "kvtier": {"peer": here, "transferred": {"tokens": LENGTH, "from": here}}
    }
    answer = pair.decoder.generate([1, 2, 3], 1, params={"kvtier": {}})
    assert answer.params == {"kvtier": {"peer": address(pair.target)}}
    assert pair.decoder.generate([1, 2, 3], 1).params is None
    assert pair.prefiller.metrics()["kvtier_transferred_tokens_total"] >= LENGTH


def test_chat_transfers_cached_chunks_too(llama: Path, pair: Pair, oracle: Oracle) -> None:
    """Chunks from the prefiller's tiers or from vLLM's own cache are transferred like computed ones."""
    conversation: list[int] = []
    for length in (300, 200, 150):
        conversation += fresh(length)
        answer = pair.serve(conversation)
        assert (answer.tokens, answer.cached) == (oracle(llama, conversation), len(conversation))
        conversation += answer.tokens
    pair.source.wait_until(is_quiet)
    pair.target.wait_until(is_quiet)
    # The decoder starts over: the prefiller transfers everything again, from memory and from disk.
    pair.source.wait_until_stored(LENGTH // 2)
    pair.decoder.reset_prefix_cache()
    pair.prefiller.reset_prefix_cache()
    pair.check(llama, oracle, conversation)


def test_chunks_are_pushed_while_later_ones_are_computed(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decoder.answer(decoding)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_same_prompt_twice_concurrently(llama: Path, pair: Pair, oracle: Oracle) -> None:
    prompts = [fresh()] * 2 + [fresh()]
    prefilling = [pair.submit(tokens) for tokens in prompts]
    decoding = [pair.expect(tokens) for tokens in reversed(prompts)]
    for request in prefilling:
        assert transferred(pair.prefiller.answer(request)) == LENGTH
    for request, tokens in zip(decoding, reversed(prompts), strict=True):
        answer = pair.decoder.answer(request)
        assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_decoder_hits_transferred_chunks_without_hints(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    pair.prefill(tokens)
    pair.source.wait_until(is_quiet)
    answer = pair.decoder.generate(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


@pytest.mark.parametrize(
    "hints",
    [
        {"kvtier": {"kv_transfer": {"to": "127.0.0.1:1"}}},
        {"kvtier": {"kv_transfer": {"to": "127.0.0.1:2"}}},
        {"kvtier": {"kv_transfer": {"to": "nonsense"}}},
        {"kvtier": {"expect": {"tokens": LENGTH}}},
        {"kvtier": 7},
        {"other": {"kvtier": 1}},
    ],
    ids=[
        "no-listener",
        "unnamed-address",
        "invalid-address",
        "wrong-role",
        "not-a-mapping",
        "another-connector",
    ],
)
def test_useless_hints_are_ignored(llama: Path, pair: Pair, oracle: Oracle, hints: dict[str, Any]) -> None:
    tokens = fresh(300)
    answer = pair.prefiller.generate(tokens, params=hints)
    assert answer.tokens == oracle(llama, tokens)
    assert (answer.params is None) == ("kvtier" not in hints)


def test_abort_at_the_prefiller_ends_the_transfer(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.prefiller.abort(prefilling)
    answer = pair.decoder.answer(decoding)
    assert answer.tokens == oracle(llama, tokens)
    assert FIRST_CHUNKS * CHUNK <= answer.cached < LENGTH


def test_abort_at_the_decoder_ends_the_wait(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    pair.decoder.abort(pair.wait_for(tokens))
    pair.target.wait_until(lambda status: status["pushed"]["waiting"] == 0 and is_idle(status))
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    pair.source.wait_until(is_quiet)
    assert pair.decode(tokens) == Answer(
        oracle(llama, tokens), LENGTH, "length", {"kvtier": {"peer": address(pair.target)}}
    )


def test_preempted_request_is_transferred_again(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    before = pair.source.status()["kv_transfers"]["counts"].get("kv_transfers", 0)
    prefilling = pair.begin(tokens)
    pair.prefiller.preempt()
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decode(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)
    status = pair.source.wait_until(is_quiet)
    assert status["kv_transfers"]["counts"]["kv_transfers"] == before + 2


def test_paused_target_does_not_delay_the_prefiller(llama: Path, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    prefilling = pair.begin(tokens)
    decoding = pair.wait_for(tokens)
    pair.target.pause()
    try:
        pair.prefiller.resume()
        answer = pair.prefiller.answer(prefilling)
        assert answer.tokens == oracle(llama, tokens)[:1]
    finally:
        pair.target.resume()
    assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)


def test_prefiller_killed_during_a_transfer(llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle) -> None:
    tokens = fresh()
    with hosts.engine(llama, pair.source, "kv_producer", **STEP) as engine:
        dying = pair._replace(prefiller=engine)
        dying.begin(tokens)
        decoding = dying.wait_for(tokens)
        engine.kill()
        answer = pair.decoder.answer(decoding)
    assert answer.tokens == oracle(llama, tokens)
    assert FIRST_CHUNKS * CHUNK <= answer.cached < LENGTH


def test_decoder_killed_during_a_transfer(llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle) -> None:
    """The chunks that were sent to it are hit by the next decoder."""
    tokens = fresh()
    with hosts.engine(llama, pair.target, "kv_consumer") as engine:
        dying = pair._replace(decoder=engine)
        prefilling = dying.begin(tokens)
        dying.wait_for(tokens)
        engine.kill()
    pair.prefiller.resume()
    assert transferred(pair.prefiller.answer(prefilling)) == LENGTH
    answer = pair.decode(tokens)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), LENGTH)


def test_decoder_without_room_recomputes(llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle) -> None:
    with (
        hosts.cache(ram={"capacity": 2 * MIB}) as target,
        hosts.engine(llama, target, "kv_consumer") as engine,
    ):
        full = pair._replace(decoder=engine, target=target)
        for _ in range(2):
            tokens = fresh()
            answer = full.serve(tokens)
            assert answer.tokens == oracle(llama, tokens)
            assert answer.cached < LENGTH
        pair.source.wait_until(is_quiet)


def test_different_layouts_are_refused_with_one_clear_message(
    llama: Path, hosts: Hosts, pair: Pair, oracle: Oracle
) -> None:
    with hosts.cache() as target, hosts.engine(llama, target, "kv_consumer", block_size=64) as engine:
        other = pair._replace(decoder=engine, target=target)
        for _ in range(3):
            tokens = fresh()
            answer = other.serve(tokens)
            assert (answer.tokens, answer.cached) == (oracle(llama, tokens), 0)
        pair.source.wait_until(is_quiet)
        assert target.status()["tiers"][0]["chunks"] == 3 * (LENGTH // CHUNK), "only its own"
    lines = [line for line in pair.source.log.read_text().splitlines() if "blocks of 64" in line]
    assert len(lines) == 1, lines
    assert address(target) in lines[0]
    assert f"chunks of {CHUNK} tokens in blocks of 64" in lines[0]
    assert f"here: chunks of {CHUNK} tokens in blocks of 32" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["source", "target"])
def test_cache_process_killed_during_a_transfer(llama: Path, hosts: Hosts, oracle: Oracle, side: str) -> None:
    tokens = fresh()
    with hosts.pair(llama, **STEP) as pair:
        prefilling = pair.begin(tokens)
        decoding = pair.wait_for(tokens)
        cache: CacheProcess = getattr(pair, side)
        cache.kill()
        pair.prefiller.resume()
        assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)
        assert pair.prefiller.answer(prefilling).tokens == oracle(llama, tokens)[:1]
        cache.start()
        for _ in range(2):  # The first request makes both halves of the connector reconnect.
            last = fresh()
            assert pair.serve(last).tokens == oracle(llama, last)
        pair.check(llama, oracle, fresh())


@pytest.mark.slow
def test_over_nixl(llama: Path, engines: Engines, oracle: Oracle) -> None:
    with Hosts(engines, "nixl").pair(llama, **STEP) as pair:
        check_lengths_around_a_chunk(llama, oracle, pair)
        tokens = fresh()
        prefilling = pair.begin(tokens)
        decoding = pair.wait_for(tokens)
        pair.prefiller.abort(prefilling)
        assert pair.decoder.answer(decoding).tokens == oracle(llama, tokens)
        pair.prefiller.resume()
        pair.check(llama, oracle, fresh())


@pytest.mark.slow
def test_hybrid_model(hybrid: Path, hosts: Hosts, oracle: Oracle) -> None:
    with hosts.pair(hybrid) as pair:
        check_lengths_around_a_chunk(hybrid, oracle, pair, windows=True)


@pytest.mark.slow
def test_tensor_parallel(llama: Path, hosts: Hosts, oracle: Oracle) -> None:
    """A chunk has the slices of all ranks, and is pushed once all of them are stored."""
    with hosts.pair(llama, tensor_parallel_size=2) as pair:
        check_lengths_around_a_chunk(llama, oracle, pair)
