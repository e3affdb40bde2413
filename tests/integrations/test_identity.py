"""What identifies models and adapters to the connector."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub._revision import ResolvedRevision
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvtier.integrations.vllm import adapters as module
from kvtier.integrations.vllm import weights as weights_module
from kvtier.integrations.vllm.adapters import Adapters, follow_loads, is_loaded
from kvtier.integrations.vllm.identity import Identities, identify
from kvtier.integrations.vllm.weights import EngineWeights

COMMIT = "0123456789" * 4


def config(model: Any, *, load_format: str = "auto", revision: Any = None, **more: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=revision, **more),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=None,
    )


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def key(source: Any) -> tuple[str, ...]:
    return identify(source, source.model_config).key


def reason(source: Any) -> str:
    return identify(source, source.model_config).reason


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "preprocessor_config.json", "modeling.py"]
)
def test_files_that_decide_kv(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "model")
    before = key(config(folder))
    assert before == key(config(make_model(tmp_path / "elsewhere")))
    (folder / name).write_text("changed")
    assert key(config(folder)) != before


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "README.md", "optimizer.pt"])
def test_files_that_decide_no_kv(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "model")
    before = key(config(folder))
    (folder / name).write_text("changed")
    assert key(config(folder)) == before


def test_models_of_a_hub_are_their_commit(tmp_path: Path) -> None:
    expected = ("hub", "org/name", COMMIT)
    assert key(config("org/name", revision=ResolvedRevision(COMMIT))) == expected
    # Offline, vLLM replaces the name by the folder in the hub's cache.
    blobs = make_model(tmp_path / "models--org--name" / "blobs")
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert key(config(snapshot)) == expected
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"own")
    assert key(config(snapshot))[0] == "files"


def test_weights_that_cannot_be_identified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_model(tmp_path / "model")
    for load_format in ("dummy", "tensorizer", "my_loader"):
        assert reason(config(folder, load_format=load_format)) == f"load_format is {load_format}"
    assert reason(config(folder, model_weights="s3://bucket")) == "they are in an object storage"
    unknown = config("org/not-in-the-cache")
    assert "their commit is unknown" in reason(unknown)
    Identities.of(unknown, "").log(unknown, "")
    assert "set `weights_id`" in caplog.text
    assert "KVTIER_WEIGHTS_ID=step-1200" in caplog.text
    caplog.clear()
    Identities.of(unknown, "step-1").log(unknown, "step-1")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_log_shows_what_identifies_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    local, hub = config(make_model(tmp_path / "model")), config("org/name", revision=COMMIT)
    for source, weights_id in ((local, ""), (hub, ""), (local, "step-1200")):
        Identities.of(source, weights_id).log(source, weights_id)
    Identities(identify(local, local.model_config), identify(hub, hub.model_config)).log(local, "")
    files = f"weights: files {key(local)[1][:16]}"
    assert caplog.messages == [
        files,
        "weights: hub org/name @ 012345678901",
        "weights: weights_id step-1200",
        f"{files}; of the drafter: hub org/name @ 012345678901",
    ]


def test_startup_version_after_the_files_have_changed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    identity = identify(config(folder), config(folder).model_config)
    weights = EngineWeights("", lambda name: name.encode().ljust(32), identity.is_current)
    startup = weights.current
    weights.forget()
    assert weights.name("default")
    assert weights.current == startup
    weights.forget()
    (folder / "model.safetensors").write_bytes(b"others!")
    assert weights.name("default")
    assert weights.current.id.startswith("unknown-")


def test_startup_version_while_the_file_system_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_module, "CHECK_SECONDS", 0.01)
    answers = threading.Event()
    answers.set()
    weights = EngineWeights("", lambda name: name.encode().ljust(32), answers.wait)
    answers.clear()
    weights.forget()
    try:
        assert weights.name("default")
        assert weights.current.id.startswith("unknown-")
        assert "could not be compared with those at the start in 0.01 s" in caplog.text
    finally:
        answers.set()


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    train(request, 1)
    return request


def train(lora: LoRARequest, seed: int) -> None:
    folder = Path(lora.lora_path)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(bytes([seed]) * 100)


@pytest.mark.parametrize("own", [True, False])
def test_files_that_change_after_vllm_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    """``own``: in a process of vLLM's own. Another process may have written the files before."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if own else "0")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "vLLM's API")
    source = config(make_model(tmp_path / "model"))
    identities = Identities.of(source, "")
    identities.log(source, "")
    assert ("start it again" in caplog.text) == own
    weights = EngineWeights("", lambda name: name.encode().ljust(32), identities.are_current)
    assert weights.current.id.startswith("unknown-" if own else "")
    weights.name("default")
    assert weights.current.id.startswith("unknown-") == own
    weights.name("step-1")
    assert weights.current.id == "step-1"
    # The process has started after the files were written.
    monkeypatch.setattr("kvtier.integrations.vllm.identity._age_of_process", lambda: 0)
    assert EngineWeights("", lambda _: bytes(32), identities.are_current).current.id == ""


