"""The backend that the documentation shows works as it stands, and passes the suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvtier.plugins import Plugins

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "backends.md"


def write_examples(folder: Path) -> list[str]:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code)
    return [name for name, _ in blocks]


def test_the_example_passes_the_suite(tmp_path: Path) -> None:
    assert write_examples(tmp_path) == ["kvtier_sqlite.py", "test_kvtier_sqlite.py"]
    (tmp_path / "pytest.ini").write_text("[pytest]\nkvtier_checks = true\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", found.stdout).groups()
    # Skipped are scanning, being memory and corruption, which the example leaves out.
    assert (int(passed) > 40, int(skipped)) == (True, 3)


def test_every_built_in_is_described() -> None:
    text = PAGE.read_text()
    for name in Plugins.load([]).names("kvtier_backends"):
        assert f"| `{name}` |" in text
