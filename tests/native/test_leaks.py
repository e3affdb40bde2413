"""What is left when an interpreter ends is no fault, and nobody is told of one."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from kvtier.arena import Arena

arena = Arena.create(4 << 20)
arena.itself = arena
gc.freeze()
"""


def test_a_program_that_ends_with_an_arena_in_use_says_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
