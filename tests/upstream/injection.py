"""Plugin of pytest for ``tools/test_upstream.py``: vLLM's own tests of connectors use KVTierConnector.

Where the tests' helpers (``tests/v1/kv_connector/unit/utils.py``) make another connector, they make kvtier's,
connected to a real cache process. What they mean to NIXL is what it means to kvtier:

- A request with ``do_remote_prefill`` expects its prompt, which another engine has stored.
- Requests with ``do_remote_decode`` are stored, others are not.

A mock of a connector passes on to kvtier what its test does not script. KV-cache tensors and files of the
model, which the helpers leave out, are added. ``UPSTREAM_RESULTS`` names the file for the results.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvtier.bridge.client import status
from kvtier.bridge.protocol import Run
from kvtier.errors import ChannelError
from kvtier.integrations.vllm import connector, scheduler
from kvtier.integrations.vllm.connector import KVTierConnector
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.memory.keys import join_keys

SECONDS = 60.0
LIST = Path(__file__).with_name("list.yaml")
TESTS = "tests/v1/kv_connector/unit/"
PASSED = "passed"
OUTCOMES: dict[str, str] = {}
HELPERS = "create_vllm_config", "create_scheduler", "create_request", "create_mock_connector"
MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 10_000,
    "vocab_size": 50_272,
}


class Injection:
    """Replacements of the helpers, and what became of each test."""

    def __init__(self, folder: Path, utils: Any) -> None:
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(MODEL))
        self.test = ""
        """The running test."""
        self.used: set[str] = set()
        """The tests that have called kvtier."""
        self.last: KVTierConnector | None = None
        self.utils = utils
        self.helpers = {name: getattr(utils, name) for name in HELPERS}
        self.process = serve(folder)

    def replace(self) -> None:
        """Replace the helpers. Call this before any test is imported."""
        for name in HELPERS:
            setattr(self.utils, name, getattr(self, name))
        self.utils.ExampleConnector = self.example_connector
        example_connector.ExampleConnectorMetadata = lambda: StepMetadata([], [], computes=False)
        KVConnectorFactory._registry["SimpleCPUOffloadConnector"] = self.connector_class
        connector.engine_rank = lambda: 0  # The tests make workers without their process groups.
        # These tests are about what follows from an answer of the cache process: steps wait for it.
        scheduler.STEP_WAIT_SECONDS = scheduler.LOOKUP_WAIT_SECONDS = SECONDS
        for name, hook in [*vars(KVTierConnector).items()]:
            if inspect.isfunction(hook) and (name == "__init__" or not name.startswith("_")):
                setattr(KVTierConnector, name, self.noting(hook))

    def noting(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of kvtier that also notes its use."""

        @functools.wraps(hook)
        def noted(this: KVTierConnector, *arguments: Any, **named: Any) -> Any:
            self.last = this
            self.used.add(self.test)
            if hook.__name__ == "on_new_request":
                store_if_remote(this, *arguments)
            return hook(this, *arguments, **named)

        return noted

    def connector_class(self) -> type[KVTierConnector]:
        self.used.add(self.test)
        return KVTierConnector

    def configure(self, config: Any) -> Any:
        """Let a copy of vLLM's configuration name kvtier. No two tests share chunks."""
        settings = {
            "socket": str(self.folder / "socket"),
            "chunk_tokens": config.cache_config.block_size,
            "partial_chunks": True,
            "prefetch": {"policy": "wait"},
            "weights_id": self.test,
        }
        config = copy.copy(config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path=connector.__name__,
            kv_role="kv_both",
            kv_connector_extra_config=settings,
            kv_load_failure_policy=config.kv_transfer_config.kv_load_failure_policy,
        )
        return config

    def create_vllm_config(self, **named: Any) -> Any:
        config = self.helpers["create_vllm_config"](**{**named, "model": str(self.folder)})
        own = config.kv_transfer_config.kv_connector != "NixlConnector"
        return config if own else self.configure(config)

    def create_scheduler(
        self, config: Any, num_blocks: int = 10_000, kv_cache_config: Any = None, **named: Any
    ) -> Any:
        caches = self.complete(config, kv_cache_config, num_blocks)
        return self.helpers["create_scheduler"](config, num_blocks, caches, **named)

    def create_request(self, *arguments: Any, **named: Any) -> Any:
        request = self.helpers["create_request"](*arguments, **named)
        params = request.kv_transfer_params = request.kv_transfer_params or {}
        params["kvtier"] = {} if params.get("do_remote_decode") else {"cache": "read"}
        if params.get("do_remote_prefill"):
            params["kvtier"]["expect"] = {"tokens": request.num_tokens}
        return request

    def create_mock_connector(self) -> Mock:
        mock = self.helpers["create_mock_connector"]()
        sources = mock.get_external_cache_hit_sources.side_effect
        return Mock(wraps=self.last, **{"get_external_cache_hit_sources.side_effect": sources})

    def example_connector(self, config: Any, role: Any, caches: KVCacheConfig) -> KVTierConnector:
        config = self.configure(config)
        return KVTierConnector(config, role, self.complete(config, caches, 100))

    def complete(self, config: Any, caches: KVCacheConfig | None, num_blocks: int) -> KVCacheConfig:
        """Return a configuration of KV caches that has groups and tensors."""
        if caches is None or not caches.kv_cache_groups:
            caches = self.utils.make_kv_cache_config(config.cache_config.block_size, num_blocks=num_blocks)
        for group in caches.kv_cache_groups if not caches.kv_cache_tensors else ():
            page, layers = group.kv_cache_spec.page_size_bytes, group.layer_names
            size = page * caches.num_blocks
            caches.kv_cache_tensors.append(KVCacheTensor(size * len(layers), layers, size, page))
        return caches


