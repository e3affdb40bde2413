"""examples/ray with Ray Serve: a replica that autoscaling adds is warm, also once the first one is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtier.lab.demo.model import make_model, prompt_text
from kvtier.settings import load_settings
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import TIMEOUT_SECONDS, CacheProcess
from tests.rigs.children import children

HERE = Path(__file__).parents[2] / "examples" / "ray"
START_SECONDS = 400.0
"""A replica starts in 40 s on two idle cores, and in 90 s beside requests."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ON_CPUS = {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]}}


def example() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((HERE / "serve.yaml").read_text())
    return loaded


def llm_config(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]["llm_configs"][0]
    return found


def test_replicas_use_the_socket_of_the_cache_process() -> None:
    transfer = llm_config(example())["engine_kwargs"]["kv_transfer_config"]
    settings = load_settings(yaml.safe_load((HERE / "kvtier.yaml").read_text()))
    assert transfer["kv_connector"] == "KVTierConnector"
    assert transfer["kv_connector_extra_config"] == {"socket": str(settings.socket)}


class RayServe:
    """Ray on this machine, and the example's application with a small model."""

    def __init__(self, folder: Path, cache: CacheProcess) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "serve.log"
        self.environment = {**os.environ, **ENVIRONMENT}
        self._ray: subprocess.Popen[bytes] | None = None
        config = example()
        config["http_options"] = {"port": int(self.url.rpartition(":")[2])}
        model = llm_config(config)
        del model["accelerator_type"]
        model |= ON_CPUS | {"runtime_env": {"env_vars": {"VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}}}
        make_model(folder / "model", layers=4)
        model["model_loading_config"]["model_source"] = str(folder / "model")
        autoscaling = {"target_ongoing_requests": 1, "upscale_delay_s": 1, "downscale_delay_s": 600}
        model["deployment_config"]["autoscaling_config"] |= autoscaling
        engine = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
        model["engine_kwargs"] |= engine
        model["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"] = cache.connector
        (folder / "serve.yaml").write_text(yaml.safe_dump(config))

    def start(self) -> None:
        # More CPUs than there may be: the replicas, the proxy and the router take one each.
        resources = ["--num-cpus=8", "--include-dashboard=false", "--disable-usage-stats"]
        command = ["start", "--head", "--block", f"--port={self.address.rpartition(':')[2]}", *resources]
        with self.log.open("ab") as output:
            self._ray = subprocess.Popen(
                [self.program("ray"), *command, f"--temp-dir={self.folder / 'ray'}"],
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        deploy = ["run", "--non-blocking", f"--address={self.address}", str(self.folder / "serve.yaml")]
        until(lambda: self.serve(*deploy) == 0)
        until(self.answers)

    @staticmethod
    def program(name: str) -> str:
        return str(Path(sys.executable).with_name(name))

    def serve(self, *command: str) -> int:
        with self.log.open("ab") as output:
            arguments = [self.program("serve"), *command]
            environment = {**self.environment, "RAY_ADDRESS": self.address}
            return subprocess.run(arguments, env=environment, stdout=output, stderr=output).returncode

    def answers(self) -> bool:
        try:
            return self.ask("", 20) is not None
        except httpx.HTTPError:
            return False

    def ask(self, name: str, characters: int = 8000) -> tuple[str, int, int]:
        """Return the answer to a prompt of real text, its number of tokens, and how many were cached."""
        prompt = name + prompt_text()[:characters]
        body = {"model": "qwen", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=START_SECONDS)
        answer.raise_for_status()
        read = answer.json()
        cached = (read["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return read["choices"][0]["text"], read["usage"]["prompt_tokens"], cached

    def replicas(self) -> list[int]:
        """Return the processes of the replicas."""
        assert self._ray is not None
        found = []
        for pid in (child for raylet in children(self._ray.pid) for child in children(raylet)):
            with suppress(OSError):  # It may have exited.
                if b"LLMServer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def close(self) -> None:
        if self._ray is not None:
            self.serve("shutdown", "--yes")  # Otherwise vLLM's processes outlive the replicas.
            self._ray.send_signal(signal.SIGTERM)
            self._ray.wait(TIMEOUT_SECONDS)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture
def cache() -> Iterator[CacheProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # Short, as are the paths of Unix sockets.
    tiers = {"ram": {"capacity": 512 << 20}, "ssd": {"capacity": 512 << 20}}
    cache = CacheProcess(folder, **tiers, partial_chunks=True)
    cache.start()
    yield cache
    cache.kill()
    shutil.rmtree(folder)


@pytest.fixture
def ray(cache: CacheProcess) -> Iterator[RayServe]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    served = RayServe(folder, cache)
    try:
        served.start()
        yield served
    except BaseException:
        print(served.log.read_text(errors="replace")[-8000:])
        raise
    finally:
        served.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="needs Ray: make test-ray")
def test_replicas_that_come_and_go_are_warm(ray: RayServe, cache: CacheProcess) -> None:
    timed: dict[str, float] = {}

    def ask(name: str, label: str) -> tuple[str, int, int]:
        started = time.perf_counter()
        answer = ray.ask(name)
        timed[label] = round(time.perf_counter() - started, 2)
        return answer

    (first,) = ray.replicas()
    text, tokens, cached = ask("known", "cold")
    assert cached == 0
    cache.wait_until_idle()

    # Two requests at once are more than one replica is to have.
    enough = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(_ask_until, ray, enough, number) for number in range(4)]
        until(lambda: len(ray.replicas()) == 2)
        enough.set()
    assert all(request.exception() is None for request in load)
    until(lambda: len(cache.status()["engines"]) == 2)

    os.kill(first, signal.SIGKILL)
    until(lambda: first not in ray.replicas())
    cache.wait_until(lambda status: len(status["engines"]) == 1)
    until(ray.answers)
    assert ask("known", "warm on the new replica") == (text, tokens, tokens)
    cache.wait_until_idle()  # Nothing is left of the killed one.

    cache.kill()
    assert ask("known", "without the cache process")[0] == text
    cache.start()
    until(lambda: ray.ask("known")[0] == text and cache.status()["engines"])
    print(timed)


def _ask_until(ray: RayServe, enough: threading.Event, number: int) -> None:
    while not enough.is_set():
        ray.ask(f"load {number}", 2000)
