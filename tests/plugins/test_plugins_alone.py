"""The tests of each plugin can be run without those of kvtier, as its authors do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = sorted(Path(__file__).parents[2].glob("plugins/*/pyproject.toml"))


@pytest.mark.parametrize("project", PLUGINS, ids=lambda path: path.parent.name)
def test_each_test_module_is_collected(project: Path) -> None:
    """With the plugin's own settings of pytest: marks and warnings."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=project.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
