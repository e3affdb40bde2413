"""A small file system, to test a full disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of ``mib`` MiB at ``path``. Skips the test without permission to mount."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "kvtier-test", str(path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"cannot mount a small file system here: {result.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
