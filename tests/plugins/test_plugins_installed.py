"""An installed package is found by its entry point, in a separate process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtier.hookspecs import hookspec
from tests.plugins.conftest import PACKAGE, Kvtier, Python, write_metadata

pytestmark = pytest.mark.usefixtures("example_installed")

TIERS = json.dumps(
    [
        {"name": "ram", "type": "cpu", "capacity": "1MiB", "eviction": "fifo"},
        {"name": "shelf", "type": "shelf", "capacity": "1MiB", "label": "top", "codec": "mirror"},
    ]
)


def hook_names() -> list[str]:
    import kvtier.hookspecs as module

    marker = f"{hookspec.project_name}_spec"
    return [name for name, value in vars(module).items() if hasattr(value, marker)]


def test_example_uses_every_hook() -> None:
    text = (PACKAGE / "src" / "kvtier_example" / "plugin.py").read_text()
    assert hook_names() == re.findall(r"@hookimpl\ndef (\w+)", text)


def test_plugins_command_lists_the_example(python: Python) -> None:
    loaded = {
        plugin["name"]: plugin for plugin in json.loads(python("-m", "kvtier", "plugins", "--json").stdout)
    }
    assert loaded["kvtier.backends"]["source"] == "built in"
    assert loaded["example"]["source"] == "kvtier-example 1.2.3"
    assert loaded["example"]["hooks"] == sorted(hook_names())
    assert loaded["example"]["provides"] == ["shelf", "pigeon", "fifo", "mirror"]


def test_plugins_table_shows_source_and_provided_names(kvtier: Kvtier) -> None:
    rows = kvtier("plugins").stdout.splitlines()
    (row,) = [row for row in rows if row.startswith("example ")]
    assert "kvtier-example 1.2.3" in row
    assert "shelf, pigeon, fifo, mirror" in row


def test_example_backend_and_policy_are_used(python: Python) -> None:
    script = """
import anyio
from kvtier import TieredCache, load_settings
async def run():
    async with TieredCache.open(load_settings()) as cache:
        shelf = cache.model('m', token_bytes=16)
        print([tier.settings.type for tier in cache.tiers])
        observers = [observer for observer in cache.observers if hasattr(observer, 'chunk_tokens')]
        print([observer.chunk_tokens for observer in observers])
anyio.run(run)
"""
    result = python("-c", script, KVTIER_TIERS=TIERS)
    assert result.stdout.splitlines() == ["['cpu', 'shelf']", "['auto']"], result.stderr


def test_example_settings_are_validated(kvtier: Kvtier) -> None:
    result = kvtier("config", "check", KVTIER_TIERS=TIERS.replace("label", "labl"))
    assert result.returncode == 1
    assert "tiers[1].label (in KVTIER_TIERS) is required, for example top" in result.stderr


def test_example_command_is_available(kvtier: Kvtier) -> None:
    assert kvtier("hello", "world").stdout == "Hello world, from a plugin\n"


def test_example_tier_type_is_in_the_schema(kvtier: Kvtier) -> None:
    schema = json.loads(kvtier("config", "schema").stdout)
    assert (
        schema["$defs"]["tier_shelf"]["properties"]["label"]["description"] == "What is written on the shelf."
    )


@pytest.mark.parametrize("name", ["kvtier-example", "kvtier_example", "example"])
def test_plugin_is_loaded_by_distribution_or_entry_point_name(kvtier: Kvtier, name: str) -> None:
    result = kvtier("plugins", "--json", KVTIER_PLUGINS=json.dumps([name]))
    assert "example" in [plugin["name"] for plugin in json.loads(result.stdout)]


def test_empty_list_loads_only_built_in_plugins(kvtier: Kvtier) -> None:
    result = kvtier("plugins", "--json", KVTIER_PLUGINS="[]")
    assert {plugin["source"] for plugin in json.loads(result.stdout)} == {"built in"}
    assert kvtier("hello", "world", KVTIER_PLUGINS="[]").returncode == 2


def test_plugin_that_is_not_installed(kvtier: Kvtier) -> None:
    result = kvtier("plugins", KVTIER_PLUGINS='["kvtier-exmaple"]')
    assert result.returncode == 1
    assert (
        "plugins lists 'kvtier-exmaple', which is not installed: did you mean kvtier-example?"
        in result.stderr
    )


def test_conflict_error_names_both_distributions(kvtier: Kvtier, site: Path) -> None:
    (site / "rival.py").write_text(
        "from kvtier import hookimpl\n"
        "from kvtier_example.plugin import ShelfBackend\n"
        "@hookimpl\ndef kvtier_backends(): return {'shelf': ShelfBackend}\n"
    )
    write_metadata(site, "kvtier-rival", "0.1", {"rival": "rival"})
    result = kvtier("plugins")
    assert result.returncode == 1
    claim = (
        "example (kvtier-example 1.2.3) and rival (kvtier-rival 0.1) both provide 'shelf' in kvtier_backends"
    )
    assert claim in result.stderr
    assert kvtier("plugins", KVTIER_PLUGINS='["rival"]').returncode == 0


def test_broken_plugin_is_named_and_other_commands_work(kvtier: Kvtier, site: Path) -> None:
    write_metadata(site, "kvtier-broken", "0.1", {"broken": "no_such_module"})
    result = kvtier("plugins")
    assert result.returncode == 1
    assert "plugin broken (kvtier-broken 0.1) cannot be imported (ModuleNotFoundError" in result.stderr
    assert "or remove it from the setting plugins" in result.stderr
    other = kvtier("inspect", "ls", str(site))
    assert other.returncode == 0
    assert "warning: plugin commands are not available" in other.stderr


@pytest.mark.slow
def test_pip_installs_the_example(tmp_path: Path, python: Python) -> None:
    target = tmp_path / "pip"
    command = [
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(PACKAGE),
    ]
    result = python(*command)
    assert result.returncode == 0, result.stderr
    loaded = json.loads(python("-m", "kvtier", "plugins", "--json", PYTHONPATH=str(target)).stdout)
    assert "kvtier-example 1.2.3" in [plugin["source"] for plugin in loaded]


def test_every_hook_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending" / "README.md").read_text()
    assert re.findall(r"^## `(\w+)\(", page, re.MULTILINE) == hook_names()