@pytest.fixture(autouse=True)
def time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each request compare the files again, as if the last one had been some time ago."""
    monkeypatch.setattr(module, "FRESH_SECONDS", -1.0)


class Engine:
    """What the scheduler's side knows of adapters, and a pool with nothing in it."""

    def __init__(self) -> None:
        self.bridge: Any = SimpleNamespace(waited=0.0)
        self.adapters = Adapters(self.bridge)
        self.used = 1
        pool: Any = SimpleNamespace(
            num_gpu_blocks=10, get_num_free_blocks=lambda: 10 - self.used, cached_block_hash_to_block=()
        )
        self.adapters.bind(pool)

    def admit(self, lora: LoRARequest, local: int = 0, wait: float = 10.0) -> Any:
        request: Any = SimpleNamespace(request_id="r", lora_request=lora)
        return self.adapters.admit(request, local, wait)


def test_content_of_an_adapter(lora: LoRARequest) -> None:
    first = Engine().admit(lora).identity
    os.utime(Path(lora.lora_path) / "adapter_model.safetensors", (1, 1))
    assert Engine().admit(lora).identity == first
    (Path(lora.lora_path) / "README.md").write_text("new")
    assert Engine().admit(lora).identity == first
    train(lora, 2)
    second = Engine().admit(lora).identity
    (Path(lora.lora_path) / "adapter_config.json").write_text("{}")
    assert len({first, second, Engine().admit(lora).identity}) == 3


def test_adapter_is_not_used_once_its_files_have_changed(lora: LoRARequest) -> None:
    engine = Engine()
    first = engine.admit(lora)
    train(lora, 1)  # The same content again.
    assert engine.admit(lora) is first
    train(lora, 2)
    assert engine.admit(lora) is None
    train(lora, 1)  # The worker may have loaded the other one meanwhile.
    assert engine.admit(lora) is None
    assert not first.replaced
    engine.adapters.loads(LoRARequest("adapter", 1, lora.lora_path, load_inplace=True))
    assert first.replaced
    assert engine.admit(lora).identity == first.identity
    engine.adapters.removes(1)
    train(lora, 2)
    assert engine.admit(lora).identity != first.identity


def test_kv_of_earlier_content_in_vllms_own_cache(lora: LoRARequest) -> None:
    engine = Engine()
    engine.used = 5
    assert engine.admit(lora, local=64) is not None
    train(lora, 2)
    engine.adapters.loads(LoRARequest("adapter", 1, lora.lora_path, load_inplace=True))
    assert engine.admit(lora, local=64) is None
    assert engine.admit(lora) is not None
    engine.used = 1  # vLLM's cache was reset.
    assert engine.admit(lora, local=64) is not None


