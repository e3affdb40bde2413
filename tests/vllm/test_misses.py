"""Why tokens of a request were not hits, as its engine's log, its metrics and ``kvtier why`` tell."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.bridge import client
from kvtier.catalog.misses import MissReason
from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess, ForkedCacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Running, StartEngine, clear

LENGTH = 1000
DISABLED = MissReason.DISABLED_BY_REQUEST
OFF = {"kvtier": {"cache": {"mode": "off"}}}
Reasons = dict[str, int]


class Watched:
    """An engine and its cache process, and what they say of each request."""

    def __init__(self, engine: Engine, cache: CacheProcess) -> None:
        self.engine, self.cache = engine, cache

    def reports(self) -> list[Any]:
        return client.why(self.cache.socket, last=10_000).requests

    def generate(self, tokens: list[int], **options: Any) -> Reasons:
        """Run a request; return its missed tokens by reason, which all three agree on."""
        known, before = len(self.reports()), self.missed()
        self.engine.generate(tokens, **options)
        wait(lambda: len(self.reports()) > known, "no report")
        report = self.reports()[0]
        reasons: Reasons = {}
        for miss in report.misses:
            reasons[miss.reason] = reasons.get(miss.reason, 0) + miss.tokens
        assert report.tokens == len(tokens)
        assert report.engine_tokens + sum(report.hits.values()) + sum(reasons.values()) == len(tokens)
        wait(lambda: self._counts_more(before, reasons), "vLLM's metrics do not agree")
        wait(lambda: bool(self._lines(report.request)), "nothing was logged")
        [line] = self._lines(report.request)
        assert all(reason in line for reason in reasons)
        return reasons

    def _lines(self, request: str) -> list[str]:
        return [line for line in self.log() if f"request {request}: " in line]

    def _counts_more(self, before: Reasons, reasons: Reasons) -> bool:
        """Whether vLLM has counted these. An idle engine reports nothing: it gets another request."""
        after = self.missed()
        counted = {name: after[name] - before.get(name, 0) for name in after}
        others = {name: count for name, count in counted.items() if count and name != DISABLED}
        if others == {name: count for name, count in reasons.items() if name != DISABLED}:
            return counted.get(DISABLED, 0) >= reasons.get(DISABLED, 0)
        self.engine.generate([1], 2, params=OFF)
        return False

    def missed(self) -> Reasons:
        """Return what vLLM's metrics count."""
        metrics = self.engine.metrics()
        found = (
            (re.fullmatch(r"kvtier_miss_tokens_total\{(\w+)\}", name), metrics[name]) for name in metrics
        )
        return {match[1]: int(count) for match, count in found if match}

    def log(self) -> list[str]:
        return re.findall(r"request \S+: \d+ of \d+ tokens hit.*", self.engine.log.read_text())

    def store(self, tokens: list[int], **options: Any) -> None:
        self.engine.generate(tokens, **options)
        self.engine.reset_prefix_cache()
        self.cache.wait_until_idle()


