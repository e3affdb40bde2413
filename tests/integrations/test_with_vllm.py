"""Runs the tests that need vLLM in separate processes: vLLM changes the interpreter that imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.vllm.forks import forks

pytestmark = pytest.mark.vllm

FOLDER = Path(__file__).parent


def run(tests: Path, log: Path) -> None:
    """Main function of the process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Ignore warnings that vLLM and torch cause themselves.
    sys.exit(pytest.main(["-q", "-o", "filterwarnings=", "-p", "no:cacheprovider", str(tests)]))


@pytest.mark.parametrize(
    ("tests", "count"),
    [
        ("worker_side.py", 23),
        ("cuda_side.py", 22),
        ("scheduler_side.py", 55),
        ("answers_side.py", 9),
        ("reports_side.py", 2),
        ("connector_side.py", 9),
        ("layout_side.py", 56),
        ("saves_side.py", 20),
        ("kv_events_side.py", 39),
        ("weights_side.py", 14),
        ("parted_side.py", 26),
    ],
)
def test_with_vllm(tmp_path: Path, tests: str, count: int) -> None:
    log = tmp_path / "log"
    process = forks().Process(target=run, args=(FOLDER / tests, log))
    process.start()
    process.join()
    output = log.read_text()
    assert process.exitcode == 0, output
    assert f"{count} passed" in output