def test_how_an_adapter_is_read_is_part_of_its_identity(lora: LoRARequest) -> None:
    usual = Engine().admit(lora).identity
    other = LoRARequest("adapter", 1, lora.lora_path, is_3d_lora_weight=True)
    engine = Engine()
    assert engine.admit(other).identity not in ("", usual)
    assert engine.admit(lora) is None, "vLLM has loaded the other one by this number"
    engine.adapters.loads(lora)
    assert engine.admit(lora).identity == usual


def test_what_is_remembered_is_bounded(lora: LoRARequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 8)
    engine = Engine()
    engine.used = 5
    first = engine.admit(lora, local=64)
    others = [LoRARequest(f"adapter-{at}", at, lora.lora_path) for at in range(2, 40)]
    assert all(engine.admit(other, local=64) for other in others[:7])
    assert engine.admit(lora, local=64) is first, "it is in use"
    for other in others:
        engine.admit(other)
    adapters = engine.adapters
    assert len(adapters._adapters) == len(adapters._names) == 8
    assert first.replaced
    for _ in range(2):
        assert engine.admit(lora, local=64) is None, "whose KV vLLM has with this name is not known any more"
    assert engine.admit(lora) is not None
    engine.used = 1  # vLLM's cache was reset.
    assert engine.admit(lora, local=64) is not None
    assert not adapters.is_pending("r")


def test_two_adapters_with_one_number(lora: LoRARequest) -> None:
    engine = Engine()
    assert engine.admit(lora) is not None
    assert engine.admit(LoRARequest("other", 1, lora.lora_path)) is None


def test_adapter_whose_folder_is_removed_after_it_was_loaded(lora: LoRARequest) -> None:
    engine = Engine()
    first = engine.admit(lora)
    for file in Path(lora.lora_path).iterdir():
        file.unlink()
    assert engine.admit(lora) is first
    assert Engine().admit(lora) is None


def test_one_request_waits_for_a_slow_file_system(lora: LoRARequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "files_of", lambda _: time.sleep(60))
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.05)
    engine = Engine()
    request: Any = SimpleNamespace(request_id="r", lora_request=lora)
    assert engine.adapters.admit(request, 0, 0.0) is None
    assert engine.adapters.is_pending("r")
    time.sleep(0.06)
    for _ in range(2):
        assert engine.adapters.admit(request, 0, 0.0) is None
        assert not engine.adapters.is_pending("r")


def test_adapter_whose_files_can_suddenly_not_be_checked(
    lora: LoRARequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have loaded others from there."""
    engine = Engine()
    first = engine.admit(lora)
    assert first is not None
    answers, files_of = threading.Event(), module.files_of
    monkeypatch.setattr(module, "files_of", lambda path: answers.wait() and files_of(path))
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.0)
    assert engine.admit(lora, wait=0.0) is None
    assert not engine.adapters.is_pending("r")
    assert "it takes more than 0 s to check the files" in caplog.text
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 60.0)
    answers.set()
    assert first.ended.wait(60)
    assert not first.is_slow
    assert engine.admit(lora) is first


def test_worker_knows_what_it_has_loaded(lora: LoRARequest, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def load(manager: Any, request: LoRARequest) -> str:
        for event in events:
            event()
        return "loaded"

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    monkeypatch.setattr(module, "_loaded", {})
    follow_loads()
    follow_loads()
    load_adapter: Any = WorkerLoRAManager._load_adapter
    manager: Any = None
    first = Engine().admit(lora).identity
    assert not is_loaded(1, first)
    assert load_adapter(manager, lora) == "loaded"
    assert is_loaded(1, first)
    train(lora, 2)
    second = Engine().admit(lora).identity
    assert is_loaded(1, first)
    assert not is_loaded(1, second)
    load_adapter(manager, lora)
    assert is_loaded(1, second)
    events.append(lambda: train(lora, 3))  # While it is being loaded.
    load_adapter(manager, lora)
    assert not any(is_loaded(1, Engine().admit(lora).identity) for _ in range(1))
    assert not is_loaded(1, second)
