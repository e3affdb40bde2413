"""What the chart of deploy/helm renders, started here: the commands, variables and settings of its pods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtier.bridge.client import status
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import Server
from tests.rigs import container
from tests.rigs.chart import HELM, Node, render, values
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HELM.exists(), reason="helm is not installed: make test"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]
READY_SECONDS = 300.0
CHUNK = 128
LENGTH = 6 * CHUNK
SMALL: dict[str, Any] = {
    "settings": {
        "chunk_tokens": CHUNK,
        "linger": "1s",
        "tiers": [{"name": "ram", "type": "cpu", "capacity": "128MiB"}],
    },
    "engine": {
        "args": [
            *("--host=127.0.0.1", "--max-model-len=2048", "--block-size=32", "--dtype=float32"),
            *("--kv-cache-memory-bytes=64M", "--enforce-eager", "--distributed-executor-backend=uni"),
        ],
    },
    "prefiller": {"replicas": 1},
    "decoder": {"replicas": 1, "settings": {"kv_transfer": {"buffer": "64MiB", "timeout": "60s"}}},
    "proxy": {"args": ["--min-prefill=64"]},
    "controller": {"enabled": True, "args": [], "replicas": 1, "state": "", "statePasswordKey": ""},
    "secrets": {"existing": ""},
}
"""Values for this machine and a small model."""
StartNode = Callable[[str], Node]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.add_tokenizer(models.make_llama(tmp_path / "model"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def make_node(model: Path, stack: ExitStack) -> StartNode:
    """Render a case with small values."""

    def make(case: str) -> Node:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        folder.chmod(0o755)
        file = folder / "small.yaml"
        # Of a development server: the second request must not be served by vLLM's own cache.
        scratch = {"VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(folder)}
        variables = [{"name": name, "value": value} for name, value in (VLLM_ENVIRONMENT | scratch).items()]
        engine = {**SMALL["engine"], "env": variables}
        file.write_text(yaml.safe_dump({**SMALL, "engine": engine, "model": str(model)}))
        return Node(render(*values(case), "--values", str(file)), folder)

    return make


def client(node: Node, component: str, server: Server, model: Path, stack: ExitStack) -> Client:
    """Wait until a server is healthy, and return a client of it."""
    opened = stack.enter_context(Client(node.port(component, "8000"), str(model)))
    server.wait_until(opened.healthy, READY_SECONDS)
    return opened


def get(node: Node, component: str, number: str, path: str) -> Any:
    """Ask a component for something with its token; return ``None`` if it does not answer yet."""
    headers = {"Authorization": f"Bearer {node.secret[f'{component}-token']}"}
    url = f"http://127.0.0.1:{node.port(component, number)}{path}"
    try:
        return httpx.get(url, headers=headers, timeout=60, trust_env=False).raise_for_status().json()
    except httpx.TransportError:
        return None


def instances(node: Node) -> int:
    """Return how many instances have registered with the controller."""
    answer = get(node, "controller", "9000", "/instances")
    return 0 if answer is None else len(answer["instances"])


def test_second_request_is_served_by_the_cache_process_of_the_node(
    make_node: StartNode, model: Path, stack: ExitStack
) -> None:
    """The cache process runs as in its container; the engine is in other namespaces than it."""
    if reason := container.missing():
        pytest.skip(reason)
    node = make_node("shared")
    cache = node.start_contained("cache")
    stack.callback(cache.kill)
    socket = node.share_socket(cache, READY_SECONDS)
    controller, engine = node.start("controller"), node.start("engine")
    stack.callback(controller.kill)
    stack.callback(engine.kill)
    vllm = client(node, "engine", engine, model, stack)
    controller.wait_until(lambda: instances(node) == 1, READY_SECONDS)
    prompt = models.prompt(LENGTH)
    first = vllm.complete(prompt, 8)
    cache.wait_until(lambda: status(socket)["tiers"][0]["chunks"] >= LENGTH // CHUNK, READY_SECONDS)
    assert vllm.reset_prefix_cache()
    second = vllm.complete(prompt, 8)
    assert (first.cached_tokens, second.tokens) == (0, first.tokens)
    assert second.cached_tokens >= LENGTH - CHUNK
    scraped = httpx.get(f"http://127.0.0.1:{node.port('cache', '9464')}/metrics", trust_env=False).text
    assert "kvtier_lookup_hit_tokens_total" in scraped


def test_decoder_is_served_by_the_prefiller(make_node: StartNode, model: Path, stack: ExitStack) -> None:
    node = make_node("disaggregated")
    servers = {}
    for name in ("controller", "decoder", "prefiller", "proxy"):
        servers[name] = node.start(name)
        stack.callback(servers[name].kill)
    for name in ("decoder", "prefiller"):
        client(node, name, servers[name], model, stack)
    proxy = client(node, "proxy", servers["proxy"], model, stack)

    def all_known() -> bool:
        engines = get(node, "proxy", "8000", "/engines")
        return all(each["state"] == "up" and (each["role"] != "decode" or each["peer"]) for each in engines)

    servers["proxy"].wait_until(all_known, READY_SECONDS)
    servers["controller"].wait_until(lambda: instances(node) == 2, READY_SECONDS)
    answer = proxy.complete(models.prompt(LENGTH), 8)
    assert answer.cached_tokens >= LENGTH - CHUNK
    assert proxy.get("/stats")["transferred_tokens"] >= LENGTH - CHUNK
