"""Measure the catalog at full size: bytes per entry, call times, and the longest pauses.

::

    python -m benchmarks.catalog                     # ten million entries: 2 GiB and a minute
    python -m benchmarks.catalog --entries 100000

Prompts of 128 chunks, all in the second tier and every tenth also in the first. Lookups use randomly chosen
prompts, with new key objects as they arrive from the socket, so that neither the CPU caches nor a cached hash
helps. Bytes are the growth of the process, including the keys. Times are CPU times of the thread, so that the
longest one is a pause of the catalog and not of a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from benchmarks.common import parse, show
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.keys import KEY_BYTES, ChunkKey, split_keys

PROMPT_CHUNKS = 128
CHUNK_BYTES = 4 << 20
FAST, SLOW = 0, 1
FAST_EVERY = 10
VICTIMS = 1024
BATCH = 16
"""Chunks that are evicted, and replaced, at once."""
CALLS = 2000

ArgumentT = TypeVar("ArgumentT")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the catalog at full size.")
    parser.add_argument("--entries", type=int, default=10_000_000, help="default: %(default)s")
    prompts = max(1, parse(parser, entries=2560).entries // PROMPT_CHUNKS)

    catalog = Catalog([LruPolicy.factory(), LruPolicy.factory()])
    seconds = array("f", bytes(4 * prompts * PROMPT_CHUNKS))
    before = resident_bytes()
    fill(catalog, prompts, seconds)
    grown = resident_bytes() - before
    rows = [figures("add a chunk", seconds)]
    picked = random.Random(0).choices(range(prompts), k=CALLS)
    calls = {
        f"prefix of {PROMPT_CHUNKS} chunks": timed(catalog.prefix, map(prompt_keys, picked)),
        "the same prompt again": timed(catalog.prefix, [prompt_keys(0)] * CALLS),
        f"touch of {PROMPT_CHUNKS} chunks": timed(catalog.touch, map(prompt_keys, picked)),
        f"the {VICTIMS} coldest": timed(lambda tier: coldest(catalog, tier), [SLOW] * 100),
        f"replace the {BATCH} coldest": timed(partial(replace_coldest, catalog), newcomers(CALLS)),
        "full garbage collection": timed(lambda _: gc.collect(), range(3)),
    }
    rows += [figures(name, taken) for name, taken in calls.items()]
    title = f"{len(catalog):,} entries of {grown / len(catalog):.0f} bytes; CPU time of a call, µs"
    show(title, ("", "median", "p99", "worst"), rows)


def fill(catalog: Catalog, prompts: int, seconds: array[float]) -> None:
    """Add all chunks to the second tier, and some to the first. ``seconds``: receives the former's times."""
    for prompt in range(prompts):
        keys = prompt_keys(prompt)
        for index, (parent, key) in enumerate(zip([None, *keys], keys, strict=False)):
            started = time.thread_time()
            catalog.add(key, SLOW, CHUNK_BYTES, State.READY, parent)
            seconds[prompt * PROMPT_CHUNKS + index] = time.thread_time() - started
            if prompt % FAST_EVERY == 0:
                catalog.add(key, FAST, CHUNK_BYTES, State.READY, parent)


def prompt_keys(prompt: int) -> list[ChunkKey]:
    """Return the keys of a prompt, as new objects."""
    return split_keys(blake3(prompt.to_bytes(8, "little")).digest(KEY_BYTES * PROMPT_CHUNKS))


def newcomers(calls: int) -> Iterator[Sequence[ChunkKey]]:
    """Yield batches of keys that belong to no other prompt."""
    for call in range(calls):
        seeds = (b"newcomer" + call.to_bytes(4) + bytes([index]) for index in range(BATCH))
        yield [ChunkKey(blake3(seed).digest()) for seed in seeds]


def coldest(catalog: Catalog, tier: int) -> list[ChunkKey]:
    return catalog.victims(tier, VICTIMS * CHUNK_BYTES)


def replace_coldest(catalog: Catalog, keys: Sequence[ChunkKey]) -> None:
    catalog.remove_all(catalog.victims(SLOW, len(keys) * CHUNK_BYTES), SLOW)
    catalog.add_chain(keys, SLOW, [CHUNK_BYTES] * len(keys), State.READY)


def timed(call: Callable[[ArgumentT], object], arguments: Iterable[ArgumentT]) -> list[float]:
    """Return the seconds of each call, without the time to produce its argument."""
    seconds = []
    for argument in arguments:
        started = time.thread_time()
        call(argument)
        seconds.append(time.thread_time() - started)
    return seconds


def figures(name: str, seconds: Sequence[float]) -> tuple[str, float, float, float]:
    """Return a row of the table, in microseconds."""
    ordered = sorted(seconds)
    high = ordered[len(ordered) * 99 // 100]
    return name, statistics.median(ordered) * 1e6, high * 1e6, ordered[-1] * 1e6


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
