"""The open files of this process: a list of them for leak tests, and no more of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def sockets() -> int:
    """Return the number of open sockets of this process."""
    return sum(" socket:" in file for file in open_files())


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Take all descriptors of this process below a low limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
