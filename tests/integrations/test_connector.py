"""Version check, waits, registration and counters of the connector."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
import vllm
from huggingface_hub import ResolvedRevision
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.renderers.base import BaseRenderer

from kvtier import Settings
from kvtier.bridge.protocol import Weights
from kvtier.errors import UnsupportedEngine
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.integrations.vllm import compat, connector, metrics, register
from kvtier.integrations.vllm.bridges import Bridges, engine_model
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job, StepMetadata
from kvtier.rpc.client import UNRESPONSIVE_SECONDS
from tests.rigs.bridges import Start, hello, is_serving, start
from tests.rigs.vllm.bare_connector import bare_connector
from tests.rigs.waiting import wait_until

__all__ = ["start"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.29.1")
    with pytest.raises(UnsupportedEngine, match=r'0\.29\.1.*pip install "vllm>=0\.30,<0\.34"'):
        compat.check_version(connector.logger)


def test_newer_version_is_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with caplog.at_level("WARNING", connector.logger.name):
        compat.check_version(connector.logger)
    assert "tested with vLLM 0.30 to 0.33, and vLLM 0.99.1 is installed" in caplog.text


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("gigabytes", [0, 4])
def test_inputs_are_numbered_as_vllm_does(caching: bool, gigabytes: float) -> None:
    """Compared with the method of vLLM that numbers them."""
    inputs = SimpleNamespace(mm_processor_cache_gb=gigabytes)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=inputs),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    renderer: Any = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None
    )
    image = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    named = BaseRenderer._process_mm_uuids(
        cast("Any", renderer), {}, cast("Any", image), {}, "renderer0-mm-1"
    )
    assert compat.numbers_inputs(cast("Any", config)) == bool(named)


def test_text_models_have_no_inputs_to_number() -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    assert not compat.numbers_inputs(config)


@pytest.mark.parametrize("policy", ["timeout", "wait"])
def test_both_bridges_wait_as_long_as_the_prefetch_policy_says(
    policy: str, start: Start, tmp_path: Path
) -> None:
    process = start()
    socket = tmp_path / "socket"
    wait_until(lambda: is_serving(socket))
    settings = Settings(socket=socket, prefetch={"policy": policy})
    opened, greeting = Bridges(settings, "engine"), hello("scheduler")
    model = ModelLayout(greeting.layout, greeting.namespace, (), ())
    bridges = (
        opened.scheduler(model, EngineModel([], None), Weights(greeting.namespace, "")),
        opened.worker(model, 0),
    )
    process.send_signal(signal.SIGSTOP)
    assert bridges[0].clear(0) is None, "it answers only when it runs again"
    assert bridges[1].confirm([1]) is not None
    time.sleep(1.1 * UNRESPONSIVE_SECONDS)
    for bridge in bridges:
        bridge.update()
    assert [bridge.responsive for bridge in bridges] == [policy == "wait"] * 2
    for bridge in bridges:
        bridge.close()


@pytest.mark.parametrize(
    ("device", "tiles", "granted"),
    [("cpu", True, True), ("cpu", True, False), ("cpu", False, True), ("cuda", True, True)],
)
def test_amx_is_requested_before_the_first_step(
    device: str, tiles: bool, granted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, an engine in bfloat16 whose first step computes one token ends with SIGILL."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: (calls.append("request"), granted)[1])
    worker = SimpleNamespace(register=lambda _: calls.append("register"))
    instance = bare_connector(worker=worker, device=device)
    with caplog.at_level("WARNING", connector.logger.name):
        instance.register_kv_caches({})
    assert calls == (["request", "register"] if device == "cpu" and tiles else ["register"])
    assert ("--dtype float32" in caplog.text) == (not granted)


class Name(str):
    __slots__ = ()


class Worker:
    """Counts its idle waits, and the steps that it has saved."""

    def __init__(self) -> None:
        self.waits = self.saves = 0

    def load(self, jobs: Sequence[Job]) -> None:
        pass

    def save(self, jobs: Sequence[Job]) -> None:
        self.saves += 1

    def idle(self) -> None:
        pass

    def idle_wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize(
    ("spins", "computes", "waits"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_spinning_ranks_wait_in_steps_without_computation(spins: bool, computes: bool, waits: int) -> None:
    worker = Worker()
    instance = bare_connector(worker=worker, spins=spins)
    instance.bind_connector_metadata(StepMetadata(computes=computes))
    instance.start_load_kv(cast("Any", None))
    assert worker.waits == waits
    # vLLM 0.30 does not call wait_for_save() in such steps, and the blocks of finished requests would stay.
    assert worker.saves == (not computes)
    instance.wait_for_save()
    assert worker.saves == 1


def test_plugin_registers_short_name() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is connector.KVTierConnector


def test_names_and_tokenizer_of_a_hub_model_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's configuration has subclasses of ``str``, which have no encoding."""
    commit = "a" * 40
    arguments = ("hf", Path("/downloads") / commit, (), {})
    monkeypatch.setattr("vllm.tokenizers.registry.tokenizer_args_from_config", lambda model: arguments)
    model = SimpleNamespace(
        model=Name("org/llama"),
        served_model_name=[Name("chat"), "org/llama"],
        skip_tokenizer_init=False,
        tokenizer_revision=ResolvedRevision(commit),
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="llama"),
        max_model_len=4096,
    )
    served = engine_model(cast("Any", SimpleNamespace(model_config=model)), {"dtype": "float32"})
    tokenizer = TokenizerSource(f"/downloads/{commit}", "hf", commit)
    assert served == EngineModel(["chat", "org/llama"], tokenizer, {"dtype": "float32"}, 4096)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(served), type=EngineModel) == served


def test_every_counter_is_documented() -> None:
    names = list(metrics.COUNTERS)
    text = DOCUMENT.read_text()
    assert names
    assert not [name for name in names if f"`kvtier_{name}_total" not in text]
