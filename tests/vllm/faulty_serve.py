"""Run ``kvtier serve`` with a faulty disk: ``python faulty_serve.py HOLD FAULT...``

- ``fail-get``, ``fail-put``: every read or write fails
- ``hang-get``, ``hang-put``: no read or write completes
- ``slow-get``, ``slow-put``: each batch takes a third of a second longer
- ``hold-get``, ``hold-put``: no read or write completes while the file ``HOLD`` exists
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from kvtier.backends.base import Outcome
from kvtier.backends.disk.backend import DiskBackend
from kvtier.cli import main

SLOW_SECONDS = 0.33
POLL_SECONDS = 0.02


def inject_fault(name: str, how: str, hold: Path) -> None:
    """Wrap one method of the disk backend with a fault."""
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
        inject_fault(method, kind, Path(sys.argv[1]))
    main(["serve"])
