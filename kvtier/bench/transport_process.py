"""The other process of a transport that is measured: its arena is read and written until its input ends.

One line of JSON in: ``[settings of the transport, lengths, plugins]``. One out: what the first process
needs to know, or ``{"failed": why}``.
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
"""CPUCLOCK_SCHED: how long a process has run, with all its threads. Linux, posix-timers.h."""


def cpu_seconds(processes: Iterable[int]) -> float:
    """How long these processes have run so far, in user mode and in the kernel, to the nanosecond.

    One that has ended counts as if it had never run: such are those that prepare memory, and are done.
    """
    seconds = 0.0
    for process in processes:
        with suppress(OSError):
            seconds += time.clock_gettime((~process << 3) | CPU_CLOCK)
    return seconds


def family(process: int) -> list[int]:
    """A process and those that it has started, in which a transport may do its work."""
    found = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


async def main() -> None:
    """Serve until standard input ends."""
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings, lengths, plugins = json.loads(sys.stdin.readline())
    try:
        await _serve(answers, settings, lengths, plugins)
    except* KVTierError as group:
        answers.write(json.dumps({"failed": str(group.exceptions[0])}) + "\n")
        answers.flush()


async def _serve(
    answers: TextIO, settings: Mapping[str, Any], lengths: Sequence[int], plugins: Sequence[str] | None
) -> None:
    kind = Plugins.load(plugins).transport(settings["type"])
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
