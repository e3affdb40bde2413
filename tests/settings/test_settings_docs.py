"""The page and the schema in docs/ say what the models say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.plugins import Plugins
from kvtier.settings import Settings, load_settings
from kvtier.settings_controller import ControllerSettings, MetricsSettings
from kvtier.settings_hand_over import HandOverSettings
from kvtier.settings_peer import PeerSettings, TLSSettings
from kvtier.settings_schema import EXAMPLE, json_schema, markdown_page, shown
from kvtier.settings_sources import field_names, nested_model, variable_name

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([])


def test_the_page_is_up_to_date(plugins: Plugins) -> None:
    assert (DOCS / "settings.md").read_text() == markdown_page(plugins), (
        "run: kvtier config schema --markdown > docs/settings.md"
    )


def test_the_schema_is_up_to_date(plugins: Plugins) -> None:
    assert json.loads((DOCS / "settings.schema.json").read_text()) == json_schema(plugins), (
        "run: kvtier config schema > docs/settings.schema.json"
    )


def test_every_setting_is_on_the_page_with_its_variable(plugins: Plugins) -> None:
    page = markdown_page(plugins)
    nested = {name for name, field in Settings.model_fields.items() if nested_model(field)}
    for key in field_names(Settings):
        if key not in nested:
            assert f"### `{key}`\n\n`{variable_name(key)}`" in page


def test_every_setting_is_described(plugins: Plugins) -> None:
    models = [Settings, type(Settings().prefetch), PeerSettings, TLSSettings]
    models += [ControllerSettings, MetricsSettings, HandOverSettings]
    models += [plugins.backend(name).settings_type for name in plugins.names("kvtier_backends")]
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} needs a description="


def test_the_example_on_the_page_is_right(plugins: Plugins) -> None:
    tiers = plugins.tier_settings(load_settings(yaml.safe_load(EXAMPLE)))
    assert [tier.type for tier in tiers] == ["hugepage", "disk"]


def test_the_schema_knows_each_tier_type(plugins: Plugins) -> None:
    schema = json_schema(plugins)
    kinds = [item["$ref"].rpartition("/")[2] for item in schema["properties"]["tiers"]["items"]["anyOf"]]
    assert kinds == [f"tier_{name}" for name in plugins.names("kvtier_backends")]
    assert {"tier_cpu", "tier_disk", "tier_redis"} < set(kinds)
    disk: dict[str, Any] = schema["$defs"]["tier_disk"]
    assert disk["properties"]["type"]["const"] == "disk"
    assert "path" in disk["required"]
    assert disk["additionalProperties"] is False


def test_values_are_shown_as_people_write_them(plugins: Plugins) -> None:
    disk = plugins.backend("disk").settings_type.model_fields
    assert shown(disk["capacity"], 5 << 30) == "5GiB"
    assert shown(disk["queue"], 1 << 20) == "1MiB"
    assert shown(disk["queue"], None) == ""
    assert shown(disk["deadline"], 0.25) == "250ms"
    assert shown(disk["direct"], True) == "true"
    assert shown(disk["concurrency"], 4) == "4"


def yaml_of(path: Path) -> list[str]:
    """The YAML that a page shows, or that a file is."""
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
        # Kubernetes' own are looked at in tests/examples.
        *sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "kubernetes"),
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_what_is_shown_can_be_used(path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_PASSWORD", "secret")
    monkeypatch.setenv("PEER_SECRET", "sixteen or more characters")
    monkeypatch.setenv("CONTROLLER_TOKEN", "a token")
    shown = yaml_of(path)
    assert shown
    for text in shown:
        # A page may show a tier alone, to be put after the first.
        alone = text.lstrip().startswith("- ")
        values = {"tiers": yaml.safe_load(text)} if alone else yaml.safe_load(text)
        if alone:
            values["tiers"].insert(0, {"name": "ram", "type": "cpu", "capacity": "1GiB"})
        plugins.tier_settings(load_settings(values))
