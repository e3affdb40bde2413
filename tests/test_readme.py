"""The example in the README runs unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(find_spec("torch") is None, reason="the example stores a torch tensor")
def test_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    environment["KVTIER_TIERS"] = '[{"name": "ram", "type": "cpu", "capacity": "64MiB"}]'
    result = subprocess.run(
        [sys.executable, "-c", example], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "1000 tokens came back\n"), result.stderr