def store_if_remote(this: KVTierConnector, request: Any) -> None:
    """Store the prompt of a request that another engine has prefilled. No test reads the chunks' content."""
    if not request.kv_transfer_params.get("do_remote_prefill"):
        return
    side, model = this._sides.first, this._model
    tokens, chunk = request.num_tokens, model.layout.chunk_tokens
    state = side._track(request, side._kv_transfers.hints(request), None)
    keys = join_keys([*state.extend(tokens), *filter(None, [state.tail_key(tokens)])])
    run = Run(state.root, keys, tokens % chunk or chunk, block_hashes=state.block_hashes(0, tokens))
    other = this._bridges._replace(engine=f"prefill of {request.request_id}")
    served = connector.engine_model(this._vllm_config, {})
    bridge = other.scheduler(model, served, side.weights.current)
    worker = other.worker(model, 0)
    call = bridge.reserve([run])
    assert call is not None
    wait_until(lambda: bridge.poll() or call.settled)
    leases = call.result.granted if call.result is not None else []
    socket = other.settings.socket
    count = stored(socket) + len(leases)
    worker.commit(leases)
    wait_until(lambda: stored(socket) == count)
    worker.close()
    bridge.close()


def serve(folder: Path) -> subprocess.Popen[bytes]:
    """Start a cache process, and wait until it answers."""
    tier = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
    (folder / "kvtier.yaml").write_text(json.dumps({"socket": str(folder / "socket"), "tiers": [tier]}))
    options = ["--config", str(folder / "kvtier.yaml"), "--log-level", "WARNING"]
    process = subprocess.Popen([sys.executable, "-m", "kvtier", "serve", *options])
    wait_until(lambda: process.poll() is not None or stored(folder / "socket") >= 0)
    assert process.poll() is None, "the cache process has ended: see above"
    return process


def stored(socket: Any) -> int:
    """Return how many chunks a cache process has stored; -1 without an answer."""
    try:
        return int(status(socket)["counts"].get("stored", 0))
    except ChannelError:
        return -1


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition. Raises: TimeoutError."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Any:
    """Replace the helpers."""
    from tests.v1.kv_connector.unit import utils

    folder = tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True)
    session.config.add_cleanup(folder.cleanup)
    injection = session.config.injection = Injection(Path(folder.name), utils)
    session.config.add_cleanup(injection.process.wait)
    session.config.add_cleanup(injection.process.terminate)
    injection.replace()
    return (yield)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note that a file cannot be imported."""
    if report.failed:
        OUTCOMES[report.nodeid] = report.outcome


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the tests of the list to fail: only other failures are printed."""
    listed = yaml.safe_load(LIST.read_text())
    for item in items:
        test = item.nodeid.removeprefix(TESTS)
        if reason := listed.get(test) or listed.get(test.partition("[")[0]):
            item.add_marker(pytest.mark.xfail(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note uses of kvtier as those of this test from now on."""
    item.config.injection.test = item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Note the outcome of a test: the first that is not a success, if any."""
    report = yield
    outcome = "failed" if hasattr(report, "wasxfail") and not report.passed else report.outcome
    if OUTCOMES.get(item.nodeid, PASSED) == PASSED:
        OUTCOMES[item.nodeid] = outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes."""
    for test, outcome in OUTCOMES.items():
        if outcome == PASSED and test not in session.config.injection.used:
            OUTCOMES[test] = "passed without kvtier"
    Path(os.environ["UPSTREAM_RESULTS"]).write_text(json.dumps(OUTCOMES))