def wait(until: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not until():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


@pytest.fixture(scope="module")
def shared(llama: Path, engines: Engines) -> Iterator[Running]:
    """An engine and its cache process with default settings, for the tests of this module."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        cache = ForkedCacheProcess(Path(folder), partial_chunks=True).start()
        try:
            with engines.engine(llama, cache.connector) as engine:
                engine.generate(prompt(10))
                yield Running(engine, cache)
        finally:
            cache.kill()


@pytest.fixture
def watched(shared: Running) -> Watched:
    clear(shared)
    return Watched(*shared)


def test_new_and_growing_prompts(watched: Watched) -> None:
    assert watched.generate(prompt(LENGTH)) == {"never_stored": LENGTH}
    watched.engine.reset_prefix_cache()
    watched.cache.wait_until_idle()
    grown = watched.generate(prompt(LENGTH) + prompt(500, start=9000))
    assert grown["never_stored"] >= 500
    assert set(grown) <= {"never_stored", "shorter_than_a_block"}


def test_a_date_in_the_template(watched: Watched) -> None:
    """The first 300 tokens are the same, then there is a date, and then the same again."""
    template = prompt(LENGTH)
    watched.store(template)
    today = [*template[:300], 7, 7, 7, *template[303:]]
    reasons = watched.generate(today)
    block = watched.engine.block_tokens
    assert reasons["diverges"] == LENGTH - 300 // block * block
    [report] = client.why(watched.cache.socket, last=1).requests
    [miss] = [miss for miss in report.misses if miss.reason is MissReason.DIVERGES]
    assert miss.position == 300 // block * block


def test_another_salt(watched: Watched) -> None:
    watched.store(prompt(LENGTH), salt="one")
    assert watched.generate(prompt(LENGTH), salt="two") == {"other_salt": LENGTH}
    log = watched.log()[-1]
    assert "one" not in log.split("cache_salt")[0].split("missed")[1]


def test_cleared(watched: Watched) -> None:
    watched.store(prompt(LENGTH))
    clear(Running(watched.engine, watched.cache))
    reasons = watched.generate(prompt(LENGTH))
    assert reasons["cleared"] >= LENGTH // CHUNK * CHUNK


def test_the_request_disables_it(watched: Watched) -> None:
    watched.store(prompt(LENGTH))
    for mode in ("off", "write"):
        params = {"kvtier": {"cache": {"mode": mode}}}
        reasons = watched.generate(prompt(LENGTH), params=params)
        assert reasons == {"disabled_by_request": LENGTH}
        watched.engine.reset_prefix_cache()


def test_what_is_too_short_to_be_stored(running: Running) -> None:
    """With ``partial_chunks: false``, that is what is behind the last whole chunk."""
    watched = Watched(*running)
    assert watched.generate(prompt(5)) == {"shorter_than_a_block": 5}
    reasons = watched.generate(prompt(LENGTH))
    assert reasons.pop("shorter_than_a_block") == LENGTH % CHUNK
    assert set(reasons) <= {"never_stored", "cleared"}, "other tests may have stored it"


def test_evicted(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    cache = make_cache(
        tiers=[{"name": "ram", "type": "cpu", "capacity": "8MiB"}], partial_chunks=True
    ).start()
    with start(llama, cache) as engine:
        watched = Watched(engine, cache)
        watched.store(prompt(LENGTH))
        for number in range(1, 4):
            watched.store(prompt(LENGTH, start=1000 * number))
        reasons = watched.generate(prompt(LENGTH))
        assert reasons["evicted"] >= CHUNK
        assert "evicted (from ram" in watched.log()[-1]


def test_the_cache_process_is_away(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    cache = make_cache(partial_chunks=True).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.kill()
        watched = Watched(engine, cache)
        engine.generate(prompt(LENGTH, start=3000))
        wait(lambda: any("1000 not_looked_up" in line for line in watched.log()), "nothing was logged")
        assert watched.missed()["not_looked_up"] == LENGTH
        engine.kill()


def test_files_are_lost(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    cache = make_cache(partial_chunks=True).start()
    with start(llama, cache) as engine:
        Watched(engine, cache).store(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
    cache.stop()
    cache.start()
    with start(llama, cache) as engine:
        for file in cache.disk.rglob("*"):
            if file.is_file() and len(file.stem) > 32:
                file.unlink()
        reasons = Watched(engine, cache).generate(prompt(LENGTH))
        assert set(reasons) & {"lost", "load_failed"}


def test_a_model_of_other_weights(
    llama: Path, tmp_path: Path, cache: CacheProcess, start: StartEngine
) -> None:
    other = models.make_llama(tmp_path / "other", seed=9)
    with start(llama, cache) as engine, start(other, cache) as second:
        Watched(engine, cache).store(prompt(LENGTH))
        reasons = Watched(second, cache).generate(prompt(LENGTH))
        report = client.why(cache.socket, last=1).requests[0]
    assert reasons["other_model_or_layout"] == LENGTH // CHUNK * CHUNK
    assert report.misses[0].field == "model"


def test_a_prompt_given_on_the_command_line(watched: Watched, tmp_path: Path) -> None:
    watched.store(prompt(LENGTH))
    tokens = [*prompt(LENGTH)[:500], *prompt(500, start=7000)]
    [found] = client.why_prompt(watched.cache.socket, tokens)
    block = watched.engine.block_tokens
    assert sum(count for _, count in found.hits) == 500 // CHUNK * CHUNK
    assert found.misses[0].position == 500 // block * block
    assert client.why_prompt(watched.cache.socket, tokens, model="another") == []
    assert client.why_prompt(watched.cache.socket, tokens, salt="other")[0].misses[0].reason == "other_salt"
