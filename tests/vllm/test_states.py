"""Models with states: a hit ends where a state is stored, and the tokens are those of vLLM without kvtier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.rigs.cache_process import TIMEOUT_SECONDS, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, StartEngine, peer_settings

BLOCK = 128
MAMBA: dict[str, Any] = {
    "block_size": None,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": True,
}
"""With more than one block in a step, vLLM's CPU kernel of Mamba 2 crashes."""


LENGTHS = [1000, 129, 257, 640, 700]


class Hybrid(NamedTuple):
    """A model with states, and how its engine is started."""

    path: Path
    arguments: dict[str, Any]
    extra: int = 0
    """Tokens by which prompts are longer, for a model with longer blocks."""

    @property
    def preemptions(self) -> int:
        """vLLM refuses to preempt while a request loads, which is soon where a prompt takes one step."""
        return 1 if self.extra else 3

    def prompts(self, *lengths: int) -> list[list[int]]:
        return prompts_of([length + self.extra for length in lengths])


class Plain:
    """vLLM without kvtier, one engine for each model."""

    def __init__(self, engines: Engines, running: ExitStack) -> None:
        self._engines, self._running = engines, running
        self._of: dict[Path, Engine] = {}

    def answers(self, hybrid: Hybrid, prompts: list[list[int]]) -> list[list[int]]:
        """Return the tokens of each prompt, computed from the first token on."""
        if hybrid.path not in self._of:
            started = self._engines.engine(hybrid.path, None, **hybrid.arguments)
            self._of[hybrid.path] = self._running.enter_context(started)
        engine, answers = self._of[hybrid.path], []
        for tokens in prompts:
            engine.reset_prefix_cache()
            answers.append(engine.generate(tokens).tokens)
        return answers


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Iterator[Plain]:
    with ExitStack() as running:
        yield Plain(engines, running)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_granite(tmp_path_factory.mktemp("granite"))


