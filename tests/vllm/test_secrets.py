"""Nothing secret leaves the processes: no text, tokens or salts of a prompt, and no secret settings.

A real server with everything on, and all that it, its cache process and its controller log, serve and store.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import start_vllm
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import TIMEOUT_SECONDS, CacheProcess
from tests.rigs.collector import Collector
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.servers.redis import RedisServer
from tests.rigs.vllm import models
from tests.vllm.conftest import MakeCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY_SECONDS = 300.0
TEXT = "The quokka Zanzibar owes 4711 guilders to Mx. Featherstonehaugh. "
OTHER_END = "Nobody but Popocatepetl may know of the xylophone."
SALT = "salt-of-the-tenant-Wrzeszcz"
ADAPTER = "adapter-1"
API_KEY = "key-of-the-server-Quetzal"
TOKEN = "token-of-the-controller-Llanfair"
PEER_SECRET = "secret-of-the-peers-Ouagadougou"
PASSWORD = "password-of-the-pool-Eyjafjalla"
HEADER = "header-of-the-collector-Titicaca"
SETTINGS = (API_KEY, TOKEN, PEER_SECRET, PASSWORD, HEADER)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def needles() -> dict[str, bytes]:
    """Return what must be nowhere. A token of the model is a byte of the text."""
    found = {f"setting {secret}": secret.encode() for secret in SETTINGS}
    found["salt"] = SALT.encode()
    for text in (TEXT, OTHER_END):
        words = [word for word in text.split() if len(word) > 6]
        tokens = list(words[0].encode())[:6]
        found |= {f"text {word}": word.encode() for word in words}
        found |= {
            f"tokens of {words[0]}, {name}": value
            for name, value in {
                "list": str(tokens)[1:-1].encode(),
                "json": json.dumps(tokens, separators=(",", ":"))[1:-1].encode(),
                "lines": "\n".join(map(str, tokens)).encode(),
                "int32": struct.pack("<6i", *tokens),
                "int64": struct.pack("<6q", *tokens),
            }.items()
        }
    return found


class System(NamedTuple):
    """A server with everything on."""

    url: str
    client: Client
    cache: CacheProcess
    pool: RedisServer
    controller: ControllerProcess
    collector: Collector
    metrics: str
    folder: Path

    def ask(self, prompt: str, model: str | None = None, **more: Any) -> None:
        body = {"model": model or str(self.folder / "model"), "prompt": prompt, "max_tokens": 4, **more}
        headers = {"authorization": f"Bearer {API_KEY}", "traceparent": TRACEPARENT}
        with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers) as http:
            http.post(f"{self.url}/v1/completions", json=body).raise_for_status()
            self.cache.wait_until_idle()
            assert http.post(f"{self.url}/reset_prefix_cache").is_success

    def command(self, *arguments: str) -> bytes:
        """Return all output of a ``kvtier`` command."""
        command = [sys.executable, "-m", "kvtier", *arguments, "--config", str(self.cache.config)]
        environment = {**os.environ, "VLLM_API_KEY": API_KEY}
        result = subprocess.run(command, capture_output=True, timeout=600, check=False, env=environment)
        return result.stdout + result.stderr


@contextmanager
def started(
    folder: Path, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, verify: float
) -> Iterator[System]:
    model = models.make_llama(folder / "model")
    models.write_tokenizer(model)
    adapter = models.make_lora(folder / "adapter", seed=1)
    if reason := RedisServer.missing():
        pytest.skip(reason)
    collector = Collector(folder).start()
    for name, value in collector.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={HEADER}")
    (folder / "token").write_text(TOKEN)
    options = ("--traces", "--token-file", str(folder / "token"), "--log-level", "DEBUG")
    controller = ControllerProcess(folder, *options)
    controller.start()
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    url = f"http://127.0.0.1:{port}"
    redis = RedisServer(folder, password=PASSWORD)
    redis.start()
    cache = make_cache(
        tiers=[
            {"name": "ram", "type": "cpu", "capacity": "64MiB"},
            {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": "256MiB"},
            {"name": "pool", **redis.tier()},
        ],
        partial_chunks=True,
        log_level="DEBUG",
        traces=True,
        verify=verify,
        canary={"engine": url, "every": "10s", "api_key": API_KEY},
        metrics={"listen": metrics},
        recording={"path": str(folder / "traffic.rec")},
        controller={"url": controller.url, "token": TOKEN, "instance_id": "instance-1"},
        peer={
            "listen": f"127.0.0.1:{free_port()}",
            "secret": PEER_SECRET,
            "transport": {"type": "tcp", "deadline": TIMEOUT_SECONDS},
        },
    ).start()
    server = start_vllm(
        str(model),
        port=port,
        config=cache.config,
        log=folder / "server.log",
        max_tokens=2048,
        arguments=[
            *("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--api-key", API_KEY),
            *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"),
        ],
        scratch=cache.config.parent,
        variables=VLLM_ENVIRONMENT,
    )
    try:
        with Client(port, str(model)) as client:
            server.wait_until(client.healthy, READY_SECONDS)
            yield System(url, client, cache, redis, controller, collector, metrics, folder)
    finally:
        server.kill()
        redis.kill()
        controller.close()
        collector.kill()


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 2 * TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.parametrize(("verify", "reason"), [(0.0, "diverges"), (1.0, "verified")])
def test_nothing_of_prompts_salts_and_secret_settings_leaves_the_processes(
    tmp_path: Path, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, verify: float, reason: str
) -> None:
    with started(tmp_path, make_cache, monkeypatch, verify) as system:
        use_and_search(system, reason)


def use_and_search(system: System, reason: str) -> None:
    prompt = TEXT * 16
    for _ in range(3):  # Stored, loaded and compared.
        system.ask(prompt, cache_salt=SALT)
    system.ask(prompt[: len(prompt) // 2] + OTHER_END * 10, cache_salt=SALT)
    system.ask(prompt)
    system.ask(prompt, model=ADAPTER, cache_salt=SALT)
    assert httpx.post(f"{system.url}/v1/completions", json={}, trust_env=False).status_code == 401
    (system.folder / "prompt.txt").write_text(prompt)
    system.pool.kill()  # Errors are logged.
    system.ask(OTHER_END * 20, cache_salt=SALT)

    collector = system.collector
    wait(lambda: collector.named("kvtier.load") and collector.named("kvtier.save"), "no spans")
    outputs = gathered(system)
    found = [
        f"{what} in {name}"
        for name, text in outputs.items()
        for what, each in needles().items()
        if each in text
    ]
    assert not found
    # All of it is about these requests: it could have said more than it may.
    expected = {
        "spans": "kvtier.lookup",
        "why --json": reason,
        "why": "other_salt",
        "metrics of the cache process": 'kvtier_miss_tokens_total{reason="other_salt"}',
        "metrics of the server": "kvtier",
        "log of the server": "request cmpl-",
        "log of the cache process": "tier pool",
        "log of the controller": "instance-1",
        "GET /instances": "instance-1",
        "GET /history": "looked_up_tokens",
        "GET /why": "cmpl-",
        "why --all --json": "cmpl-",
        "why of a prompt": "ram",
        "why of a prompt, of all instances": "instance-1",
        "doctor --engine": "ok",
    }
    lacking = {
        name: outputs[name][-2000:] for name, about in expected.items() if about.encode() not in outputs[name]
    }
    assert not lacking
    for name in ("ssd", "traffic.rec"):
        assert (system.folder / name).exists()


def gathered(system: System) -> dict[str, bytes]:
    """Return everything that is logged, served, printed and stored for display, by name."""
    folder, controller = system.folder, system.controller
    commands = (
        "why",
        "why --last 100 --json",
        "why --all --json",
        "status",
        "status --json",
        "doctor",
        "doctor --json",
        "config show",
    )
    outputs = {command: system.command(*command.split()) for command in commands}
    outputs["why --json"] = outputs.pop("why --last 100 --json")
    prompt = ("why", "--prompt-file", str(folder / "prompt.txt"), "--salt", SALT)
    outputs["doctor --engine"] = system.command("doctor", "--engine", system.url)
    outputs["why of a prompt"] = system.command(*prompt, "--json")
    outputs["why of a prompt, of all instances"] = system.command(*prompt, "--all")
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
        outputs["metrics of the cache process"] = http.get(f"http://{system.metrics}/metrics").content
        outputs["metrics of the server"] = http.get(f"{system.url}/metrics").content
        headers = {"authorization": f"Bearer {TOKEN}"}
        body = {"tokens": list((TEXT * 16).encode()), "salt": SALT}
        http.post(f"{controller.url}/lookup", json=body, headers=headers)
        paths = http.get(f"{controller.url}/openapi.json", headers=headers).raise_for_status().json()["paths"]
        for path in [path for path, methods in paths.items() if "get" in methods and path != "/stream"]:
            answer = http.get(f"{controller.url}{path.replace('{instance}', 'instance-1')}", headers=headers)
            outputs[f"GET {path}"] = answer.content
    outputs["spans"] = system.collector.file.read_bytes()
    outputs["log of the cache process"] = system.cache.log.read_bytes()
    outputs["log of the controller"] = controller.log.read_bytes()
    outputs["log of the server"] = (folder / "server.log").read_bytes()
    for path in [*folder.glob("controller.sqlite*"), *folder.glob("traffic.rec*")]:
        outputs[path.name] = path.read_bytes()
    return outputs
