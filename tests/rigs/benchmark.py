"""Small benchmark runs, each in its own process: benchmarks stop processes and change logging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 280


def run_benchmark(name: str, *options: str) -> str:
    """Run ``python -m benchmarks.NAME`` and return its output. Fails the test if the benchmark fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    # The threads of torch spin: with small sizes, they would take most of the time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
