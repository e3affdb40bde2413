"""CI runs a part of the slow tests for each commit, within a time limit. All parts together are all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(200))
def test_some(number):
    pass
"""
MAKE = """#!/bin/sh
echo "make $*"
case "$*" in *test-slow*) exec sleep "$SLOW";; esac
"""


def select(folder: Path, part: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--part", part],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_each_test_is_in_exactly_one_part(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    parts = [
        [line for line in select(tmp_path, f"{part}/4").stdout.splitlines() if "::" in line]
        for part in (1, 2, 3, 4)
    ]
    every = [f"test_some.py::test_some[{number}]" for number in range(200)]
    assert sorted(test for part in parts for test in part) == sorted(every)
    assert min(map(len, parts)) > 30


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "a/b"])
def test_part_that_does_not_exist_is_refused(tmp_path: Path, part: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    result = select(tmp_path, part)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "write 2/4 for the second of four" in result.stderr


def run_ci(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``.ci/run`` of a copy without git, with a ``make`` that prints its arguments."""
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    make = folder / "bin" / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    path = f"{make.parent}:{os.environ['PATH']}"
    return subprocess.run(
        [folder / ".ci" / "run"],
        env={**os.environ, "PATH": path, "GIT_CEILING_DIRECTORIES": str(folder.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ci_ends_with_one_part_of_the_slow_tests(tmp_path: Path) -> None:
    result = run_ci(tmp_path, SLOW="0")
    assert result.stdout.splitlines() == [
        "make lint docs",
        "make test",
        "make test-upstream",
        "make test-slow PART=1/4",
    ]
    assert result.returncode == 0


def test_ci_fails_with_the_reason_once_its_time_is_over(tmp_path: Path) -> None:
    result = run_ci(tmp_path, SLOW="600", LIMIT="5")
    assert result.returncode == 124
    assert "the slow tests (part 1/4) were not done within" in result.stderr
