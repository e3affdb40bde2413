"""Runs ``worker_side.py`` in a process of its own: vLLM changes the interpreter it is imported into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).with_name("worker_side.py")
ROOT = TESTS.parents[2]


def test_copies_that_are_under_way() -> None:
    # vLLM and torch warn of what they do themselves.
    command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=", "-p", "no:cacheprovider", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout
