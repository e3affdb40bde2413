"""Each rerun test is listed at the end of the run, whether or not it passes then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
def test_that_passes():
    pass

def test_that_passes_later(attempts=[]):
    attempts.append(1)
    assert len(attempts) == 2, "the first attempt"

def test_that_never_passes():
    raise ValueError("more than\\none line")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_reruns_are_listed_with_their_first_failure(tmp_path: Path, workers: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", workers, "--reruns", "1", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *_, title, first, first_reason, second, second_reason, totals = result.stdout.splitlines()
    assert "2 run again" in title
    found = sorted([(first, first_reason), (second, second_reason)])
    assert found[0][0] == "test_some.py::test_that_never_passes (failed again)"
    assert found[0][1].endswith("test_some.py:10: ValueError: more than")
    assert found[1][0] == "test_some.py::test_that_passes_later (passed then)"
    assert found[1][1].endswith("test_some.py:7: AssertionError: the first attempt")
    assert "1 failed, 2 passed" in totals
    assert "2 rerun" in totals
