"""List the open files of this process, for leak tests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files() -> list[str]:
    """Return the number and target of each descriptor, except those on /proc, which the loop watch opens."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            if not target.startswith("/proc/"):
                found.append(f"{entry.name} {target}")
    return found
