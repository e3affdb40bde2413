"""Models, engines, cache processes, and the oracle: the same vLLM without kvtier."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.bridge import client
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import (
    CHUNK,
    TIMEOUT_SECONDS,
    CacheProcess,
    ForkedCacheProcess,
    StartedCacheProcess,
)
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines

StartEngine = Callable[..., AbstractContextManager[Engine]]
Oracle = Callable[..., list[int]]
MakeCache = Callable[..., CacheProcess]
FillDisk = Callable[..., CacheProcess]


SECRET = "0123456789abcdef" * 4
"""Of peers. As long as 32 random bytes, so that no instance warns."""


class Running(NamedTuple):
    """An engine of the small Llama and the cache process that it has started, both with default settings."""

    engine: Engine
    cache: CacheProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make install"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama: full attention, one KV-cache group."""
    return models.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 3: alternating sliding and full attention, several KV-cache groups."""
    return models.make_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    """Make cache processes, not yet started. They are killed and removed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> CacheProcess:
            # A short path: the path of a Unix socket is limited to 107 bytes.
            folder = Path(tempfile.mkdtemp(prefix="kvt-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            cache = ForkedCacheProcess(folder, **settings)
            stack.callback(cache.kill)
            return cache

        yield make


def peer_settings(count: int, **more: Any) -> list[dict[str, Any]]:
    """Return the setting ``peer`` of each of some cache processes that are peers of each other."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    shared: dict[str, Any] = {
        "secret": SECRET,
        "transport": {"type": "tcp", "deadline": TIMEOUT_SECONDS},
        "timeout": "2s",  # Enough on a busy machine.
        "share": 0.9,  # Memory is small, and two prompts are loaded at once.
        **more,
    }
    return [
        {"listen": own, "others": [other for other in addresses if other != own], **shared}
        for own in addresses
    ]


def check_answers(
    engine: Engine, oracle: Oracle, model: Path, prompts: Sequence[list[int]], cached: int | None = None
) -> None:
    """Check the tokens of every prompt, and with ``cached`` how many of them come from kvtier."""
    for tokens in prompts:
        answer = engine.generate(tokens)
        assert answer.tokens == oracle(model, tokens)
        assert cached is None or answer.cached == cached
    engine.reset_prefix_cache()


def check_recomputed(engine: Engine, cache: CacheProcess, tokens: list[int], expected: list[int]) -> None:
    """Check that a prompt of which a chunk is unusable is computed, and hit as a whole after that."""
    whole = len(tokens) // CHUNK * CHUNK
    answer = engine.generate(tokens)
    assert answer.tokens == expected
    assert answer.cached < whole
    engine.reset_prefix_cache()
    cache.wait_until_stored(whole)
    answer = engine.generate(tokens)
    assert (answer.tokens, answer.cached) == (expected, whole)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    """A running controller."""
    controller = ControllerProcess(tmp_path)
    controller.start()
    yield controller
    controller.close()


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    """A running cache process with 64 MiB of memory and 256 MiB of disk."""
    return make_cache().start()


@pytest.fixture
def start(engines: Engines) -> StartEngine:
    """``with start(model, cache, **LLM's arguments) as engine``: a real vLLM with the connector.

    At the end of the block no lease, reservation, ticket or block may be left.
    """

    @contextlib.contextmanager
    def start(model: Path, cache: CacheProcess, **arguments: Any) -> Iterator[Engine]:
        with engines.engine(model, cache.connector, **arguments) as engine:
            yield engine
            if engine.process.is_alive():
                cache.wait_until_idle()
                engine.wait_until_free()

    return start


@pytest.fixture(scope="session")
def started(llama: Path, engines: Engines) -> Iterator[Callable[[], Running]]:
    """Return what :func:`running` shares, started again if a test has killed any of it."""
    with contextlib.ExitStack() as stack:
        held: list[Running] = []

        def get() -> Running:
            if not held or not held[0].engine.process.is_alive() or held[0].cache.pid is None:
                stack.close()
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
                cache = StartedCacheProcess(folder)
                stack.callback(cache.kill)
                held[:] = [Running(stack.enter_context(engines.engine(llama, cache.connector)), cache)]
            return held[0]

        yield get


@pytest.fixture
def running(started: Callable[[], Running]) -> Iterator[Running]:
    """An engine and its cache process that hold nothing, for tests that need no others.

    They run for the whole session, so no test may change the engine's weights. At the end of a test nothing
    may be left, as with :func:`start`.
    """
    engine, cache = shared = started()
    clear(shared)
    yield shared
    try:
        cache.wait_until_idle()
        engine.wait_until_free()
    except BaseException:
        engine.kill()  # The next test gets others.
        raise


def clear(running: Running) -> None:
    """Remove every block and chunk, from the disk as well.

    Not by an external reset, after which an engine shares its chunks with no other.
    """
    running.engine.reset_prefix_cache()
    weights_id = running.cache.status()["engines"][0]["weights_id"]
    client.clear_weights(running.cache.socket, weights_id)
    running.cache.wait_until(lambda status: not any(tier["chunks"] for tier in status["tiers"]))
    running.cache.wait_until_idle()


@pytest.fixture
def fill_disk(started: Callable[[], Running]) -> FillDisk:
    """``fill_disk(cache, *prompts)``: give a cache process that is not started a disk with these; return it.

    Without an engine and a cache process for it, which take longer than most tests.
    """

    def fill(cache: CacheProcess, *prompts: Sequence[int], new: int = 16) -> CacheProcess:
        engine, filled = shared = started()
        clear(shared)
        for tokens in prompts:
            engine.generate(tokens, new)
        filled.wait_until_stored(sum(len(tokens) // CHUNK * CHUNK for tokens in prompts))
        shutil.copytree(filled.disk, cache.disk)
        return cache

    return fill


@pytest.fixture(scope="session")
def oracle(engines: Engines) -> Iterator[Oracle]:
    """``oracle(model, prompt, new)``: the tokens that vLLM generates without kvtier or any cache."""
    answers: dict[tuple[Any, ...], list[int]] = {}
    running: dict[tuple[Path, bool], Engine] = {}
    with contextlib.ExitStack() as stack:

        def generate(
            model: Path, prompt: Sequence[int], new: int = 16, *, lora: dict[str, Any] | None = None
        ) -> list[int]:
            key = (model, tuple(prompt), new, lora and lora["lora_path"])
            if key not in answers:
                answers[key] = engine(model, lora is not None).generate(prompt, new, lora=lora).tokens
            return answers[key]

        def engine(model: Path, adapters: bool) -> Engine:
            if (model, adapters) not in running:
                arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if adapters else {}
                started = engines.engine(model, None, enable_prefix_caching=False, **arguments)
                running[model, adapters] = stack.enter_context(started)
            return running[model, adapters]

        yield generate
