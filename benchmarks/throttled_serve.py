"""``kvtier serve`` with a disk that reads at most as fast as given: ``throttled_serve.py BYTES_PER_SECOND``.

0 does not throttle. While the file that ``THROTTLE`` names exists, its content replaces the argument.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from kvtier.backends.base import Outcome
from kvtier.backends.disk.backend import DiskBackend
from kvtier.cli import main


def throttle(bytes_per_second: float) -> None:
    """Let reads of all disk tiers share a bandwidth, in the order in which they begin."""
    healthy, changed = DiskBackend.get, Path(os.environ.get("THROTTLE", "/nonexistent"))
    free_at = 0.0

    async def slow(self: DiskBackend, items: Sequence[Any]) -> Sequence[Outcome]:
        nonlocal free_at
        speed = float(changed.read_text()) if changed.exists() else bytes_per_second
        ends = free_at
        if speed:
            ends = free_at = max(time.monotonic(), free_at) + sum(len(view) for _, view in items) / speed
        outcomes: Sequence[Outcome] = await healthy(self, items)
        await anyio.sleep(max(0.0, ends - time.monotonic()))
        return outcomes

    DiskBackend.get = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    throttle(float(sys.argv[1]))
    main(["serve", "--log-level", "WARNING"])
