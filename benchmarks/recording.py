"""Measure what recording the lookups of engines costs: CPU time, and bytes on disk.

::

    python -m benchmarks.recording
    python -m benchmarks.recording --rate 1000 --chunks 128

First, lookups of 128 chunks are recorded one after the other. Then they arrive at a rate, for some seconds:
the CPU time of the calls in the event loop, and of the thread that writes, is the cost of the recording. At
last, the recording is read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import anyio

from benchmarks.common import parse, show
from kvtier.concurrency.threads import WORKER_NAME
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording.file import LookedUp, RecordingFile
from kvtier.observability.recording.reader import read_recording
from kvtier.observability.recording.recorder import FLUSH_SECONDS, recording
from kvtier.settings.observability import RecordingSettings
from kvtier.units import MIB

CHUNKS = 128
CHUNK_TOKENS, CHUNK_BYTES = 256, 32 * MIB
BATCH = 50
"""The lookups that are written at once at 100 a second."""
PROMPTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of a recording.")
    parser.add_argument("--rate", type=int, default=100, help="lookups a second; default: %(default)s")
    parser.add_argument("--chunks", type=int, default=280, help="in each lookup; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn; default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    options = parse(parser, seconds=1.0, turns=1)
    with tempfile.TemporaryDirectory() as folder:
        one_by_one(Path(folder) / "batches")
        anyio.run(at_a_rate, Path(folder), options.rate, options.chunks, options.seconds, options.turns)


def one_by_one(path: Path) -> None:
    """Show the CPU time of the parts of recording a lookup of 128 chunks, and its size."""
    keys = [os.urandom(CHUNKS * KEY_BYTES) for _ in range(BATCH)]
    batch = [LookedUp(1.0, key, CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_BYTES, None) for key in keys]
    file = RecordingFile.open(RecordingSettings(path=path))
    before = path.stat().st_size
    file.write(batch)
    size = (path.stat().st_size - before) / BATCH
    rows = [
        ("in the event loop", timed(lambda: anyio.run(record_all, path.with_name("loop"), keys)) / BATCH),
        ("in the thread: hash, encode and write", timed(lambda: file.write(batch)) / BATCH),
    ]
    file.close()
    show(f"a lookup of {CHUNKS} chunks, CPU µs", ("part", "median"), rows)
    show("size", ("", "bytes"), [("lookup", size), ("chunk", size / CHUNKS)])


async def record_all(path: Path, keys: Sequence[bytes]) -> float:
    """Return the CPU seconds of passing the lookups to a recorder."""
    async with recording(RecordingSettings(path=path)) as recorder:
        began = time.thread_time()
        for key in keys:
            recorder.record(key, CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_BYTES, None)
        return time.thread_time() - began


def timed(call: Callable[[], float | None], runs: int = 30) -> float:
    """Return the median CPU microseconds of a call, or of the seconds that it returns."""
    seconds = []
    for _ in range(runs):
        began = time.thread_time()
        result = call()
        seconds.append(time.thread_time() - began if result is None else result)
    return statistics.median(seconds) * 1e6


async def at_a_rate(folder: Path, rate: int, chunks: int, seconds: float, turns: int) -> None:
    """Show the share of a core that a recording takes."""
    prompts = [os.urandom(chunks * KEY_BYTES) for _ in range(PROMPTS)]
    path = folder / "traffic"
    loop, thread, written = [], [], 0
    for _ in range(turns):
        async with recording(RecordingSettings(path=path)) as recorder:

            def record(keys: bytes) -> None:
                recorder.record(keys, chunks * CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_BYTES, None)

            loop.append(100 * await arriving(prompts, rate, seconds, record) / seconds)
            thread.append(100 * thread_seconds() / seconds)
        written = path.stat().st_size
        assert recorder.status()["dropped"] == 0
    hourly = written / seconds * 3600 / 1e6
    show(
        f"{rate} lookups a second of {chunks} chunks, {turns} turns of {seconds:g} s",
        ("", "median", "maximum"),
        [
            ("event loop, % of a core", statistics.median(loop), max(loop)),
            ("thread, % of a core", statistics.median(thread), max(thread)),
            ("MB an hour", hourly, hourly),
        ],
    )
    began, count = time.perf_counter(), sum(len(request.chunks) for request in read_recording(path))
    show("reading", ("", "per second"), [("chunks", count / (time.perf_counter() - began))])


def thread_seconds() -> float:
    """Return the CPU seconds of the thread that writes, since it was started."""
    [writer] = [thread for thread in threading.enumerate() if thread.name == WORKER_NAME]
    assert writer.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(writer.ident))


async def arriving(
    prompts: Sequence[bytes], rate: int, seconds: float, record: Callable[[bytes], None]
) -> float:
    """Pass prompts to ``record`` at a rate; return the CPU seconds of its calls."""
    began, cpu = time.monotonic(), 0.0
    for number, prompt in zip(range(round(rate * seconds)), cycle(prompts), strict=False):
        await anyio.sleep(max(0.0, began + number / rate - time.monotonic()))
        before = time.thread_time()
        record(prompt)
        cpu += time.thread_time() - before
    await anyio.sleep(max(0.0, began + seconds - time.monotonic()) + FLUSH_SECONDS)
    return cpu


if __name__ == "__main__":
    main()
