"""End to end in a real vLLM: the time to the first token, cold and warm, and the throughput of eight at once.

One server each without a connector, with kvtier, with a kvtier that stores the last, shorter chunk of a
prompt (``partial_chunks``), with LMCache (its server process and its connector, which is the only way under a
vLLM for processors) and with vLLM's own offloading (``offload_spec.py``), all with one model of 100 M
parameters. They take turns; vLLM's own prefix cache is emptied before each measurement, so that what is hit
comes from the connector. ``shared``: eight requests that share 90 % of their prompts, which has been seen
before. ``fresh``: eight that share nothing, so that all a connector does is in the way.
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
from kvtier.demo.server import DemoFailed, Server, free_port, start_cache, start_vllm
from kvtier.demo.work import LOCAL_MODEL_ARGUMENTS

AT_ONCE = 8
SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 1280, 144, 8
"""Five whole chunks of 256, and 10 % on top."""
FRESH_TOKENS = 256
VOCABULARY = 4000
READY_SECONDS = 300
SETTLE_SECONDS = 0.5
"""After a request and a further one, for what is stored behind its back; nothing is judged by it."""
HOST_BYTES = 1 << 30
"""More than twice what one turn stores: five servers of an engine and its memory are much for one machine."""
MEASURED = ("cold", "warm", "shared", "fresh")

Seconds = dict[str, dict[str, list[float]]]


def compare(names: Sequence[str], pairs: int, file: Path | None) -> None:
    """Print a table of seconds and one of ratios to the first of ``names``; write all seconds to ``file``."""
    seconds: Seconds = {what: defaultdict(list) for what in MEASURED}
    with servers(names) as clients:
        names = list(clients)
        for turn in range(pairs + 1):
            for name in names[:: 1 if turn % 2 else -1]:
                for what, took in measure(clients[name], turn).items():
                    if turn:
                        seconds[what][name].append(took)
            print(f"turn {turn} of {pairs} done", file=sys.stderr, flush=True)
    report(names, seconds, pairs)
    if file is not None:
        file.write_text(json.dumps(seconds, indent=2) + "\n")


def measure(client: Client, turn: int) -> dict[str, float]:
    """Seconds of each kind, with prompts that are the same for every server in the same turn."""
    prompt = tokens(f"long {turn}", SHARED_TOKENS + OWN_TOKENS)
    cold = client.complete(prompt, 1)
    settle(client, turn, 1)
    warm = client.complete(prompt, 1)
    if cold.tokens != warm.tokens:
        raise SystemExit("tokens differ between cold and warm")
    prefix = tokens(f"prefix {turn}", SHARED_TOKENS)
    client.complete(prefix, 1)
    settle(client, turn, 2)
    shared = at_once(client, [prefix + tokens(f"own {turn} {index}", OWN_TOKENS) for index in range(AT_ONCE)])
    settle(client, turn, 3)
    fresh = at_once(client, [tokens(f"fresh {turn} {index}", FRESH_TOKENS) for index in range(AT_ONCE)])
    return {"cold": cold.ttft, "warm": warm.ttft, "shared": shared, "fresh": fresh}


def at_once(client: Client, prompts: Sequence[list[int]]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: client.complete(prompt, NEW_TOKENS), prompts))
    return time.perf_counter() - started


def settle(client: Client, turn: int, number: int) -> None:
    """Let what was computed be stored, some of which happens in the next step, and empty vLLM's own cache."""
    client.complete(tokens(f"settle {turn} {number}", 16), 2)
    time.sleep(SETTLE_SECONDS)
    if not client.reset_prefix_cache():
        raise SystemExit("vLLM does not empty its own cache")


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=count)


def report(names: Sequence[str], seconds: Seconds, pairs: int) -> None:
    rows: list[Sequence[object]] = []
    for what, by_name in seconds.items():
        for name in names:
            beside = ratios(by_name[name], by_name[names[0]])
            rows.append(
                (
                    what,
                    name,
                    statistics.median(by_name[name]) * 1e3,
                    throughput(what, by_name[name]),
                    statistics.median(beside),
                    min(beside),
                    max(beside),
                )
            )
    title = (
        f"{pairs} pairs; cold and warm: first token of {SHARED_TOKENS + OWN_TOKENS:,} tokens; "
        f"shared and fresh: {AT_ONCE} at once"
    )
    show(title, ("", "", "ms", "tokens/s", f"times {names[0]}", "lowest", "highest"), rows)


