from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.settings_reference import json_schema, markdown_page
from kvtier.plugins import Plugins

from .conftest import Kvtier


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(
        "linger: 2s\n"
        "tiers:\n"
        "  - {name: ram, type: cpu, capacity: 64MiB}\n"
        "  - {name: ssd, type: disk, capacity: 1GiB, path: /var/cache/kvtier, write: on_evict}\n"
    )
    return path


def test_show_prints_each_value_and_its_source(
    kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH__DEADLINE", "250ms")
    lines = kvtier("config", "show", "--config", file).output.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["chunk_tokens"] == ["auto", "default"]
    assert rows["linger"] == ["2s", "file", str(file)]
    assert rows["prefetch.deadline"] == ["250ms", "environment", "KVTIER_PREFETCH__DEADLINE"]
    assert rows["socket"] == ["not", "set", "default"]
    assert rows["tiers[1].capacity"] == ["1GiB", "file", str(file)]
    assert rows["tiers[1].direct"] == ["true", "default"]
    assert rows["tiers[1].queue"] == ["16MiB", "default"]


def test_show_as_json_has_plain_values(kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG_FILE", str(file))
    shown = json.loads(kvtier("config", "show", "--json").output)
    assert shown["linger"] == {"value": 2.0, "source": f"file {file}"}
    assert shown["tiers[0].capacity"] == {"value": 64 << 20, "source": f"file {file}"}
    assert shown["tiers[1].write"]["value"] == "on_evict"
    assert shown["socket"] == {"value": None, "source": "default"}


@pytest.mark.parametrize(
    "written",
    [
        {"password": "hunter2"},
        {"password": {"env": "POOL_PASSWORD"}},
        {"password": {"file": "secret"}},
        {"url": "redis://kvtier:hunter2@cache:6379/0"},
        {"url": "redis://:hunter2@cache:6379/0", "deadline": "soon"},
        {"url": "redis://kvtier:hunter2@cache:port/0"},
        {"url": "redis://kvtier:hunter2@cache:6379/0", "password": "hunter2"},
        {"password": "hunter2", "passwort": "hunter2"},
        {"password": {"env": "POOL_PASSWORD", "file": "secret"}},
        {"password": ["hunter2"]},
    ],
    ids=str,
)
def test_valid_and_invalid_secrets_are_not_shown(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POOL_PASSWORD", "hunter2")
    (tmp_path / "secret").write_text("hunter2\n")
    pool = {"name": "pool", "type": "redis", "url": "redis://cache:6379/0", **written}
    tiers = [{"name": "ram", "type": "cpu", "capacity": "64MiB"}, pool]
    monkeypatch.setenv("KVTIER_TIERS", json.dumps(tiers))
    for arguments in (["show"], ["show", "--json"], ["check"]):
        result = kvtier("config", *arguments)
        assert "hunter2" not in result.output + result.errors
        if arguments[0] == "show" and not result.status:
            assert "tiers[1].password" in result.output
        if result.status:
            assert "tiers[1]." in result.errors


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"env": "NOWHERE"}, "the environment variable NOWHERE is not set or empty"),
        ({"file": "/nowhere/secret"}, "cannot read the file /nowhere/secret"),
        ({"vault": "x"}, "'vault' is not a source of secrets: use a string, {env: NAME}"),
    ],
)
def test_missing_secret_is_reported_with_its_source(
    kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch, place: dict[str, str], message: str
) -> None:
    pool = {"name": "pool", "type": "redis", "url": "redis://cache:6379/0", "password": place}
    tiers = [{"name": "ram", "type": "cpu", "capacity": "64MiB"}, pool]
    monkeypatch.setenv("KVTIER_TIERS", json.dumps(tiers))
    errors = kvtier("config", "check").errors
    assert "tiers[1].password" in errors
    assert message in errors


def test_check_names_the_tiers(kvtier: Kvtier, file: Path) -> None:
    result = kvtier("config", "check", "-c", file)
    assert result.status == 0
    assert result.output == "The settings are valid. Tiers, fastest first: ram (cpu), ssd (disk).\n"


def test_check_names_the_valid_values(kvtier: Kvtier, file: Path) -> None:
    file.write_text(file.read_text().replace("on_evict", "sometimes"))
    result = kvtier("config", "check", "-c", file)
    assert result.status == 1
    assert result.output == ""
    assert (
        f"tiers[1].write (in {file}, line 4) is 'sometimes': it should be 'through', 'on_evict'"
        in result.errors
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("chunk_tokens: true", "chunk_tokens (in {}, line 1) is invalid: true is not a number"),
        ('socket: "/run/a\\0b"', "the path contains a NUL character"),
        (
            "peer: {{transport: pigeon}}",
            "peer.transport (in {}, line 1): unknown transport 'pigeon': use one of tcp",
        ),
        (
            "tiers: [{{name: ram, type: cpu, capacity: 1MiB}}, "
            "{{name: a, type: disk, capacity: 1MiB, path: /var/a}}, "
            "{{name: b, type: disk, capacity: 1MiB, path: /var/b/../a}}]",
            "tiers[2].path (in {}, line 1) is /var/b/../a, which tiers[1] already uses",
        ),
    ],
    ids=["boolean", "NUL", "transport", "path"],
)
def test_check_rejects(kvtier: Kvtier, tmp_path: Path, settings: str, message: str) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(settings.format())
    result = kvtier("config", "check", "-c", file)
    assert (result.status, result.output) == (1, "")
    assert message.format(file) in result.message


def test_check_reports_all_levels_at_once(
    kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_LINGER", "soon")
    monkeypatch.setenv("KVTIER_WHATIF", "on")
    monkeypatch.setenv("KVTIER_LINGR", "1s")
    file.write_text(
        "chunk_tokens: 0\nplugins: [missing]\npeer:\n  transport: pigeon\ntenants: {a: {share: 2}}\ntiers:\n"
        "- {name: ram, type: cpu, capacity: much, eviction: mru, tenants: {a: {share: 0.5}}}\n"
        "- {name: ssd, type: disk, capacity: 1GiB, path: /data}\n"
        "- name: ssd\n  type: disk\n  capacity: 1GiB\n  path: /x/../data\n"
    )
    lines = kvtier("config", "check", "-c", file).errors.removeprefix("error: ").splitlines()
    expected = {
        "the variable KVTIER_LINGR is not a setting": "did you mean KVTIER_LINGER?",
        "KVTIER_WHATIF is not JSON": "use for example",
        f"chunk_tokens (in {file}, line 1)": "use a whole number from 1",
        "linger (in KVTIER_LINGER)": "use a number of seconds",
        f"tenants.a.share (in {file}, line 5)": "less than or equal to 1",
        "plugins lists 'missing', which is not installed": "",
        f"peer.transport (in {file}, line 4)": "use one of tcp",
        f"tiers[0].eviction (in {file}, line 7)": "use one of lru",
        f"tiers[0].capacity (in {file}, line 7)": "for example 5GiB",
        f"tiers[2].name (in {file}, line 9)": "choose another name",
        f"tiers[2].path (in {file}, line 12)": "set a folder of its own",
    }
    assert len(lines) == len(expected)
    for start, remedy in expected.items():
        assert any(line.startswith(start) and remedy in line for line in lines), start


def test_schema_works_with_invalid_settings(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "none")
    plugins = Plugins.load()
    assert json.loads(kvtier("config", "schema").output) == json_schema(plugins)
    assert kvtier("config", "schema", "--markdown").output == markdown_page(plugins)
