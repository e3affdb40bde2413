"""Objects that remain when the interpreter exits cause no warnings."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from kvtier.memory.arena import Arena

arena = Arena.create(4 << 20)
arena.itself = arena
gc.freeze()
"""


def test_exit_with_an_open_arena_prints_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