QWEN = {"dtype": "bfloat16", "max_num_batched_tokens": 4096}
HYBRIDS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], int]] = {
    "granite-4-h": (models.make_granite, {}, 0),
    "falcon-h1": (models.make_falcon, {}, 0),
    "zamba2": (models.make_zamba, {}, 0),
    "qwen3-next": (models.make_qwen3_next, QWEN, 700),
    "granite-96": (models.make_granite, {"block_size": 32, "max_num_batched_tokens": 96}, 0),
    "granite-two-ranks": (models.make_granite, {"tensor_parallel_size": 2}, 0),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "granite-4-h" else pytest.mark.slow) for name in HYBRIDS],
)
def hybrid(request: pytest.FixtureRequest, granite: Path, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    make, arguments, extra = HYBRIDS[request.param]
    path = granite if not arguments and make is models.make_granite else None
    return Hybrid(path or make(tmp_path_factory.mktemp(request.param)), MAMBA | arguments, extra)


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    return make_cache(chunk_tokens="auto").start()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [prompt(length, start=5000 * at) for at, length in enumerate(lengths)]


def warm(engine: Engine, answers: list[list[int]], prompts: list[list[int]]) -> list[Answer]:
    """Return the answers of hits that end at the last block before the last token."""
    hits = [(len(tokens) - 1) // engine.block_tokens * engine.block_tokens for tokens in prompts]
    return [Answer(answer, hit, "length") for answer, hit in zip(answers, hits, strict=True)]


def generate(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return [engine.generate(tokens) for tokens in prompts]


def store(
    engine: Engine, cache: CacheProcess, prompts: list[list[int]], answers: list[list[int]]
) -> list[Answer]:
    """Run prompts until all of their states are stored. Return the last answers.

    A state is there for one step only: if the cache process answers late, as when busy, it is not stored.
    """
    missing, deadline = prompts, time.monotonic() + TIMEOUT_SECONDS
    while True:
        found = generate(engine, prompts)
        assert [answer.tokens for answer in found] == answers
        engine.reset_prefix_cache()
        cache.wait_until_idle()
        missing = [tokens for tokens, answer in zip(prompts, found, strict=True) if answer.cached == 0]
        if not missing or time.monotonic() > deadline:
            return found


def test_warm_from_memory_and_from_disk(
    hybrid: Hybrid, cache: CacheProcess, start: StartEngine, plain: Plain
) -> None:
    """Prompts of all lengths around boundaries: a hit ends at the last state, which is at the last block."""
    prompts = hybrid.prompts(*LENGTHS)
    tokens = plain.answers(hybrid, prompts)
    with start(hybrid.path, cache, **hybrid.arguments) as engine:
        assert [answer.cached for answer in generate(engine, prompts)] == [0] * len(prompts)
        engine.reset_prefix_cache()
        assert store(engine, cache, prompts, tokens) == warm(engine, tokens, prompts)
    cache.stop()
    cache.start()
    with start(hybrid.path, cache, **hybrid.arguments) as engine:
        assert generate(engine, prompts) == warm(engine, tokens, prompts)


def test_chat_continues_at_its_last_state_and_drops_older_ones(
    granite: Path, cache: CacheProcess, start: StartEngine, plain: Plain
) -> None:
    turns = [prompt(length, start=5000 * at) for at, length in enumerate([600, 300, 300, 300])]
    conversation: list[int] = []
    said, asked = [], []
    for turn in turns:
        conversation = conversation + turn
        asked.append(conversation)
        said += plain.answers(Hybrid(granite, MAMBA), [conversation])
        conversation = conversation + said[-1]
    ends = [(len(tokens) - 1) // BLOCK * BLOCK for tokens in asked]
    hits = []
    with start(granite, cache, **MAMBA) as engine:
        for tokens, answer, end in zip(asked, said, ends, strict=True):
            found, deadline = engine.generate(tokens), time.monotonic() + TIMEOUT_SECONDS
            assert found.tokens == answer
            hits.append(found.cached)
            engine.reset_prefix_cache()
            cache.wait_until_idle()
            # Until its state is stored: see store().
            while engine.generate(tokens).cached < end and time.monotonic() < deadline:
                engine.reset_prefix_cache()
                cache.wait_until_idle()
            engine.reset_prefix_cache()
    assert hits == [0, *ends[:-1]]
    chunks = cache.status()["tiers"][0]["chunks"] - len(asked[-1] + said[-1]) // BLOCK
    assert chunks <= 6, "two states of each of the last two turns, and those of a branch"


def test_prompts_that_branch_share_the_state_before(
    granite: Path, cache: CacheProcess, start: StartEngine, plain: Plain
) -> None:
    """The first prompt does not end at the branch. The second one stores a state there, the third hits it."""
    shared = prompt(512)
    prompts = [shared + prompt(100, start=9000 * at) for at in (1, 2, 3)]
    tokens = plain.answers(Hybrid(granite, MAMBA), prompts)
    with start(granite, cache, **MAMBA) as engine:
        for answer, tokens_of in zip(tokens, prompts, strict=True):
            found = engine.generate(tokens_of)
            assert found.tokens == answer
            engine.reset_prefix_cache()
            cache.wait_until_idle()
        assert found.cached == len(shared)


def test_preempted_requests_continue(
    hybrid: Hybrid, cache: CacheProcess, start: StartEngine, plain: Plain
) -> None:
    prompts = hybrid.prompts(700, 500, 300)
    tokens = plain.answers(hybrid, prompts)
    with start(hybrid.path, cache, **hybrid.arguments) as engine:
        numbers = [engine.submit(tokens_of) for tokens_of in prompts]
        for _ in range(hybrid.preemptions):
            engine.preempt()
        assert [engine.answer(number).tokens for number in numbers] == tokens


def test_cache_process_that_is_killed_costs_a_miss(
    hybrid: Hybrid, cache: CacheProcess, start: StartEngine, plain: Plain
) -> None:
    prompts = hybrid.prompts(700, 500)
    tokens = plain.answers(hybrid, prompts)
    with start(hybrid.path, cache, **hybrid.arguments) as engine:
        generate(engine, prompts)
        cache.wait_until_idle()
        cache.kill()
        engine.reset_prefix_cache()
        assert [answer.tokens for answer in generate(engine, prompts)] == tokens
        cache.start()
        engine.reset_prefix_cache()
        assert [answer.tokens for answer in generate(engine, prompts)] == tokens


@pytest.mark.slow
def test_chunks_and_state_come_from_a_peer(
    hybrid: Hybrid, make_cache: MakeCache, start: StartEngine, plain: Plain
) -> None:
    prompts = hybrid.prompts(700, 500)
    tokens = plain.answers(hybrid, prompts)
    first, second = (make_cache(chunk_tokens="auto", peer=peer).start() for peer in peer_settings(2))
    with start(hybrid.path, first, **hybrid.arguments) as engine:
        store(engine, first, prompts, tokens)
    with start(hybrid.path, second, **hybrid.arguments) as engine:
        answers = generate(engine, prompts)
        assert answers == warm(engine, tokens, prompts)
    chunks = sum(answer.cached // engine.block_tokens for answer in answers)
    assert second.status()["counts"]["found_peers"] == chunks + len(prompts), "and a state for each prompt"


@pytest.mark.slow
def test_load_that_fails_is_computed(
    hybrid: Hybrid, make_cache: MakeCache, start: StartEngine, plain: Plain
) -> None:
    """The cache process grants chunks and state, and stops before it confirms their copies."""
    prompts = hybrid.prompts(700)
    tokens = plain.answers(hybrid, prompts)
    cache = make_cache(chunk_tokens="auto", prefetch={"policy": "timeout"}).start()
    with start(hybrid.path, cache, **hybrid.arguments) as engine:
        store(engine, cache, prompts, tokens)
        engine.hold()
        request = engine.submit(prompts[0])
        cache.wait_until(lambda status: status["engines"][0]["leases"] > 0)
        cache.pause()
        try:
            engine.resume()
            assert engine.answer(request).tokens == tokens[0]
        finally:
            cache.resume()
        assert engine.metrics()["kvtier_failed_loads_total"] == 1
        engine.reset_prefix_cache()
        store(engine, cache, prompts, tokens)
        assert generate(engine, prompts) == warm(engine, tokens, prompts)
