"""Compare connectors end to end in a real vLLM: time to first token, cold and warm, and throughput.

One server each without a connector, with kvtier, with kvtier storing the last, shorter chunk of a prompt
(``partial_chunks``), with LMCache (its server process and its connector, which is the only way in a vLLM for
CPUs), and with vLLM's own offloading (``offload_spec.py``). All use one model of 100 M parameters, and their
measurements are interleaved. vLLM's own prefix cache is reset before each one, so that hits come from the
connector. ``shared``: eight concurrent requests that share 90 % of their prompts, a prefix seen before.
``fresh``: eight concurrent requests that share nothing, which shows the overhead of a connector.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import show
from benchmarks.peer import VERSION, python
from kvtier.bench.timing import ratios
from kvtier.demo.client import Client
from kvtier.demo.model import make_model
from kvtier.demo.server import DemoFailed, Server, start_cache, start_vllm
from kvtier.demo.work import LOCAL_MODEL_ARGUMENTS
from kvtier.testing.servers import free_port

AT_ONCE = 8
SHARED_TOKENS, UNIQUE_TOKENS, NEW_TOKENS = 1280, 144, 8
"""Five whole chunks of 256 tokens, and 10 % more."""
FRESH_TOKENS = 256
VOCABULARY = 4000
READY_SECONDS = 300
STORE_SECONDS = 0.5
"""Pause after a request and a follow-up one, for background stores. No result depends on its length."""
HOST_BYTES = 1 << 30
"""More than twice what one turn stores. Not more, because five servers share the memory of one machine."""
MEASUREMENTS = ("cold", "warm", "shared", "fresh")

Seconds = dict[str, dict[str, list[float]]]


def compare(names: Sequence[str], pairs: int, file: Path | None) -> None:
    """Print seconds, and ratios to the first of ``names``; write all seconds to ``file``."""
    seconds: Seconds = {measurement: defaultdict(list) for measurement in MEASUREMENTS}
    with servers(names) as clients:
        names = list(clients)
        for turn in range(pairs + 1):
            for name in names[:: 1 if turn % 2 else -1]:
                for measurement, took in measure(clients[name], turn).items():
                    if turn:
                        seconds[measurement][name].append(took)
            print(f"turn {turn} of {pairs} done", file=sys.stderr, flush=True)
    report(names, seconds, pairs)
    if file is not None:
        file.write_text(json.dumps(seconds, indent=2) + "\n")


def measure(client: Client, turn: int) -> dict[str, float]:
    """Return the seconds by measurement. In one turn, the prompts are the same for all servers."""
    prompt = tokens(f"long {turn}", SHARED_TOKENS + UNIQUE_TOKENS)
    cold = client.complete(prompt, 1)
    store_and_reset(client, turn, 1)
    warm = client.complete(prompt, 1)
    if cold.tokens != warm.tokens:
        raise SystemExit("the cold and the warm request produced different tokens")
    prefix = tokens(f"prefix {turn}", SHARED_TOKENS)
    client.complete(prefix, 1)
    store_and_reset(client, turn, 2)
    shared = at_once(
        client, [prefix + tokens(f"own {turn} {index}", UNIQUE_TOKENS) for index in range(AT_ONCE)]
    )
    store_and_reset(client, turn, 3)
    fresh = at_once(client, [tokens(f"fresh {turn} {index}", FRESH_TOKENS) for index in range(AT_ONCE)])
    return {"cold": cold.ttft, "warm": warm.ttft, "shared": shared, "fresh": fresh}


def at_once(client: Client, prompts: Sequence[list[int]]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: client.complete(prompt, NEW_TOKENS), prompts))
    return time.perf_counter() - started


def store_and_reset(client: Client, turn: int, number: int) -> None:
    """Wait until chunks are stored, some only in a further step, and reset vLLM's own prefix cache."""
    client.complete(tokens(f"settle {turn} {number}", 16), 2)
    time.sleep(STORE_SECONDS)
    if not client.reset_prefix_cache():
        raise SystemExit("vLLM did not reset its prefix cache")


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=count)


def report(names: Sequence[str], seconds: Seconds, pairs: int) -> None:
    rows: list[Sequence[object]] = []
    for measurement, by_name in seconds.items():
        for name in names:
            speedups = ratios(by_name[name], by_name[names[0]])
            rows.append(
                (
                    measurement,
                    name,
                    statistics.median(by_name[name]) * 1e3,
                    throughput(measurement, by_name[name]),
                    statistics.median(speedups),
                    min(speedups),
                    max(speedups),
                )
            )
    title = (
        f"{pairs} pairs; cold and warm: first token of {SHARED_TOKENS + UNIQUE_TOKENS:,} tokens; "
        f"shared and fresh: {AT_ONCE} at once"
    )
    show(title, ("", "", "ms", "tokens/s", f"times {names[0]}", "lowest", "highest"), rows)


