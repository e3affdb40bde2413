"""Sources of settings and their precedence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvtier.settings import Origin, Settings, load_settings
from kvtier.settings.peer import TLSSettings
from kvtier.settings.sources import field_names, nested_model, variable_name
from kvtier.settings.tenants import TenantSettings

WriteFile = Callable[[str], Path]

SECRET = "sixteen or more characters"
NEEDED = {"peer.listen": SECRET, "peer.others": SECRET}
"""Settings that need a secret beside them."""

# A value other than the default for each setting: in the file, in the environment, and as parsed.
EXAMPLES: dict[str, tuple[str, str, Any]] = {
    "chunk_tokens": ("128", "128", 128),
    "partial_chunks": ("false", "false", False),
    "save_decode": ("false", "0", False),
    "weights_id": ("step-2", "step-2", "step-2"),
    "accept_lossy": ("true", "true", True),
    "tiers": (
        "[{name: a, type: cpu, capacity: 1MiB}]",
        '[{"name": "a", "type": "cpu", "capacity": "1MiB"}]',
        [{"name": "a", "type": "cpu", "capacity": "1MiB"}],
    ),
    "socket": ("/run/a.sock", "/run/a.sock", Path("/run/a.sock")),
    "linger": ("3s", "3s", 3.0),
    "reserve_share": ("0.25", "0.25", 0.25),
    "drain_timeout": ("1m", "60", 60.0),
    "checksum": ("false", "false", False),
    "verify": ("0.001", "0.001", 0.001),
    "plugins": ("[a, b]", '["a", "b"]', ["a", "b"]),
    "prefetch.adaptive": ("false", "false", False),
    "prefetch.ahead": ("false", "false", False),
    "prefetch.policy": ("wait", "wait", "wait"),
    "prefetch.deadline": ("250ms", "250ms", 0.25),
    "peer.listen": ("localhost:8200", "localhost:8200", "localhost:8200"),
    "peer.others": ('["a:1", "[::1]:2"]', '["a:1", "[::1]:2"]', ["a:1", "[::1]:2"]),
    "peer.secret": (SECRET[::-1], SECRET[::-1], SecretStr(SECRET[::-1])),
    "peer.tls": (
        "{certificate: a, key: b, authority: c}",
        '{"certificate": "a", "key": "b", "authority": "c"}',
        TLSSettings(certificate=Path("a"), key=Path("b"), authority=Path("c")),
    ),
    "peer.transport": ("{type: nixl}", "nixl", {"type": "nixl"}),
    "peer.codec": ("{type: auto}", "auto", {"type": "auto"}),
    "peer.lease": ("1m", "60s", 60.0),
    "peer.share": ("0.1", "0.1", 0.1),
    "peer.timeout": ("1s", "1s", 1.0),
    "role": ("decode", "decode", "decode"),
    "kv_transfer.timeout": ("500ms", "0.5", 0.5),
    "kv_transfer.reserve": ("1m", "60s", 60.0),
    "kv_transfer.buffer": ("1GiB", "1073741824", 1 << 30),
    "kv_transfer.targets": ("[a:1]", '["a:1"]', ["a:1"]),
    "kv_transfer.device": ("cpu", "cpu", "cpu"),
    "controller.url": ("http://there:9000/", "http://there:9000", "http://there:9000"),
    "controller.instance_id": ("decode-1", "decode-1", "decode-1"),
    "controller.token": (SECRET, SECRET, SecretStr(SECRET)),
    "controller.ask": ("false", "0", False),
    "tenants": (
        "{a: {share: 0.5}}",
        '{"a": {"share": 0.5}}',
        {"a": TenantSettings(share=0.5)},
    ),
    "metrics.listen": ("localhost:9464", "localhost:9464", "localhost:9464"),
    "recording.path": ("/var/log/traffic.rec", "/var/log/traffic.rec", Path("/var/log/traffic.rec")),
    "recording.max_bytes": ("16MiB", "16777216", 16 << 20),
    "recording.files": ("2", "2", 2),
    "whatif.enabled": ("false", "0", False),
    "whatif.sample_chunks": ("1024", "1024", 1024),
    "whatif.half_life": ("2h", "7200", 7200.0),
    "why.remembered_chunks": ("5000", "5000", 5000),
    "why.requests": ("100", "100", 100),
    "why.show_text": ("true", "true", True),
    "traces": ("true", "1", True),
    "canary.engine": (
        "[http://a:1/, http://b:1]",
        '["http://a:1", "http://b:1"]',
        ["http://a:1", "http://b:1"],
    ),
    "canary.every": ("5m", "300", 300.0),
    "canary.api_key": (SECRET, SECRET, SecretStr(SECRET)),
    "log_level": ("debug", "debug", "DEBUG"),
}

ONE_VALUE = {"kv_transfer.device"}
"""Settings whose only valid value is the default."""


def leaves() -> list[str]:
    nested = {name for name, field in Settings.model_fields.items() if nested_model(field)}
    return [name for name in field_names(Settings) if name not in nested]


def value_of(settings: Settings, key: str) -> object:
    value: object = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_every_setting_is_tested_here() -> None:
    assert set(EXAMPLES) == set(leaves())


@pytest.mark.parametrize("key", EXAMPLES)
def test_each_setting_from_the_file(key: str, write_file: WriteFile) -> None:
    written, _, value = EXAMPLES[key]
    outer, _, inner = key.partition(".")
    secret = f", secret: {NEEDED[key]}" if key in NEEDED else ""
    path = write_file(f"{outer}: {{{inner}: {written}{secret}}}" if inner else f"{key}: {written}")
    settings = load_settings(file=path)
    assert value_of(settings, key) == value
    assert (value_of(Settings(), key) != value) is (key not in ONE_VALUE)
    assert settings.origin(key) == Origin("file", str(path), 1)


@pytest.mark.parametrize("key", EXAMPLES)
def test_each_setting_from_its_variable(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, written, value = EXAMPLES[key]
    monkeypatch.setenv(variable_name(key), written)
    if key in NEEDED:
        monkeypatch.setenv("KVTIER_PEER__SECRET", NEEDED[key])
    settings = load_settings()
    assert value_of(settings, key) == value
    assert settings.origin(key) == Origin("environment", variable_name(key))


@pytest.mark.parametrize("key", EXAMPLES)
def test_each_setting_from_code(key: str) -> None:
    _, _, value = EXAMPLES[key]
    outer, _, inner = key.partition(".")
    secret = {"secret": NEEDED[key]} if key in NEEDED else {}
    settings = load_settings({outer: {inner: value, **secret}} if inner else {key: value})
    assert value_of(settings, key) == value
    assert settings.origin(key) == Origin("override")


def test_code_overrides_environment_overrides_file(
    write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "KVTIER_CONFIG_FILE", str(write_file("{chunk_tokens: 1, linger: 1, drain_timeout: 1}"))
    )
    monkeypatch.setenv("KVTIER_LINGER", "2s")
    monkeypatch.setenv("KVTIER_DRAIN_TIMEOUT", "2s")
    settings = load_settings({"drain_timeout": "3s"})
    assert (settings.chunk_tokens, settings.linger, settings.drain_timeout) == (1, 2.0, 3.0)
    kinds = [settings.origin(key).kind for key in ("chunk_tokens", "linger", "drain_timeout", "checksum")]
    assert kinds == ["file", "environment", "override", "default"]


def test_nested_settings_are_merged_and_lists_are_replaced(
    write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file("{prefetch: {policy: wait, deadline: 9s}, plugins: [a, b]}")
    monkeypatch.setenv("KVTIER_PREFETCH__DEADLINE", "4s")
    settings = load_settings({"plugins": ["c"]}, file=path)
    assert (settings.prefetch.policy, settings.prefetch.deadline) == ("wait", 4.0)
    assert settings.plugins == ["c"]
    assert settings.origin("prefetch.policy").kind == "file"
    assert settings.origin("prefetch.deadline") == Origin("environment", "KVTIER_PREFETCH__DEADLINE")


def test_nested_settings_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH", json.dumps({"policy": "wait"}))
    settings = load_settings()
    assert settings.prefetch.policy == "wait"
    assert settings.origin("prefetch.policy") == Origin("environment", "KVTIER_PREFETCH")


def test_given_file_replaces_the_one_in_the_variable(
    write_file: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("linger: 1s")
    monkeypatch.setenv("KVTIER_CONFIG_FILE", str(other))
    settings = load_settings(file=write_file("chunk_tokens: 64"))
    assert (settings.chunk_tokens, settings.linger) == (64, Settings().linger)


def test_empty_file_and_empty_variable_set_nothing(
    write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "")
    assert load_settings(file=write_file("# nothing yet\n")).model_dump() == Settings().model_dump()


def test_constructor_reads_no_environment_or_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "64")
    monkeypatch.setenv("KVTIER_CONFIG_FILE", "/does/not/exist.yaml")
    assert Settings().chunk_tokens == "auto"


def test_kubernetes_service_variables_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "KVTIER_PORT": "tcp://10.0.0.1:8200",
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "8200",
        "KVTIER_SERVICE_PORT_HTTP": "8200",
        "KVTIER_PORT_8200_TCP": "tcp://10.0.0.1:8200",
        "KVTIER_PORT_8200_TCP_ADDR": "10.0.0.1",
        "KVTIER_PORT_8200_TCP_PROTO": "tcp",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings().model_dump() == Settings().model_dump()


def test_settings_survive_serialization() -> None:
    settings = load_settings({key: EXAMPLES[key][2] for key in EXAMPLES if "." not in key})
    again = load_settings(json.loads(settings.model_dump_json()))
    assert again.model_dump() == settings.model_dump()


def test_home_directory_in_the_socket_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_settings({"socket": "~/a.sock"}).socket == Path("/home/someone/a.sock")
