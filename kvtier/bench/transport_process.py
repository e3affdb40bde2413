"""The second process of a transport benchmark: serve an arena to the first one until standard input ends.

Reads one line of JSON: ``[settings of the transport, lengths, plugins]``. Writes one line of JSON: an object
with the addresses and spans that the first process needs, or ``{"failed": reason}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import anyio
import anyio.to_thread

from kvtier.bench.raw_sockets import serving
from kvtier.errors import KVTierError
from kvtier.plugins import Plugins
from kvtier.testing.transport_side import Side
from kvtier.transports.base import Access

CPU_CLOCK = 2
"""``CPUCLOCK_SCHED`` of Linux's ``posix-timers.h``: CPU time of a process, all threads included."""


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU time of these processes, user and system, with nanosecond resolution.

    Processes that have exited count as 0: they only prepared memory.
    """
    seconds = 0.0
    for process in processes:
        with suppress(OSError):
            seconds += time.clock_gettime((~process << 3) | CPU_CLOCK)
    return seconds


def family(process: int) -> list[int]:
    """Return a process and all its descendants, in which a transport may run."""
    found = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


async def main() -> None:
    """Serve until standard input ends."""
    # Libraries print to stdout: redirect it to stderr, and keep the original for the reply.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings, lengths, plugins = json.loads(sys.stdin.readline())
    try:
        await _serve(replies, settings, lengths, plugins)
    except* KVTierError as group:
        replies.write(json.dumps({"failed": str(group.exceptions[0])}) + "\n")
        replies.flush()


async def _serve(
    replies: TextIO, settings: Mapping[str, Any], lengths: Sequence[int], plugins: Sequence[str] | None
) -> None:
    kind = Plugins.load(plugins).transport(settings["type"])
    async with Side.open(kind, settings, 2 * sum(lengths) + (1 << 20)) as side:
        spans = {access.value: side.grants.grant(lengths, access, 0) for access in Access}
        with serving(side.arena.view) as raw_port:
            reply = {
                "endpoint": side.transport.endpoint.hex(),
                "port": side.port,
                "raw_port": raw_port,
                "arena": f"/proc/{os.getpid()}/fd/{side.arena.fd}",
                "capacity": side.arena.capacity,
                "spans": spans,
            }
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
            await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(main)
