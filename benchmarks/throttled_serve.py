"""``kvtier serve`` with disks and peers of a given speed: ``throttled_serve.py BYTES_PER_SECOND``.

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
from kvtier.peers.backend import PeersBackend


def throttle(medium: type[DiskBackend | PeersBackend], bytes_per_second: float) -> None:
    """Let all reads from a kind of medium share a bandwidth, in the order in which they begin."""
    healthy: Any = medium.get
    changed = Path(os.environ.get("THROTTLE", "/nonexistent"))
    free_at = 0.0

    async def slow(self: DiskBackend | PeersBackend, items: Sequence[Any]) -> Sequence[Outcome]:
        nonlocal free_at
        speed = float(changed.read_text()) if changed.exists() else bytes_per_second
        ends = free_at
        if speed:
            ends = free_at = max(time.monotonic(), free_at) + sum(len(view) for _, view in items) / speed
        outcomes: Sequence[Outcome] = await healthy(self, items)
        await anyio.sleep(max(0.0, ends - time.monotonic()))
        return outcomes

    medium.get = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    for kind in (DiskBackend, PeersBackend):
        throttle(kind, float(sys.argv[1]))
    main(["serve", "--log-level", "WARNING"])
