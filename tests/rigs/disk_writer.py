"""Write chunks to a disk tier until killed: ``python -m tests.rigs.disk_writer DIR uring direct``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import anyio

from kvtier.testing.backend import make_key
from tests.rigs.chunks import chunk, disk
from tests.rigs.composed_backends import SealedBackend

KEYS = [make_key(number) for number in range(24)]


def payload_bytes(round_: int, number: int) -> int:
    return 1000 + (round_ * 7919 + number * 104_729) % 600_000


async def main(path: Path, io: str, way: str) -> None:
    backend = SealedBackend(disk(path, io=io, direct=way == "direct"))
    await backend.open()
    for round_ in itertools.count():
        items = [
            (key, chunk(key, payload_bytes(round_, number), seed=b"%d" % round_))
            for number, key in enumerate(KEYS)
            if (round_ + number) % 3
        ]
        outcomes = await backend.put(items)
        await backend.delete([key for number, key in enumerate(KEYS) if not (round_ + number) % 5])
        print(round_, [outcome.value for outcome in outcomes].count("ok"), flush=True)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
