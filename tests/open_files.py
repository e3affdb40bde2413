"""What this process has open, for tests that nothing is left open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files() -> list[str]:
    """Number and target of each descriptor, those on /proc left out: the watch of the loop opens some."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            if not target.startswith("/proc/"):
                found.append(f"{entry.name} {target}")
    return found
