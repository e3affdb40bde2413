"""Run ``kvtier serve`` with a faulty disk: ``python faulty_serve.py HOLD FAULT...``

- ``fail-get``, ``fail-put``: every read or write fails
- ``hang-get``, ``hang-put``: no read or write completes
- ``slow-get``, ``slow-put``: each batch takes a third of a second longer
- ``hold-get``, ``hold-put``: no read or write completes while the file ``HOLD`` exists
- ``holdrest-get``: likewise, but the first two reads complete; each is of one chunk
- ``failrest-get``: likewise, and then the others fail
- ``forget-put``: writes complete, and store nothing
- ``other-get``: reads return the right header, and other bytes than were written: a corrupt chunk or, unless
  checksums are verified, the content of another chunk
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
from kvtier.memory.header import HEADER_BYTES
from kvtier.tiers import batches

SLOW_SECONDS = 0.33
HEALTHY_CALLS = 2
POLL_SECONDS = 0.02


def inject_fault(name: str, how: str, hold: Path) -> None:
    """Wrap one method of the disk backend with a fault."""
    healthy = getattr(DiskBackend, name)
    rest = how.endswith("rest")
    calls = 0
    if rest:
        batches.BATCH_BYTES = 1

    async def faulty(self: DiskBackend, items: Sequence[Any]) -> Sequence[Outcome]:
        nonlocal calls
        calls += 1
        if rest and calls <= HEALTHY_CALLS:
            result: Sequence[Outcome] = await healthy(self, items)
            return result
        while how == "hang" or (how in {"hold", "holdrest", "failrest"} and hold.exists()):
            await anyio.sleep(POLL_SECONDS)
        if how in {"fail", "failrest"}:
            return [Outcome.FAILED] * len(items)
        if how == "forget":
            return [Outcome.OK] * len(items)
        await anyio.sleep(SLOW_SECONDS if how == "slow" else 0)
        outcomes: Sequence[Outcome] = await healthy(self, items)
        if how == "other":
            for _, view in items:
                payload = view[HEADER_BYTES : len(view) - len(view) % 4]
                payload[:] = bytes(payload[len(payload) // 8 * 4 :]) + bytes(payload[: len(payload) // 8 * 4])
            return [Outcome.OK if outcome is Outcome.VERIFIED else outcome for outcome in outcomes]
        return outcomes

    setattr(DiskBackend, name, faulty)


def serve(hold: Path, faults: Sequence[str]) -> None:
    """Inject faults, and run ``kvtier serve``."""
    for fault in faults:
        kind, method = fault.split("-")
        inject_fault(method, kind, hold)
    main(["serve"])


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
