"""``kvtier serve`` with a disk that is not well: ``python faulty_serve.py HOLD FAULT...``

- ``fail-get``, ``fail-put``: every read, or write, fails
- ``hang-get``, ``hang-put``: none ever ends
- ``slow-get``, ``slow-put``: each batch takes a third of a second longer
- ``hold-get``, ``hold-put``: none ends before the file ``HOLD`` is gone
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from kvtier.backends.base import Outcome
from kvtier.backends.disk import DiskBackend
from kvtier.cli import main

SLOW_SECONDS = 0.33
POLL_SECONDS = 0.02


def spoil(name: str, how: str, hold: Path) -> None:
    """Put a fault in front of one method of the disk backend."""
    healthy = getattr(DiskBackend, name)

    async def faulty(self: DiskBackend, items: Sequence[Any]) -> Sequence[Outcome]:
        if how == "fail":
            return [Outcome.FAILED] * len(items)
        while how == "hang" or (how == "hold" and hold.exists()):
            await anyio.sleep(POLL_SECONDS)
        await anyio.sleep(SLOW_SECONDS if how == "slow" else 0)
        outcomes: Sequence[Outcome] = await healthy(self, items)
        return outcomes

    setattr(DiskBackend, name, faulty)


if __name__ == "__main__":
    for fault in sys.argv[2:]:
        kind, method = fault.split("-")
        spoil(method, kind, Path(sys.argv[1]))
    main(["serve"])
