"""The other process of the benchmark of the transports: its arena is read and written until its input ends.

One line of JSON in: ``[transport, its settings, lengths]``. One out: what the first process needs to know.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from benchmarks.transports_raw import serving
from kvtier.plugins import Plugins
from kvtier.testing.transport_side import Side
from kvtier.transports.base import Access

CPU_CLOCK = 2
"""CPUCLOCK_SCHED: how long a process has run, with all its threads. Linux, posix-timers.h."""


def cpu_seconds(processes: Iterable[int]) -> float:
    """How long these processes have run so far, in user mode and in the kernel, to the nanosecond."""
    return sum(time.clock_gettime((~process << 3) | CPU_CLOCK) for process in processes)


def family(process: int) -> list[int]:
    """A process and those that it has started, in which a transport may do its work."""
    found = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


async def main() -> None:
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, settings, lengths = json.loads(sys.stdin.readline())
    kind = Plugins.load([]).transport(name)
    async with Side.open(kind, settings, 2 * sum(lengths) + (1 << 20)) as side:
        spans = {access.value: side.grants.grant(lengths, access, 0) for access in Access}
        with serving(side.arena.view) as raw_port:
            answer = {
                "endpoint": side.transport.endpoint.hex(),
                "port": side.port,
                "raw_port": raw_port,
                "arena": f"/proc/{os.getpid()}/fd/{side.arena.fd}",
                "capacity": side.arena.capacity,
                "spans": spans,
            }
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(main)
