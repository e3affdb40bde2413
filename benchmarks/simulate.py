"""Measure ``kvtier simulate`` on a long trace: seconds per 100 million chunks, and memory.

::

    python -m benchmarks.simulate                        # a million requests: 0.9 GB in /tmp and minutes
    python -m benchmarks.simulate --requests 100000

The aim: a million requests of 100 chunks in less than a minute and 2 GB, on one core. Each request repeats a
conversation of 90 chunks and adds 10, so every seventh chunk is a new one. The cache holds a share of the
distinct ones, which decides how many are hits. Times are CPU times, of reading the file and of one replay,
without Belady's optimum. Memory is the peak of a process that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import parse, show
from kvtier.lab.simulation.replay import CHUNK_TOKENS, Model, replay
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.whatif.simulated_cache import one_tier
from kvtier.plugins import Plugins

CHUNKS = 100
NEW = 10
"""Chunks of a request, and how many of them no request had before."""
TURNS = 20
"""Requests of a conversation, after which another one begins."""
CONVERSATIONS = 0.002
"""How many are active at any time, per request of the trace."""
AIM_CHUNKS = 100_000_000
AIM_SECONDS = 60
AIM_BYTES = 2e9
SHARES = (0.002, 0.2)
"""Of the distinct chunks, how many the cache holds: few hits, and almost as many as possible."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure kvtier simulate on a long trace.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--policy", default="lru", help="default: %(default)s")
    options = parse(parser, requests=400)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        with trace.open("w") as file:
            file.writelines(lines(options.requests))
        rows = []
        for share in SHARES:
            with get_context("spawn").Pool(1) as process:
                rows.append((f"{share:.1%}", *process.apply(measure, (trace, options.policy, share))))
    show(
        f"{options.requests:,} requests of {CHUNKS} chunks, {options.policy}; the aim: {AIM_SECONDS} s and "
        f"{AIM_BYTES / 1e9:.0f} GB",
        ["cache", "hit rate", "read s per 100 million", "replay", "both", "peak GB"],
        rows,
    )


def lines(requests: int) -> Iterator[str]:
    """Yield the lines of a trace in the format of Mooncake."""
    chance, distinct = random.Random(0), 0
    active: list[list[str]] = [[] for _ in range(max(1, int(requests * CONVERSATIONS)))]
    turns = [chance.randrange(TURNS) for _ in active]
    for number in range(requests):
        at = chance.randrange(len(active))
        turns[at] += 1
        if turns[at] > TURNS or not active[at]:
            turns[at] %= TURNS
            active[at] = [str(distinct + index) for index in range(CHUNKS - NEW)]
            distinct += CHUNKS - NEW
        prompt = active[at] = active[at][: CHUNKS - NEW] + [str(distinct + index) for index in range(NEW)]
        distinct += NEW
        ids = ", ".join(prompt)
        yield (
            f'{{"timestamp": {number * 10}, "input_length": {CHUNKS * CHUNK_TOKENS}, "output_length": 100, '
            f'"hash_ids": [{ids}]}}\n'
        )


def measure(path: Path, policy: str, share: float) -> Sequence[object]:
    """Return hit rate, seconds per 100 million chunks to read a trace and to replay it, and peak GB."""
    started = time.process_time()
    trace = Trace.read(path, CHUNK_TOKENS)
    read = time.process_time()
    plugins, model = Plugins.load([]), Model()
    capacity = int(trace.unique * share) * model.chunk_bytes(trace)
    outcome = replay(trace, plugins, one_tier(plugins, policy, capacity, {}), model)
    replayed = time.process_time()
    scale = AIM_CHUNKS / outcome.asked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"{outcome.hit_rate:.0%}",
        (read - started) * scale,
        (replayed - read) * scale,
        (replayed - started) * scale,
        peak / 1e9,
    )


if __name__ == "__main__":
    main()