def throughput(what: str, seconds: Sequence[float]) -> str:
    """Of prompt and answer together."""
    prompt = {"shared": SHARED_TOKENS + OWN_TOKENS, "fresh": FRESH_TOKENS}.get(what)
    return f"{AT_ONCE * (prompt + NEW_TOKENS) / statistics.median(seconds):,.0f}" if prompt else ""


@contextmanager
def servers(names: Sequence[str]) -> Iterator[dict[str, Client]]:
    """All of them, started one after the other; they idle while it is another's turn."""
    # Left to itself, the second of two servers gets other cores than the first.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder / "model")
        clients = {}
        for name in names:
            try:
                clients[name] = started(name, stack, folder)
            except DemoFailed as failed:
                print(f"{name} is left out: {failed}", file=sys.stderr, flush=True)
            else:
                print(f"{name} is ready", file=sys.stderr, flush=True)
        yield clients


def started(name: str, stack: ExitStack, folder: Path) -> Client:
    """One vLLM and what it needs beside it, until the stack is left. Raises :class:`DemoFailed`."""
    arguments, variables = ENGINES[name](stack, folder)
    port = free_port()
    server = start_vllm(
        str(folder / "model"),
        port=port,
        config=None,
        log=folder / f"{name}.log",
        max_tokens=SHARED_TOKENS + OWN_TOKENS + 64,
        arguments=[*LOCAL_MODEL_ARGUMENTS, "--dtype", "float32", *arguments],
        connector=False,
        name=f"vLLM with {name}",
        variables=variables,
    )
    stack.callback(server.kill)
    client = stack.enter_context(Client(port, str(folder / "model")))
    server.wait_until(client.healthy, READY_SECONDS)
    return client


Started = tuple[list[str], dict[str, str]]
"""Arguments of vLLM, and variables."""


def plain(_stack: ExitStack, _folder: Path) -> Started:
    return [], {}


def kvtier(stack: ExitStack, folder: Path, *, partial_chunks: bool = False) -> Started:
    """With a cache process and its connector."""
    own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
    settings = {
        "socket": str(own / "socket"),
        "tiers": [{"name": "ram", "type": "cpu", "capacity": HOST_BYTES}],
        "partial_chunks": partial_chunks,
    }
    config = own / "kvtier.yaml"
    config.write_text(yaml.safe_dump(settings))
    cache = start_cache(config, own / "cache.log")
    stack.callback(cache.stop)
    cache.wait_until((own / "socket").exists, READY_SECONDS)
    connector = transfer("KVTierConnector", kv_connector_module_path="kvtier.integrations.vllm.connector")
    return connector, {"KVTIER_CONFIG_FILE": str(config)}


def lmcache(stack: ExitStack, folder: Path) -> Started:
    """With its server, from its own environment, and its connector, which is put beside vLLM."""
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
    server.wait_until(lambda: listens(port), READY_SECONDS)
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    variables = {"PYTHONPATH": os.pathsep.join([*sys.path[:1], str(beside_vllm())]), **quiet}
    return transfer("LMCacheMPConnector", kv_connector_extra_config=extra), variables


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def offload(_stack: ExitStack, _folder: Path) -> Started:
    """With vLLM's own connector and a specification for processors."""
    extra = {
        "spec_name": "ProcessorOffloadingSpec",
        "spec_module_path": "benchmarks.compare.offload_spec",
        "cpu_bytes_to_use": HOST_BYTES,
    }
    root = str(Path(__file__).parents[2])
    return transfer("OffloadingConnector", kv_connector_extra_config=extra), {"PYTHONPATH": root}


ENGINES: dict[str, Callable[[ExitStack, Path], Started]] = {
    "plain": plain,
    "kvtier": kvtier,
    "kvtier-partial": partial(kvtier, partial_chunks=True),
    "lmcache": lmcache,
    "offload": offload,
}


def transfer(connector: str, **settings: Any) -> list[str]:  # noqa: ANN401 - what JSON can hold
    config = {"kv_connector": connector, "kv_role": "kv_both", **settings}
    return ["--kv-transfer-config", json.dumps(config)]


def beside_vllm() -> Path:
    """A folder with what LMCache's connector imports and vLLM does not bring; made where it is missing."""
    folder = python().parents[1].with_name(f"lmcache-{VERSION}-beside-vllm")
    done = folder / "installed"
    if not done.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"lmcache=={VERSION}", "aiofile", "caio", "sortedcontainers"], check=True)
        done.touch()
    return folder