def throughput(measurement: str, seconds: Sequence[float]) -> str:
    """Return the throughput of prompt and output tokens, or an empty string for single requests."""
    prompt = {"shared": SHARED_TOKENS + UNIQUE_TOKENS, "fresh": FRESH_TOKENS}.get(measurement)
    return f"{AT_ONCE * (prompt + NEW_TOKENS) / statistics.median(seconds):,.0f}" if prompt else ""


@contextmanager
def servers(names: Sequence[str]) -> Iterator[dict[str, Client]]:
    """Start all servers in sequence. They idle while another one is measured."""
    # By default, the second of two servers is bound to other cores than the first.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder / "model")
        clients = {}
        for name in names:
            try:
                clients[name] = start_server(name, stack, folder)
            except DemoFailed as error:
                print(f"{name}: skipped: {error}", file=sys.stderr, flush=True)
            else:
                print(f"{name}: ready", file=sys.stderr, flush=True)
        yield clients


def start_server(name: str, stack: ExitStack, folder: Path) -> Client:
    """Start one vLLM and its other processes, until the stack exits. Raises :class:`DemoFailed`."""
    arguments, variables = ENGINES[name](stack, folder)
    port = free_port()
    server = start_vllm(
        str(folder / "model"),
        port=port,
        config=None,
        log=folder / f"{name}.log",
        max_tokens=SHARED_TOKENS + UNIQUE_TOKENS + 64,
        arguments=[*LOCAL_MODEL_ARGUMENTS, "--dtype", "float32", *arguments],
        connector=False,
        name=f"vLLM with {name}",
        variables=variables,
    )
    stack.callback(server.kill)
    client = stack.enter_context(Client(port, str(folder / "model")))
    server.wait_until(client.healthy, READY_SECONDS)
    return client


ServerOptions = tuple[list[str], dict[str, str]]
"""Arguments and environment variables for vLLM."""


def plain(_stack: ExitStack, _folder: Path) -> ServerOptions:
    return [], {}


def kvtier(stack: ExitStack, folder: Path, *, partial_chunks: bool = False) -> ServerOptions:
    """Start a cache process for kvtier's connector."""
    subfolder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
    settings = {
        "socket": str(subfolder / "socket"),
        "tiers": [{"name": "ram", "type": "cpu", "capacity": HOST_BYTES}],
        "partial_chunks": partial_chunks,
    }
    config = subfolder / "kvtier.yaml"
    config.write_text(yaml.safe_dump(settings))
    cache = start_cache(config, subfolder / "cache.log")
    stack.callback(cache.stop)
    cache.wait_until((subfolder / "socket").exists, READY_SECONDS)
    connector = connector_arguments(
        "KVTierConnector", kv_connector_module_path="kvtier.integrations.vllm.connector"
    )
    return connector, {"KVTIER_CONFIG_FILE": str(config)}


def lmcache(stack: ExitStack, folder: Path) -> ServerOptions:
    """Start LMCache's server from its own environment, for its connector in vLLM's environment."""
    port = free_port()
    command = [
        *(str(python().with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--shm-name", f"kvtier-bench-{os.getpid()}", "--l1-size-gb", str(HOST_BYTES >> 30)),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *("--http-port", str(free_port()), "--prometheus-port", str(free_port())),
    ]
    quiet = {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
    server = Server("LMCache", command, {**os.environ, **quiet}, folder / "lmcache-server.log")
    stack.callback(server.stop)
    server.wait_until(lambda: is_listening(port), READY_SECONDS)
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    variables = {"PYTHONPATH": os.pathsep.join([*sys.path[:1], str(lmcache_for_vllm())]), **quiet}
    return connector_arguments("LMCacheMPConnector", kv_connector_extra_config=extra), variables


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def offload(_stack: ExitStack, _folder: Path) -> ServerOptions:
    """Use vLLM's own connector with an offloading spec for CPUs."""
    extra = {
        "spec_name": "CopyingOffloadingSpec",
        "spec_module_path": "benchmarks.compare.offload_spec",
        "cpu_bytes_to_use": HOST_BYTES,
    }
    root = str(Path(__file__).parents[2])
    return connector_arguments("OffloadingConnector", kv_connector_extra_config=extra), {"PYTHONPATH": root}


ENGINES: dict[str, Callable[[ExitStack, Path], ServerOptions]] = {
    "plain": plain,
    "kvtier": kvtier,
    "kvtier-partial": partial(kvtier, partial_chunks=True),
    "lmcache": lmcache,
    "offload": offload,
}


def connector_arguments(connector: str, **settings: Any) -> list[str]:  # noqa: ANN401 - JSON values
    config = {"kv_connector": connector, "kv_role": "kv_both", **settings}
    return ["--kv-transfer-config", json.dumps(config)]


def lmcache_for_vllm() -> Path:
    """Return the folder with packages of LMCache's connector that vLLM lacks. Installs them if missing."""
    folder = python().parents[1].with_name(f"lmcache-{VERSION}-beside-vllm")
    done = folder / "installed"
    if not done.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"lmcache=={VERSION}", "aiofile", "caio", "sortedcontainers"], check=True)
        done.touch()
    return folder
