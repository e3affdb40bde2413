"""The canary through a real server: it names the stage at which what was stored is lost."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from kvtier.cli.checks import Check
from kvtier.cli.checks_running import check_engines
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import start_vllm
from kvtier.observability.canary import Canary, Result
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import models
from tests.vllm.conftest import MakeCache, peer_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY_SECONDS = 300.0
KEY = "a-key"
NOT_CONNECTED = "the engine is not connected to its cache process"


def run_canary(url: str, key: str | None = None, seconds: float = TIMEOUT_SECONDS) -> Result:
    """Run the canary once."""

    async def run() -> Result:
        async with Canary(url, key, seconds) as canary:
            return await canary.run()

    return anyio.run(run)


def check(url: str) -> Check:
    """Have ``kvtier doctor`` check one engine."""
    [found] = check_engines([url])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer: the canary's prompt is text."""
    return models.add_tokenizer(models.make_llama(tmp_path_factory.mktemp("canary") / "model"))


@contextmanager
def serving(model: Path, log: Path, config: Path | None, *arguments: str) -> Iterator[str]:
    """Run a server and yield its URL, with kvtier if there is a ``config``."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvt-") as scratch:
        server = start_vllm(
            str(model),
            port=port,
            config=config,
            log=log,
            max_tokens=2048,
            arguments=["--dtype", "float32", "--kv-cache-memory-bytes", "64M", *arguments],
            connector=config is not None,
            scratch=Path(scratch),
            variables=VLLM_ENVIRONMENT,
        )
        try:
            with Client(port, str(model)) as client:
                server.wait_until(client.healthy, READY_SECONDS)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def connected(url: str) -> Result:
    """Run the canary until the server has found its restarted cache process, and return the result."""
    until = time.monotonic() + 2 * TIMEOUT_SECONDS
    while (result := run_canary(url)).reason == NOT_CONNECTED:
        assert time.monotonic() < until
        time.sleep(0.5)
    return result


@contextmanager
def restarted(cache: CacheProcess, *faults: str, **settings: Any) -> Iterator[None]:
    """Restart the cache process with faults of its disk."""
    cache.kill()
    config = cache.config.read_text()
    cache.config.write_text(json.dumps({**json.loads(config), **settings}))
    try:
        cache.start(fault=faults)
        yield
    finally:
        cache.config.write_text(config)


def test_each_fault_is_found_where_the_path_broke(model: Path, tmp_path: Path, make_cache: MakeCache) -> None:
    """One server, as its start takes most of the time."""
    cache = make_cache(partial_chunks=True).start()
    with serving(model, tmp_path / "server.log", cache.config) as url:
        healthy = run_canary(url)
        assert healthy.stage is None, healthy.describe()
        assert set(healthy.served) == {"ram", "ssd"}
        assert all(tokens >= CHUNK for tokens, _ in healthy.served.values())
        # Its first guess is a chunk of 256 tokens: the prompt is computed twice, and a little for each tier.
        assert healthy.computed < 288 + 160 + 4 * 64
        second = check(url)
        assert second.status == "ok", second
        expect_nothing_counted(cache, url)

        for seconds in (0.02, 0.05, 0.1, 0.2, 0.5):
            cancel(url, seconds)
        cache.wait_until_idle()

        cache.kill()
        killed = check(url)
        assert (killed.status, NOT_CONNECTED in killed.found) == ("fail", True), killed

        with restarted(cache, "forget-put"):
            expect(connected(url), "load", "ssd", "0 of ")
        with restarted(cache, "other-get"):
            expect(connected(url), "load", "ssd", "0 of ")
        with restarted(cache, "other-get", checksum=False):
            expect(connected(url), "tokens", "ssd", "when computed twice by 0.0")
        with restarted(cache, "fail-put"):
            expect(connected(url), "store", "ssd", "not there")
        ram, ssd = cache.settings["tiers"]
        with restarted(cache, tiers=[ram, {**ssd, "write": "on_evict"}]):
            demoted = connected(url)
            assert demoted.stage is None, demoted.describe()
            assert set(demoted.served) == {"ram", "ssd"}
        periodic = {"engine": url, "every": 10}
        with restarted(cache, "forget-put", canary=periodic):
            connected(url)
            found = cache.wait_until(lambda status: status["canary"][url]["alert"])["canary"][url]
            assert "load failed for tier ssd" in found["last"]
            assert found["results"]["load"] >= 2
            assert f"ERROR kvtier: canary of {url}: {found['last']}" in cache.log.read_text()
        with restarted(cache, canary=periodic):
            connected(url)
            found = cache.wait_until(lambda status: status["canary"][url]["results"]["ok"])["canary"][url]
            assert not found["alert"], found


def test_one_engine_loads_from_a_peer_what_another_has_stored_and_what_it_has_pushed(
    model: Path, tmp_path: Path, make_cache: MakeCache
) -> None:
    peers = peer_settings(2, timeout=TIMEOUT_SECONDS)
    caches = [make_cache(peer=peer, verify=0.001).start() for peer in peers]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with (
        serving(model, logs[0], caches[0].config) as first,
        serving(model, logs[1], caches[1].config) as second,
    ):
        *own, pair = check_engines([first, second])
        assert [found.status for found in own] == ["ok", "ok"], own
        # The tolerance of shadow verification is measured: what is computed again is held.
        assert "6 requests" in own[0].found, own
        assert caches[0].status()["counts"]["store_known"]
        assert (pair.status, f"peers of {second} served" in pair.found) == ("ok", True), pair
        assert not caches[1].status()["counts"].get("looked_up")

        for cache, peer in zip(caches, peers, strict=True):
            cache.kill()
            alone = {**peer, "others": []}
            transfer = {"targets": [peers[1]["listen"]]}
            cache.config.write_text(json.dumps({**cache.settings, "peer": alone, "kv_transfer": transfer}))
            cache.start()
        for url in (first, second):
            connected(url)
        *_, pair = check_engines([first, second])
        assert (pair.status, f"ram of {second} served" in pair.found) == ("ok", True), pair

        caches[1].kill()
        alone = {**peers[1], "others": [], "listen": None}
        caches[1].config.write_text(json.dumps({**caches[1].settings, "peer": alone}))
        caches[1].start()
        connected(second)
        *_, pair = check_engines([first, second])
        assert (pair.status, "lookup failed" in pair.found) == ("fail", True), pair
    for cache in caches:
        cache.wait_until_idle()


def expect(result: Result, stage: str, tier: str, reason: str) -> None:
    assert (result.stage, result.tier) == (stage, tier), result.describe()
    assert reason in result.reason, result.describe()
    assert result.stored >= CHUNK, result.describe()
    assert stage in result.describe()


def expect_nothing_counted(cache: CacheProcess, url: str) -> None:
    """Expect that hit rates do not include the canary."""
    counted = [name for name, count in cache.status()["counts"].items() if count]
    assert not [name for name in counted if name.startswith(("lookup_", "looked_", "hit_", "found_"))]
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    values = re.findall(r"^kvtier_(?:looked_up|hit)_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    assert values
    assert not any(map(float, values))


def cancel(url: str, seconds: float) -> None:
    """Cancel a run after some time: while it stores, or while it loads."""

    async def run() -> None:
        async with Canary(url) as canary:
            with anyio.move_on_after(seconds):
                await canary.run()

    anyio.run(run)


def test_server_without_kvtier_and_with_a_key_is_not_blamed_on_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, tmp_path / "server.log", None, "--api-key", KEY) as url:
        assert "requires an API key" in check(url).found
        monkeypatch.setenv("VLLM_API_KEY", "another")
        assert "requires an API key" in check(url).found
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        found = check(url).found
        assert "has no kvtier" in found
        assert KEY not in found
    assert "does not answer" in check(url).found
