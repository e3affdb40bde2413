"""Every parallel shape that vLLM has: what is loaded is what was computed, on every rank."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import MIB, START_SECONDS, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.forks import forks_with_vllm
from tests.rigs.vllm import models
from tests.vllm.conftest import MakeCache
from tests.vllm.shapes import BLOCK, Shape, serve

CHUNK = 128
SECRET = "sixteen or more characters"
PROMPTS = [models.prompt(length, start=1000 * at) for at, length in enumerate([1000, 640, 300, 129])]


class Engine:
    """An engine of :mod:`tests.vllm.shapes`."""

    def __init__(self, log: Path, model: Path, shape: Shape, settings: list[dict[str, Any]]) -> None:
        self.log = log
        self._connection, there = forks_with_vllm().Pipe()
        self.process = forks_with_vllm().Process(
            target=serve, args=(there, str(log), str(model), shape, settings)
        )
        self.process.start()
        there.close()
        assert self._answer() == "open"

    def generate(self, prompts: list[list[int]], new: int = 4) -> list[int]:
        """Run prompts; return their hits. No token that a rank holds may be wrong."""
        self._connection.send({"call": "generate", "prompts": prompts, "new": new})
        answer = self._answer()
        assert answer["wrong"] == 0
        hits: list[int] = answer["hits"]
        return hits

    def reset(self) -> None:
        self._connection.send({"call": "reset"})
        assert self._answer()

    def _answer(self) -> Any:
        try:
            assert self._connection.poll(START_SECONDS), "the engine does not answer"
            return self._connection.recv()
        except EOFError:
            raise AssertionError(self.log.read_text()[-6000:]) from None

    def close(self) -> None:
        self._connection.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(shape, *caches)``: start an engine, on the hosts of one or more cache processes."""
    engines: list[Engine] = []
    model = models.make_llama(tmp_path / "model")

    def start(shape: Shape, *caches: CacheProcess) -> Engine:
        log = tmp_path / f"shape-{len(engines)}.log"
        settings = [cache.connector for cache in caches]
        engines.append(Engine(log, model, shape._replace(hosts=len(caches)), settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def whole(tokens: list[int]) -> int:
    """The hit of a stored prompt: whole chunks, of which vLLM computes the last token again."""
    return min(len(tokens) // CHUNK * CHUNK, len(tokens) - 1)


WARM = [whole(tokens) for tokens in PROMPTS]
NOTHING = [0] * len(PROMPTS)
ONE_HOST = {
    "two-stages": Shape(pp=2),
    "stages-and-ranks": Shape(pp=2, tp=2, windows=True, layers=6),
    "three-stages": Shape(pp=3, layers=5),
    "latents": Shape(tp=4, mla=True),
    "divided-latents": Shape(tp=4, dcp=4, interleave=4, mla=True),
    "divided-heads": Shape(tp=4, dcp=2, kv_heads=2),
    "divided-and-common-heads": Shape(tp=4, dcp=2, interleave=16, kv_heads=1),
    "copies-for-prefill": Shape(tp=2, pcp=2, mla=True),
    "divided-for-prefill": Shape(tp=2, pcp=2, dcp=2, mla=True),
    "divided-twice": Shape(tp=2, pcp=2, dcp=4, interleave=2, mla=True, pp=2),
}


def until_stored(engine: Engine, caches: list[CacheProcess]) -> None:
    """Run all prompts until all of their chunks are hit.

    If the cache process answers late, as when busy, blocks that have left a window meanwhile are not stored.
    """
    deadline, hits = time.monotonic() + TIMEOUT_SECONDS, NOTHING
    while hits != WARM:
        assert time.monotonic() < deadline, hits
        for cache in caches:
            cache.wait_until_idle()
        engine.reset()
        hits = engine.generate(PROMPTS)
    for cache in caches:
        cache.wait_until_idle()


FAST = ("stages-and-ranks", "divided-and-common-heads", "half-a-stage-each")


def cases(shapes: dict[str, Shape]) -> list[Any]:
    marks: dict[bool, Any] = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(shape, id=name, marks=marks[name in FAST]) for name, shape in shapes.items()]


def declares_divided_blocks() -> bool:
    """Whether this vLLM says how ranks divide the tokens of a block. Asked without importing it here."""
    code = "from vllm.v1.kv_cache_interface import AttentionSpec as spec; print(hasattr(spec, 'dcp_sharded'))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.split()[-1] == "True"


@pytest.mark.parametrize("shape", cases(ONE_HOST))
def test_shape_on_one_host(shape: Shape, make_cache: MakeCache, start: Start) -> None:
    cache = make_cache().start()
    if shape.dcp > 1 and not declares_divided_blocks():
        with pytest.raises(AssertionError, match=r"install vLLM 0\.31 or newer"):
            start(shape, cache)
        return
    engine = start(shape, cache)
    assert engine.generate(PROMPTS) == NOTHING
    until_stored(engine, [cache])
    engine.close()
    cache.stop()
    cache.start()
    engine = start(shape, cache)
    assert engine.generate(PROMPTS) == WARM


def test_ends_of_prompts_of_every_length_with_windows(make_cache: MakeCache, start: Start) -> None:
    """Which blocks of a window a chunk has depends on its exact length."""
    cache = make_cache(partial_chunks=True).start()
    engine = start(Shape(windows=True, layers=2), cache)
    worse = dict.fromkeys(range(CHUNK // 2, CHUNK + 40), 0)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for attempt in itertools.count():
        # Other prompts each time: a longer chunk replaces those that it begins with, but not in a window.
        starts = {length: [attempt, *models.prompt(length - 1, start=400 * length)] for length in worse}
        engine.generate(list(starts.values()), 1)
        cache.wait_until_idle()
        engine.reset()
        hits = engine.generate([tokens + [attempt] * 50 for tokens in starts.values()], 1)
        engine.reset()
        worse = {
            length: hit for length, hit in zip(worse, hits, strict=True) if hit < length // BLOCK * BLOCK
        }
        if not worse:
            break
        assert time.monotonic() < deadline, worse


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "full attention"])
def test_whole_prompts_of_every_length(make_cache: MakeCache, start: Start, windows: bool) -> None:
    """vLLM computes the last token again, and must then have all blocks in its window."""
    # Room for all of them: once chunks are evicted, only whole blocks are stored.
    cache = make_cache(partial_chunks=True, ram={"capacity": 512 * MIB}).start()
    engine = start(Shape(windows=windows, layers=2), cache)
    left = [1, 2, 16, 17, *range(CHUNK // 2, CHUNK + 40)]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for attempt in itertools.count():
        prompts = [[attempt, *models.prompt(length - 1, start=400 * length)] for length in left]
        engine.generate(prompts, 1)
        cache.wait_until_idle()
        engine.reset()
        hits = engine.generate(prompts, 1)
        engine.reset()
        left = [length for length, hit in zip(left, hits, strict=True) if hit < length - 1]
        if not left:
            break
        assert time.monotonic() < deadline, left


@pytest.fixture
def make_hosts(make_cache: MakeCache) -> Callable[[int], list[CacheProcess]]:
    """``make_hosts(count)``: a running cache process for each host of an engine."""

    def make(count: int) -> list[CacheProcess]:
        peer = {"secret": SECRET, "transport": {"type": "tcp"}}
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        return [make_cache(peer={"listen": address, **peer}).start() for address in addresses]

    return make


SEVERAL_HOSTS = {
    "a-stage-each": Shape(pp=2),
    "half-the-heads-each": Shape(tp=2, kv_heads=2),
    "latents-on-each": Shape(tp=4, mla=True),
    "half-a-stage-each": Shape(tp=2, pp=2),
}


@pytest.mark.parametrize("shape", cases(SEVERAL_HOSTS))
def test_shape_on_several_hosts(
    shape: Shape, make_hosts: Callable[[int], list[CacheProcess]], start: Start
) -> None:
    caches = make_hosts(4 if shape == SEVERAL_HOSTS["half-a-stage-each"] else 2)
    engine = start(shape, *caches)
    assert engine.generate(PROMPTS) == NOTHING
    until_stored(engine, caches)


def test_host_that_lost_its_chunks(make_hosts: Callable[[int], list[CacheProcess]], start: Start) -> None:
    """The prefix that both hosts have is loaded; what one has lost is stored again there."""
    here, there = make_hosts(2)
    engine = start(Shape(pp=2), here, there)
    [tokens] = prompts = [PROMPTS[0]]
    assert engine.generate(prompts) == [0]
    here.wait_until_idle()
    there.kill()
    shutil.rmtree(there.disk)
    engine.reset()
    assert engine.generate(prompts) == [0], "computed without it"
    there.start()
    until_connected(engine, there)
    assert engine.generate([tokens[:300]]) == [0]
    there.wait_until_idle()
    engine.reset()
    assert engine.generate(prompts) == [256]
    there.wait_until_idle()
    engine.reset()
    assert engine.generate(prompts) == [whole(tokens)]


def until_connected(engine: Engine, cache: CacheProcess) -> None:
    """Run other prompts until all processes of an engine use a restarted cache process."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for number in itertools.count():
        tokens = models.prompt(200, start=20_000 + 300 * number)
        engine.generate([tokens])
        cache.wait_until_idle()
        engine.reset()
        if engine.generate([tokens]) == [CHUNK]:
            engine.reset()
            return
        assert time.monotonic() < deadline
