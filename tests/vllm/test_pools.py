"""Real engines on real shared pools: they share chunks, and answer correctly through outages."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.memory.keys import ChunkKey
from kvtier.testing.servers import Server
from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess, ForkedCacheProcess
from tests.rigs.servers import SERVERS
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine, check_answers, check_recomputed

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(4)]
DEADLINE_SECONDS = 1.0
OUTAGES = {("redis", True)}
"""The outages that run by default: the server, and whether it is killed or only paused."""
MAX_WARNINGS = 9
"""Per outage: from the breaker, the backend and the cache process, with room for one retry each; one that the
memory is small for the longest prompt."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server of the requested kind of pool."""
    kind = SERVERS[request.param]
    if reason := kind.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-"))
        yield stack.enter_context(kind(Path(folder)))


redis_by_default = pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=() if name == "redis" else pytest.mark.slow) for name in SERVERS],
    indirect=True,
)
"""Only Redis by default: ``tests/backends`` tests the client of each kind of pool."""


def pool(server: Server, deadline: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    return {**server.tier(), "deadline": deadline, "queue": 64 * MIB}


def wait_until_recovered(cache: CacheProcess, chunks: int) -> None:
    """Wait until the pool answers again, and the index lists at least ``chunks`` chunks in it."""
    cache.wait_until(lambda status: status["tiers"][1]["available"])
    cache.wait_until(lambda status: status["tiers"][1]["chunks"] >= chunks)
    cache.wait_until_idle()


def store_until_complete(engine: Engine, cache: CacheProcess) -> list[int]:
    """Return the first prompt whose chunks the pool stores completely: memory may be full after an outage."""
    number, deadline = 10, time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        tokens = prompt(LENGTH, start=1200 * number)
        before = Counter(cache.status()["counts"])
        engine.generate(tokens)
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] > 0)
        cache.wait_until_idle()
        gained = Counter(cache.status()["counts"])
        gained.subtract(before)
        # Chunks demoted meanwhile belong to other prompts.
        if gained["stored"] == gained["put_ok"] - gained["demoted"] == WHOLE_CHUNKS // CHUNK:
            return tokens
        number += 1
        time.sleep(0.2)
    raise AssertionError(f"the pool stores nothing: {cache.status()}\n{cache.tail()}")


@redis_by_default
def test_engine_hits_what_another_stored(
    llama: Path, server: Server, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    first, second = (make_cache(pool=pool(server)).start() for _ in range(2))
    with start(llama, first) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
        first.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
    with start(llama, second) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    assert second.status()["counts"]["found_pool"] == len(PROMPTS) * WHOLE_CHUNKS // CHUNK
    first.stop()
    first.start()
    with start(llama, first) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)


@pytest.fixture(scope="module")
def keys(llama: Path, engines: Engines) -> Iterator[list[ChunkKey]]:
    """Keys of one prompt's chunks, from a disk's file names: equal in every tier and process."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        cache = ForkedCacheProcess(Path(folder))
        cache.start()
        try:
            with engines.engine(llama, cache.connector) as engine:
                engine.generate(prompt(LENGTH))
                cache.wait_until_stored(WHOLE_CHUNKS)
        finally:
            cache.kill()
        files = sorted(cache.disk.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns)
        yield [ChunkKey(bytes.fromhex(file.stem)) for file in files]


@redis_by_default
def test_damaged_value_is_recomputed(
    llama: Path,
    server: Server,
    keys: list[ChunkKey],
    make_cache: MakeCache,
    start: StartEngine,
    oracle: Oracle,
) -> None:
    cache = make_cache(pool=pool(server)).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(WHOLE_CHUNKS)
    cache.stop()
    if not server.corrupt(keys[len(keys) // 2]):
        pytest.skip("a value on this server cannot be damaged from outside")
    cache.start()
    with start(llama, cache) as engine:
        check_recomputed(engine, cache, prompt(LENGTH), oracle(llama, prompt(LENGTH)))


@pytest.mark.parametrize(
    ("server", "killed"),
    [
        pytest.param(
            name,
            killed,
            id=f"{name}-{'killed' if killed else 'paused'}",
            marks=() if (name, killed) in OUTAGES else pytest.mark.slow,
        )
        for name in SERVERS
        for killed in (False, True)
    ],
    indirect=["server"],
)
def test_outage_costs_misses(
    llama: Path, server: Server, make_cache: MakeCache, start: StartEngine, oracle: Oracle, killed: bool
) -> None:
    """During loads and stores, for longer than the deadline. A killed server comes back empty."""
    # Room for two of four prompts.
    cache = make_cache(ram={"capacity": 8 * MIB}, pool=pool(server, DEADLINE_SECONDS)).start()
    with start(llama, cache) as engine:
        for number, tokens in enumerate(PROMPTS, 1):
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
            # One at a time: if the pool is slower than the engine, memory has no room for the next prompt.
            wait_until_recovered(cache, number * WHOLE_CHUNKS // CHUNK)
        engine.reset_prefix_cache()
        server.pause()
        unknown = prompt(LENGTH, start=9000)
        requests = [engine.submit(tokens) for tokens in (*PROMPTS, unknown)]
        cache.wait_until(lambda status: status["flights"] > 0)
        if killed:
            server.kill()
        expected = [oracle(llama, tokens) for tokens in (*PROMPTS, unknown)]
        assert [engine.answer(request).tokens for request in requests] == expected
        time.sleep(DEADLINE_SECONDS)  # The outage lasts into stores.
        engine.reset_prefix_cache()
        check_answers(engine, oracle, llama, PROMPTS)
        if killed:
            server.start()
        else:
            server.resume()
        # A circuit breaker closes only on a request.
        for number in range(100):
            if cache.status()["tiers"][1]["available"] and number:
                break
            engine.generate(prompt(300, start=7000 + number))
            time.sleep(0.2)
        engine.reset_prefix_cache()
        tokens = store_until_complete(engine, cache)
        assert engine.generate(tokens).tokens == oracle(llama, tokens)
    cache.stop()
    assert cache.log.read_text().count("WARNING") <= MAX_WARNINGS, cache.tail()
    cache.start()
    with start(llama, cache) as engine:
        answer = engine.generate(tokens)
        assert (answer.tokens, answer.cached) == (oracle(llama, tokens), WHOLE_CHUNKS)
