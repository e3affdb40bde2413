"""The child processes of a process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> set[int]:
    """Return the running child processes of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # The thread may have exited.
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def nixl_processes(pid: int) -> set[int]:
    """Return the children that load NIXL."""
    return {
        child
        for child in children(pid)
        if b"transports/nixl/worker.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    }
