"""What part of the missed chunks of a trace has no known reason, with the default memory for what is gone?

::

    python -m benchmarks.misses TRACE...

The traces are what ``kvtier simulate`` reads. They are replayed with the catalog of a cache process, one tier
and its eviction policy. Figures are exact: they do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.common import parse, show
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.misses import MissReason
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.lab.simulation.trace import Trace, chunk_keys
from kvtier.memory.keys import ChunkKey
from kvtier.settings.observability import WhySettings

CAPACITIES = ("1%", "5%", "20%", "50%")
CHUNK_TOKENS = 512
BEHIND = "behind a missing one"


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay traces, and count the reasons of misses.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--limit", type=int, help="read at most this many requests of each trace")
    default = WhySettings().remembered_chunks
    parser.add_argument("--remembered", type=int, default=default, help="chunks; default: %(default)s")
    options = parse(parser, limit=500)
    rows: list[tuple[object, ...]] = []
    for path in options.traces:
        trace = Trace.read(path, CHUNK_TOKENS, options.limit)
        for text in CAPACITIES:
            capacity = max(1, trace.unique * int(text.strip("%")) // 100)
            counts = replay(trace, capacity, options.remembered)
            missed = counts.total()
            parts = [counts[name] / missed for name in (MissReason.NEVER_STORED, MissReason.EVICTED, BEHIND)]
            rows.append(
                (
                    trace.name.partition(".")[0],
                    text,
                    missed,
                    *(f"{part:.1%}" for part in parts),
                    unknown(counts),
                )
            )
    columns = ("trace", "capacity", "missed chunks", "never stored", "evicted", BEHIND, "unknown")
    show(f"reasons of missed chunks, {options.remembered:,} remembered", columns, rows)


def unknown(counts: Counter[str]) -> str:
    return f"{counts[MissReason.UNKNOWN] / counts.total():.2%}"


def replay(trace: Trace, capacity: int, remembered: int) -> Counter[str]:
    """Return the missed chunks of all requests by reason, as ``MissStage`` finds them."""
    now = 0.0
    catalog = Catalog([LruPolicy.factory(None, capacity)], clock=lambda: now, remembered=remembered)
    keys = chunk_keys(range(trace.numbers))
    counts = Counter[str]()
    for request in trace.order:
        now = trace.times[request]
        start, stop = trace.span(request)
        prompt = [keys[chunk] for chunk in trace.chunks[start:stop]]
        held, _ = catalog.prefix_rows(prompt)
        catalog.touch_rows(held)
        rest = prompt[len(held) :]
        for key in rest:
            gone = catalog.gone.find(key)
            counts[BEHIND if key in catalog else gone.reason if gone else MissReason.NEVER_STORED] += 1
        store(
            catalog,
            prompt[len(held) - 1] if held else None,
            [key for key in rest if key not in catalog],
            capacity,
        )
    return counts


def store(catalog: Catalog, parent: ChunkKey | None, keys: list[ChunkKey], capacity: int) -> None:
    keys = keys[:capacity]
    excess = catalog.used(0) + len(keys) - capacity
    if excess > 0:
        catalog.remove_all(catalog.victims(0, excess)[:excess], 0)
    for key in keys:
        catalog.add(key, 0, 1, State.READY, parent)
        parent = key


if __name__ == "__main__":
    main()
