from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvtier.cli import config
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.settings_schema import json_schema, markdown_page

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


def test_show_tells_each_value_and_where_it_comes_from(
    kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH__DEADLINE", "250ms")
    lines = kvtier("config", "show", "--config", file).output.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["chunk_tokens"] == ["256", "default"]
    assert rows["linger"] == ["2s", "file", str(file)]
    assert rows["prefetch.deadline"] == ["250ms", "environment", "KVTIER_PREFETCH__DEADLINE"]
    assert rows["socket"] == ["not", "set", "default"]
    assert rows["tiers[1].capacity"] == ["1GiB", "file", str(file)]
    assert rows["tiers[1].direct"] == ["true", "default"]
    assert rows["tiers[1].queue"] == ["16MiB", "default"]


def test_show_as_json_holds_plain_values(kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG_FILE", str(file))
    shown = json.loads(kvtier("config", "show", "--json").output)
    assert shown["linger"] == {"value": 2.0, "source": f"file {file}"}
    assert shown["tiers[0].capacity"] == {"value": 64 << 20, "source": f"file {file}"}
    assert shown["tiers[1].write"]["value"] == "on_evict"
    assert shown["socket"] == {"value": None, "source": "default"}


def test_show_masks_secrets(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    class PoolSettings(TierSettings):
        password: SecretStr

    def load(_: Path | None) -> tuple[Settings, Sequence[TierSettings]]:
        raw: dict[str, Any] = {"name": "pool", "type": "pool", "capacity": "1GiB", "password": "hunter2"}
        return load_settings({"tiers": [raw]}), [PoolSettings.model_validate(raw)]

    monkeypatch.setattr(config, "_load", load)
    for arguments in ([], ["--json"]):
        result = kvtier("config", "show", *arguments)
        assert "password" in result.output
        assert "hunter2" not in result.output + result.errors


def test_check_names_the_tiers(kvtier: Kvtier, file: Path) -> None:
    result = kvtier("config", "check", "-c", file)
    assert result.status == 0
    assert result.output == "The settings are right. Tiers, fastest first: ram (cpu), ssd (disk).\n"


def test_check_says_what_to_write(kvtier: Kvtier, file: Path) -> None:
    file.write_text(file.read_text().replace("on_evict", "sometimes"))
    result = kvtier("config", "check", "-c", file)
    assert result.status == 1
    assert result.output == ""
    assert f"tiers[1].write (in {file}) is 'sometimes': it should be 'through', 'on_evict'" in result.errors


def test_schema_works_where_the_settings_are_wrong(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "none")
    plugins = Plugins.load([])
    assert json.loads(kvtier("config", "schema").output) == json_schema(plugins)
    assert kvtier("config", "schema", "--markdown").output == markdown_page(plugins)
