"""Benchmarks in small, each in a process of its own: they stop processes, and change what is logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 280


def run_benchmark(name: str, *options: str) -> str:
    """What ``python -m benchmarks.NAME`` prints. Fails where it does."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
