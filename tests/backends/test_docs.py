"""What the page on backends shows is what the template is, and what it says to type works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvtier_template
import pytest
import yaml

from kvtier import TierError, load_settings
from kvtier.backends.base import SupportsCheck
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings
from tests.plugins.conftest import install

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending" / "backends.md").read_text()
TEMPLATE = ROOT / "plugins" / "kvtier-template"
MODULE = "plugins/kvtier-template/src/kvtier_template/__init__.py"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The code of one language on the page: the file that it is said to be of, or nothing, and the text."""
    yield from re.findall(rf"(?:<!-- (\S+) -->\n)?```{language}\n(.*?)```", TEXT, re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_module_is_shown_from_its_first_line_to_its_last() -> None:
    shown = [code for path, code in blocks("python") if path == MODULE]
    assert lines("\n".join(shown)) == lines((ROOT / MODULE).read_text())


@pytest.mark.parametrize("language", ["python", "toml"])
def test_what_is_shown_of_other_files_is_in_them(language: str) -> None:
    shown = [(path, code) for path, code in blocks(language) if path]
    assert shown
    for path, code in shown:
        assert code in (ROOT / path).read_text()


def unnamed(word: str) -> dict[str, Any]:
    """The names that a piece of code leaves which carries on with the module."""
    (code,) = [code for path, code in blocks("python") if not path and word in code]
    names = dict(vars(kvtier_template))
    exec(compile(code, "backends.md", "exec"), names)
    return names


def test_settings_for_a_medium_of_this_host_alone(tmp_path: Path) -> None:
    settings_type = unnamed("LocalTierSettings")["LocalTemplateSettings"]
    assert issubclass(settings_type, LocalTierSettings)
    settings = settings_type(name="a", type="b", path=tmp_path, capacity="1GiB")
    assert (settings.capacity, settings.eviction) == (1 << 30, "lru")


@pytest.mark.anyio
async def test_a_backend_that_says_how_it_is(tmp_path: Path) -> None:
    backend_type = unnamed("SupportsCheck")["CheckedTemplateBackend"]
    backend = backend_type(backend_type.settings_type(name="a", type="template", path=tmp_path / "chunks"))
    assert isinstance(backend, SupportsCheck)
    with pytest.raises(TierError, match="see that it is mounted"):
        await backend.check()
    await backend.open()
    assert re.fullmatch(r".*/chunks, \d+GiB of \d+GiB free", await backend.check())


def test_the_tiers_are_right() -> None:
    ((_, code),) = blocks("yaml")
    tiers = Plugins.load(["kvtier-template"]).tier_settings(load_settings(yaml.safe_load(code)))
    assert [(tier.name, tier.type) for tier in tiers] == [("ram", "cpu"), ("shared", "template")]


def test_the_line_of_kvtier_plugins() -> None:
    (shown,) = re.findall(r"^template +kvtier-template .*$", TEXT, re.MULTILINE)
    told = subprocess.run(
        [sys.executable, "-m", "kvtier", "plugins"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split() in [line.split() for line in told.splitlines()]


@pytest.mark.slow
def test_a_copy_under_another_name_passes_the_suite(tmp_path: Path) -> None:
    (commands,) = re.findall(r"## 1\. .*?```\n(.*?)pip install", TEXT, re.DOTALL)
    (tmp_path / "plugins").symlink_to(ROOT / "plugins")
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True)
    copy = tmp_path / "kvtier-shelf"
    install(copy, tmp_path / "site")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy)]
    found = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "template" not in (copy / "src" / "kvtier_shelf" / "__init__.py").read_text().lower()
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", found.stdout).groups()
    # Skipped are scanning and being memory, which the template leaves out.
    assert (int(passed) > 45, int(skipped)) == (True, 2)


def test_every_built_in_is_described() -> None:
    for name in Plugins.load([]).names("kvtier_backends"):
        assert f"| `{name}` |" in TEXT
