"""Real engines on real shared pools: warm from another's work, and right whatever becomes of the server."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.keys import ChunkKey
from kvtier.testing.servers import SERVERS
from kvtier.testing.servers.base import Server
from tests.vllm.cache_process import CHUNK, MIB, PATIENCE_SECONDS, CacheProcess
from tests.vllm.conftest import MakeCache, Oracle, StartEngine
from tests.vllm.engine import Engine, Engines
from tests.vllm.models import prompt

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(4)]
DEADLINE_SECONDS = 1.0
OUTAGES = {("redis", True)}
"""Which servers are killed, or only paused, by default."""
MOST_WARNINGS = 8
"""Of one outage: the breaker's, the backend's own and the cache process's, with room for one retry each."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server of each kind of pool."""
    kind = SERVERS[request.param]
    if reason := kind.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-"))
        yield stack.enter_context(kind(Path(folder)))


few_pools = pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=() if name == "redis" else pytest.mark.slow) for name in SERVERS],
    indirect=True,
)
"""What the client makes of it is tried with each in ``tests/backends``."""


def pool(server: Server, deadline: float = PATIENCE_SECONDS) -> dict[str, Any]:
    return {**server.tier(), "deadline": deadline, "queue": 64 * MIB}


def check(engine: Engine, oracle: Oracle, llama: Path, cached: int | None = None) -> None:
    """Every prompt gives the right tokens; so many of them come from kvtier where it is told."""
    for tokens in PROMPTS:
        answer = engine.generate(tokens)
        assert answer.tokens == oracle(llama, tokens)
        assert cached is None or answer.cached == cached
    engine.reset_prefix_cache()


def wait_until_whole(cache: CacheProcess, chunks: int) -> None:
    """The pool answers again, and holds that much as far as is known."""
    cache.wait_until(lambda status: status["tiers"][1]["available"])
    cache.wait_until(lambda status: status["tiers"][1]["chunks"] >= chunks)
    cache.wait_until_idle()


def store_whole(engine: Engine, cache: CacheProcess) -> list[int]:
    """The first prompt of which the pool takes every chunk: an outage may have left memory full."""
    number, deadline = 10, time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        tokens = prompt(LENGTH, start=1200 * number)
        before = Counter(cache.status()["counts"])
        engine.generate(tokens)
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] > 0)
        cache.wait_until_idle()
        gained = Counter(cache.status()["counts"])
        gained.subtract(before)
        # What was demoted meanwhile is of other prompts.
        if gained["stored"] == gained["put_ok"] - gained["demoted"] == WHOLE_CHUNKS // CHUNK:
            return tokens
        number += 1
        time.sleep(0.2)
    raise AssertionError(f"the pool takes nothing: {cache.status()}\n{cache.tail()}")


@few_pools
def test_what_one_engine_stored_another_hits(
    llama: Path, server: Server, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    first, second = make_cache(pool=pool(server)), make_cache(pool=pool(server))
    first.start()
    second.start()
    with start(llama, first) as engine:
        check(engine, oracle, llama, cached=0)
        first.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
    with start(llama, second) as engine:
        check(engine, oracle, llama, cached=WHOLE_CHUNKS)
    assert second.status()["counts"]["found_pool"] == len(PROMPTS) * WHOLE_CHUNKS // CHUNK
    first.stop()
    first.start()
    with start(llama, first) as engine:
        check(engine, oracle, llama, cached=WHOLE_CHUNKS)


@pytest.fixture(scope="module")
def keys(llama: Path, engines: Engines) -> Iterator[list[ChunkKey]]:
    """Of the chunks of one prompt, told by a disk's file names: the same on every tier, in every process."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        cache = CacheProcess(Path(folder))
        cache.start()
        try:
            with engines.engine(llama, cache.connector) as engine:
                engine.generate(prompt(LENGTH))
                cache.wait_until_stored(WHOLE_CHUNKS)
        finally:
            cache.kill()
        files = sorted(cache.disk.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns)
        yield [ChunkKey(bytes.fromhex(file.stem)) for file in files]


@few_pools
def test_a_damaged_value_is_recomputed(
    llama: Path,
    server: Server,
    keys: list[ChunkKey],
    make_cache: MakeCache,
    start: StartEngine,
    oracle: Oracle,
) -> None:
    cache = make_cache(pool=pool(server))
    cache.start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(WHOLE_CHUNKS)
    cache.stop()
    if not server.corrupt(keys[len(keys) // 2]):
        pytest.skip("a value on this server cannot be damaged from outside")
    cache.start()
    with start(llama, cache) as engine:
        recomputed = engine.generate(prompt(LENGTH))
        engine.reset_prefix_cache()
        cache.wait_until_stored(WHOLE_CHUNKS)
        again = engine.generate(prompt(LENGTH))
    assert recomputed.tokens == again.tokens == oracle(llama, prompt(LENGTH))
    assert recomputed.cached < WHOLE_CHUNKS
    assert again.cached == WHOLE_CHUNKS


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
def test_an_outage_costs_misses(
    llama: Path, server: Server, make_cache: MakeCache, start: StartEngine, oracle: Oracle, killed: bool
) -> None:
    """Amid loads and amid stores, for longer than the deadline; a server that was killed comes back empty."""
    # Room for two of four prompts.
    cache = make_cache(ram={"capacity": 8 * MIB}, pool=pool(server, DEADLINE_SECONDS))
    cache.start()
    with start(llama, cache) as engine:
        for number, tokens in enumerate(PROMPTS, 1):
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
            # One by one: where the pool is slower than the engine, memory has no room for the next.
            wait_until_whole(cache, number * WHOLE_CHUNKS // CHUNK)
        engine.reset_prefix_cache()
        server.pause()
        unknown = prompt(LENGTH, start=9000)
        requests = [engine.submit(tokens) for tokens in (*PROMPTS, unknown)]
        cache.wait_until(lambda status: status["flights"] > 0)
        if killed:
            server.kill()
        expected = [oracle(llama, tokens) for tokens in (*PROMPTS, unknown)]
        assert [engine.answer(request).tokens for request in requests] == expected
        time.sleep(DEADLINE_SECONDS)  # Amid stores.
        engine.reset_prefix_cache()
        check(engine, oracle, llama)
        if killed:
            server.start()
        else:
            server.resume()
        # A breaker closes when somebody asks for something.
        for number in range(100):
            if cache.status()["tiers"][1]["available"] and number:
                break
            engine.generate(prompt(300, start=7000 + number))
            time.sleep(0.2)
        engine.reset_prefix_cache()
        tokens = store_whole(engine, cache)
        assert engine.generate(tokens).tokens == oracle(llama, tokens)
    cache.stop()
    assert cache.log.read_text().count("WARNING") <= MOST_WARNINGS, cache.tail()
    cache.start()
    with start(llama, cache) as engine:
        answer = engine.generate(tokens)
        assert (answer.tokens, answer.cached) == (oracle(llama, tokens), WHOLE_CHUNKS)
