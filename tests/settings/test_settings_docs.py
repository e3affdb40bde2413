"""The page and the schema in docs/ match the models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli.settings_reference import EXAMPLE, format_value, json_schema, markdown_page
from kvtier.plugins import Plugins
from kvtier.settings import Settings, load_settings
from kvtier.settings.controller import ControllerSettings
from kvtier.settings.observability import MetricsSettings
from kvtier.settings.peer import KVTransferSettings, PeerSettings, TLSSettings
from kvtier.settings.sources import field_names, nested_model, variable_name

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([])


def test_page_is_up_to_date(plugins: Plugins) -> None:
    assert (DOCS / "settings.md").read_text() == markdown_page(plugins), (
        "run: kvtier config schema --markdown > docs/settings.md"
    )


def test_schema_is_up_to_date(plugins: Plugins) -> None:
    assert json.loads((DOCS / "settings.schema.json").read_text()) == json_schema(plugins), (
        "run: kvtier config schema > docs/settings.schema.json"
    )


def test_every_setting_is_on_the_page_with_its_variable(plugins: Plugins) -> None:
    page = markdown_page(plugins)
    nested = {name for name, field in Settings.model_fields.items() if nested_model(field)}
    for key in field_names(Settings):
        if key not in nested:
            assert f"### `{key}`\n\n`{variable_name(key)}`" in page


def test_every_setting_has_a_description(plugins: Plugins) -> None:
    models = [Settings, type(Settings().prefetch), PeerSettings, TLSSettings]
    models += [ControllerSettings, MetricsSettings, KVTransferSettings]
    models += [plugins.backend(name).settings_type for name in plugins.names("kvtier_backends")]
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} needs a description="


def test_example_on_the_page_is_valid(plugins: Plugins) -> None:
    tiers = plugins.tier_settings(load_settings(yaml.safe_load(EXAMPLE)))
    assert [tier.type for tier in tiers] == ["hugepage", "disk"]


def test_schema_covers_each_tier_type(plugins: Plugins) -> None:
    schema = json_schema(plugins)
    definitions = [
        item["$ref"].rpartition("/")[2] for item in schema["properties"]["tiers"]["items"]["anyOf"]
    ]
    assert definitions == [f"tier_{name}" for name in plugins.names("kvtier_backends")]
    assert {"tier_cpu", "tier_disk", "tier_redis"} < set(definitions)
    disk: dict[str, Any] = schema["$defs"]["tier_disk"]
    assert disk["properties"]["type"]["const"] == "disk"
    assert "path" in disk["required"]
    assert disk["additionalProperties"] is False


def test_format_value(plugins: Plugins) -> None:
    disk = plugins.backend("disk").settings_type.model_fields
    assert format_value(disk["capacity"], 5 << 30) == "5GiB"
    assert format_value(disk["queue"], 1 << 20) == "1MiB"
    assert format_value(disk["queue"], None) == ""
    assert format_value(disk["deadline"], 0.25) == "250ms"
    assert format_value(disk["direct"], True) == "true"
    assert format_value(disk["concurrency"], 4) == "4"


def yaml_blocks(path: Path) -> list[str]:
    """Return the YAML blocks of a Markdown page, or the content of a YAML file."""
    text = path.read_text()
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if path.suffix == ".md" else [text]


@pytest.mark.parametrize(
    "path",
    [
        DOCS / "controller.md",
        DOCS / "disaggregated.md",
        DOCS / "peers.md",
        DOCS / "pools.md",
        DOCS / "vllm.md",
        *sorted(path for path in EXAMPLES.rglob("*.yaml") if path.name not in ("cache.yaml", "serve.yaml")),
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_examples_in_pages_and_files_are_valid(
    path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_PASSWORD", "secret")
    monkeypatch.setenv("PEER_SECRET", "sixteen or more characters")
    monkeypatch.setenv("CONTROLLER_TOKEN", "a token")
    blocks = yaml_blocks(path)
    assert blocks
    for text in blocks:
        # A page may show a single tier, to be added after the first one.
        is_single_tier = text.lstrip().startswith("- ")
        values = {"tiers": yaml.safe_load(text)} if is_single_tier else yaml.safe_load(text)
        if is_single_tier:
            values["tiers"].insert(0, {"name": "ram", "type": "cpu", "capacity": "1GiB"})
        plugins.tier_settings(load_settings(values))
