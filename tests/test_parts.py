"""What conftest.py adds to pytest, and CI: parts of the tests, and a list of those that were run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MANY = """
import pytest

@pytest.mark.parametrize("number", range(200))
def test_some(number):
    pass
"""
UNSTABLE = """
def test_that_passes():
    pass

def test_that_passes_later(attempts=[]):
    attempts.append(1)
    assert len(attempts) == 2, "the first attempt"

def test_that_never_passes():
    raise ValueError("more than\\none line")
"""
MAKE = """#!/bin/sh
echo "make $*"
case "$*" in *test-slow*) exec sleep "$SLOW";; esac
"""


def run_pytest(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests with the options of the repository's own ``conftest.py``."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_some.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def select(folder: Path, part: str) -> subprocess.CompletedProcess[str]:
    return run_pytest(folder, MANY, "--collect-only", "-q", "--part", part)


def test_each_test_is_in_exactly_one_part(tmp_path: Path) -> None:
    parts = [
        [line for line in select(tmp_path, f"{part}/4").stdout.splitlines() if "::" in line]
        for part in (1, 2, 3, 4)
    ]
    every = [f"test_some.py::test_some[{number}]" for number in range(200)]
    assert sorted(test for part in parts for test in part) == sorted(every)
    assert min(map(len, parts)) > 30


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "a/b"])
def test_part_that_does_not_exist_is_refused(tmp_path: Path, part: str) -> None:
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
        "make test-slow PART=1/6",
    ]
    assert result.returncode == 0


def test_ci_fails_with_the_reason_once_its_time_is_over(tmp_path: Path) -> None:
    result = run_ci(tmp_path, SLOW="600", LIMIT="5")
    assert result.returncode == 124
    assert "the slow tests (part 1/6) were not done within" in result.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_reruns_are_listed_with_their_first_failure(tmp_path: Path, workers: str) -> None:
    """Each of them is, whether or not it passes then."""
    result = run_pytest(tmp_path, UNSTABLE, "-n", workers, "--reruns", "1")
    *_, title, first, first_reason, second, second_reason, totals = result.stdout.splitlines()
    assert "2 run again" in title
    found = sorted([(first, first_reason), (second, second_reason)])
    assert found[0][0] == "test_some.py::test_that_never_passes (failed again)"
    assert found[0][1].endswith("test_some.py:10: ValueError: more than")
    assert found[1][0] == "test_some.py::test_that_passes_later (passed then)"
    assert found[1][1].endswith("test_some.py:7: AssertionError: the first attempt")
    assert "1 failed, 2 passed" in totals
    assert "2 rerun" in totals
