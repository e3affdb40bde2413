"""Why tokens of a request were not hits, as its engine's log, its metrics and ``kvtier why`` tell."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from kvtier.bridge import client
from kvtier.catalog.misses import Miss, MissReason, text_of
from kvtier.cli import make_app
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess, ForkedCacheProcess
from tests.rigs.scrape import Scrape
from tests.rigs.servers.redis import RedisServer
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Running, StartEngine, clear

LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK
TAIL = {"shorter_than_a_block": LENGTH - WHOLE}
"""What is missed in any case without partial chunks."""
DISABLED = MissReason.DISABLED_BY_REQUEST
OFF = {"kvtier": {"cache": {"mode": "off"}}}
Reasons = dict[str, int]


class Watched:
    """An engine and its cache process, and what they say of each request."""

    def __init__(self, engine: Engine, cache: CacheProcess) -> None:
        self.engine, self.cache = engine, cache
        self.metrics: str | None = cache.settings.get("metrics", {}).get("listen")

    def reports(self) -> list[Any]:
        return client.why(self.cache.socket, last=10_000).requests

    def none_hit(self, reason: MissReason | str, tokens: int) -> list[Reasons]:
        """Return the misses of a prompt of which nothing is a hit for one reason.

        Once an earlier test has filled the tier, what follows its last whole block is not looked up.
        """
        rest = tokens % self.engine.block_tokens
        return [{str(reason): tokens}, {str(reason): tokens - rest, "shorter_than_a_block": rest}]

    def generate(self, tokens: list[int], **options: Any) -> Reasons:
        """Run a request; return its missed tokens by reason, which all that tell it agree on."""
        known, before, scraped = len(self.reports()), self.missed(), self.scrape()
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
        assert all(text_of(miss).partition(",")[0] in line for miss in report.misses)
        assert all(reason in self.why(report.request) for reason in reasons)
        [shown] = json.loads(self.why(report.request, "--json"))["requests"]
        assert [miss["reason"] for miss in shown["misses"]] == [miss.reason for miss in report.misses]
        if self.metrics:
            counted = {name: count - scraped.get(name, 0) for name, count in self.scrape().items()}
            assert {name: count for name, count in counted.items() if name in reasons} == reasons
        return reasons

    def why(self, *arguments: str) -> str:
        """Return what ``kvtier why`` prints."""
        command = ["why", *arguments, "--socket", str(self.cache.socket)]
        return str(CliRunner().invoke(make_app(), command, env={"COLUMNS": "300"}).output)

    def last_miss(self) -> Miss:
        """Return the first reason of the last request."""
        return self.reports()[0].misses[0]

    def scrape(self) -> Reasons:
        """Return what the metrics endpoint of the cache process counts, if there is one."""
        if self.metrics is None:
            return {}
        with urlopen(f"http://{self.metrics}/metrics") as answer:
            found = Scrape(answer.read().decode()).by("miss_tokens_total", "reason")
        return {reason: int(count) for reason, count in found.items()}

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
    assert watched.generate(prompt(LENGTH)) in watched.none_hit("never_stored", LENGTH)
    watched.engine.reset_prefix_cache()
    watched.cache.wait_until_idle()
    grown = watched.generate(prompt(LENGTH) + prompt(500, start=9000))
    assert grown["never_stored"] >= 500 - watched.engine.block_tokens
    assert set(grown) <= {"never_stored", "shorter_than_a_block"}


def test_an_end_that_a_longer_prompt_has_replaced(watched: Watched) -> None:
    watched.store(prompt(LENGTH))
    watched.store(prompt(LENGTH) + prompt(500, start=9000))
    rest = LENGTH % watched.engine.block_tokens
    assert rest
    assert watched.generate(prompt(LENGTH)) == {"shorter_than_a_block": rest}


def test_a_date_in_the_template(watched: Watched) -> None:
    """The first 300 tokens are the same, then there is a date, and then the same again."""
    template = prompt(LENGTH)
    watched.store(template)
    today = [*template[:300], 7, 7, 7, *template[303:]]
    reasons = watched.generate(today)
    block = watched.engine.block_tokens
    assert reasons["diverges"] + reasons.get("shorter_than_a_block", 0) == LENGTH - 300 // block * block
    [report] = client.why(watched.cache.socket, last=1).requests
    [miss] = [miss for miss in report.misses if miss.reason is MissReason.DIVERGES]
    assert miss.position == 300 // block * block


def test_another_salt(watched: Watched) -> None:
    watched.store(prompt(LENGTH), salt="one")
    assert watched.generate(prompt(LENGTH), salt="two") in watched.none_hit("other_salt", LENGTH)
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
        watched = Watched(engine, cache)
        # Wait for its report: a request without one when the process ends is reported like the next.
        watched.generate(prompt(LENGTH))
        cache.kill()
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
    assert sum(count for _, count in found.hits) == 500 // block * block
    assert found.misses[0].position == 500 // block * block
    assert client.why_prompt(watched.cache.socket, tokens, model="another") == []
    assert client.why_prompt(watched.cache.socket, tokens, salt="other")[0].misses[0].reason == "other_salt"


def served(**settings: Any) -> dict[str, Any]:
    """Settings with a metrics endpoint."""
    return {"metrics": {"listen": f"127.0.0.1:{free_port()}"}, **settings}


def test_weights_that_were_updated(
    llama: Path, tmp_path: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    other = models.make_llama(tmp_path / "other", seed=9)
    cache = make_cache(**served()).start()
    with start(llama, cache) as engine:
        engine.name_weights("step-1")
        watched = Watched(engine, cache)
        watched.store(prompt(LENGTH))
        engine.reset_prefix_cache(external=True)
        engine.load_weights(other)
        engine.name_weights("step-2")
        assert watched.generate(prompt(LENGTH)) == {"other_weights": WHOLE, **TAIL}


def test_another_adapter_and_one_trained_again(
    llama: Path, tmp_path: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    def lora(number: int) -> dict[str, Any]:
        path = models.make_lora(tmp_path / f"lora-{number}", seed=number)
        return {"lora_name": f"lora-{number}", "lora_int_id": number, "lora_path": str(path)}

    one, two = lora(1), lora(2)
    expected = {"other_adapter_or_image": WHOLE, **TAIL}
    cache = make_cache(**served()).start()
    with start(llama, cache, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        for each in (one, two):
            engine.load_adapter(each)
        watched = Watched(engine, cache)
        watched.store(prompt(LENGTH), lora=one)
        assert watched.generate(prompt(LENGTH), lora=two) == expected
        assert watched.last_miss().field == "adapter"
        engine.reset_prefix_cache()
        time.sleep(0.2)  # Beyond adapters.FRESH_SECONDS, in which they are taken to be as they were.
        models.make_lora(tmp_path / "lora-1", seed=3)
        engine.load_adapter({**one, "load_inplace": True})
        assert watched.generate(prompt(LENGTH), lora=one) == expected
        engine.reset_prefix_cache()
        assert watched.generate(prompt(LENGTH), lora=one, salt="tenant")["other_salt"] == WHOLE


def test_engines_with_other_blocks_and_types(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    cache = make_cache(**served()).start()
    with start(llama, cache) as engine:
        Watched(engine, cache).store(prompt(LENGTH))
    for differs, arguments in (("--block-size", {"block_size": 64}), ("dtype", {"dtype": "bfloat16"})):
        with start(llama, cache, **arguments) as engine:
            watched = Watched(engine, cache)
            assert watched.generate(prompt(LENGTH)) == {"other_model_or_layout": WHOLE, **TAIL}
            assert differs in watched.last_miss().field


def test_a_tier_that_answers_too_late(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine
) -> None:
    waits = {"policy": "timeout", "deadline": "200ms"}
    cache = fill_disk(make_cache(prefetch=waits, **served()), prompt(LENGTH)).start(fault=["hold-get"])
    with start(llama, cache) as engine:
        watched = Watched(engine, cache)
        assert watched.generate(prompt(LENGTH)) == {"too_late": WHOLE, **TAIL}
        assert watched.last_miss().tier == "ssd"
        assert watched.last_miss().seconds > 0
        cache.release_disk()


def test_a_tier_that_is_slower_than_the_engine(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine
) -> None:
    """Its speed is known from three prompts, that of the engine from others."""
    prompts = [prompt(LENGTH, start=1200 * number) for number in range(4)]
    cache = make_cache(prefetch={"policy": "timeout", "deadline": "10m"}, **served())
    fill_disk(cache, *prompts).start(fault=["slow-get"] * 9)
    with start(llama, cache) as engine:
        for tokens in prompts[:3]:
            assert engine.generate(tokens).cached == WHOLE
        for number in range(4):
            engine.generate(prompt(LENGTH, start=20_000 + 1200 * number))
        watched = Watched(engine, cache)
        assert watched.generate(prompts[3]) == {"recompute_was_faster": WHOLE, **TAIL}
        assert watched.last_miss().tier == "ssd"


def test_a_tier_that_cannot_be_read(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine
) -> None:
    """Also while its circuit breaker is open."""
    prompts = [prompt(LENGTH, start=1200 * number) for number in range(8)]
    cache = fill_disk(make_cache(**served()), *prompts).start(fault=["fail-get"])
    with start(llama, cache) as engine:
        watched, reasons = Watched(engine, cache), list[Reasons]()
        for tokens in prompts:
            reasons.append(watched.generate(tokens))
            assert watched.last_miss().tier == "ssd"
    assert reasons[0] == {"load_failed": WHOLE, **TAIL}
    assert {"tier_unavailable": WHOLE, **TAIL} in reasons


def test_a_tier_that_cannot_be_written(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    """What is evicted from memory would be in the lower tier otherwise."""
    cache = make_cache(ram={"capacity": 8 * MIB}, **served()).start(fault=["fail-put"])
    with start(llama, cache) as engine:
        watched = Watched(engine, cache)
        for number in range(6):  # The last ones while its circuit breaker is open.
            watched.store(prompt(LENGTH, start=1200 * number))
        for number in range(3):
            reasons = watched.generate(prompt(LENGTH, start=1200 * number))
            assert reasons["store_failed"] >= CHUNK
            assert reasons.keys() == {"store_failed", *TAIL}
            assert watched.last_miss().tier == "ssd"


def test_a_prompt_that_is_longer_than_memory(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine
) -> None:
    small = {"capacity": 2 * MIB}  # Three chunks.
    cache = make_cache(ram=small, **served()).start()
    with start(llama, cache) as engine:
        watched = Watched(engine, cache)
        watched.store(prompt(LENGTH))
        assert "store_failed" in watched.generate(prompt(LENGTH))
    cache = fill_disk(make_cache(ram=small, **served()), prompt(LENGTH)).start()
    with start(llama, cache) as engine:
        assert "no_room" in Watched(engine, cache).generate(prompt(LENGTH))


def test_declined_by_the_policy(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    memory = {"eviction": "resume", "high_watermark": 1.0, "low_watermark": 1.0}
    tiers = [{"name": "ram", "type": "cpu", "capacity": 8 * MIB, **memory}]
    cache = make_cache(tiers=tiers, **served()).start()
    worthy, worthless = ({"kvtier": {"cache": {"priority": priority}}} for priority in (100, -100))
    with start(llama, cache) as engine:
        watched = Watched(engine, cache)
        for number in range(3):
            watched.store(prompt(LENGTH, start=1200 * number), params=worthy)
        watched.store(prompt(LENGTH, start=9000), params=worthless)
        reasons = watched.generate(prompt(LENGTH, start=9000), params=worthless)
        assert reasons == {"declined": WHOLE, **TAIL}


@pytest.mark.slow
def test_expired_in_a_pool_that_is_away_then(
    llama: Path, tmp_path: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    if reason := RedisServer.missing():
        pytest.skip(reason)
    with RedisServer(tmp_path) as server:
        pool = {**server.tier(), "ttl": "20s", "queue": 64 * MIB}
        cache = make_cache(ram={"capacity": 8 * MIB}, pool=pool, **served()).start()
        with start(llama, cache) as engine:
            watched = Watched(engine, cache)
            for number in range(3):  # The first one is evicted from memory.
                watched.store(prompt(LENGTH, start=1200 * number))
            cache.wait_until(lambda status: not status["tiers"][1]["chunks"])
            assert watched.generate(prompt(LENGTH)).keys() == {"expired", *TAIL}
            assert watched.last_miss().tier == "pool"
            server.kill()
            reasons = watched.generate(prompt(LENGTH, start=9000))
            assert reasons == {"tier_unavailable": WHOLE, **TAIL}, "another host may have stored it"
            assert watched.last_miss().tier == "pool"
