"""A plugin package, installed in a folder that only selected processes search."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs import forks

PACKAGE = Path(__file__).parent / "package"

Python = Callable[..., "subprocess.CompletedProcess[str]"]
Kvtier = Callable[..., "subprocess.CompletedProcess[str]"]


def install(source: Path, site: Path) -> None:
    """Install a pure-Python package like pip: copy the modules and write the metadata."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    for module in (source / "src").iterdir():
        shutil.copytree(module, site / module.name, ignore=shutil.ignore_patterns("__pycache__"))
    write_metadata(site, project["name"], project["version"], project["entry-points"]["kvtier"])


def write_metadata(site: Path, name: str, version: str, entry_points: dict[str, str]) -> None:
    """Write the metadata of an installed distribution."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{entry} = {target}" for entry, target in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[kvtier]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for installed plugins."""
    path = tmp_path / "site"
    path.mkdir()
    return path


@pytest.fixture
def example_installed(site: Path) -> Path:
    """Install the example package."""
    install(PACKAGE, site)
    return site


@pytest.fixture
def variables(site: Path) -> dict[str, str]:
    """Environment variables of a process that finds the packages in ``site``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return {**clean, "PYTHONPATH": str(site), "COLUMNS": "200", "NO_COLOR": "1"}


@pytest.fixture
def python(variables: dict[str, str]) -> Python:
    """Run a Python interpreter that finds the packages in ``site``."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**variables, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def kvtier(variables: dict[str, str]) -> Kvtier:
    """Run a command in a forked process that finds the packages in ``site``."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**variables, **more}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = forks.python("kvtier", *arguments, environment=environment, **pipes)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, process.wait(), output, errors)

    return run
