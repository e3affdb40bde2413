"""The README's first screen is right about a clone, and the examples for programs run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="the example stores a torch tensor")


@pytest.mark.parametrize("page", [pytest.param("README.md", marks=NEEDS_TORCH), "docs/api/cache.md"])
def test_library_example_runs(page: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (README.parent / page).read_text(), re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    environment["KVTIER_TIERS"] = '[{"name": "ram", "type": "cpu", "capacity": "64MiB"}]'
    result = subprocess.run(
        [sys.executable, "-c", example], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "1000 tokens came back\n"), result.stderr


def test_first_screen_is_about_a_clone() -> None:
    """Nothing is published, so ``pip install`` is not the first command that a reader can run."""
    readme = README.read_text()
    first, *_ = re.findall(r"```\n(.*?)```", readme, re.DOTALL)
    targets = re.findall(r"(?m)^make (\S+)$", first)
    assert targets == ["demo", "test"]
    makefile = (README.parent / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    clone, later = readme.split("Once kvtier is published", maxsplit=1)
    assert "were not measured on a GPU" in clone
    assert "pip install" not in clone
    assert 'pip install "kvtier[vllm]"' in later
