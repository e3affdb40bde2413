"""The same work on kvtier and LMCache 0.5.6, alternating, with ratios pair by pair.

::

    python -m benchmarks.compare                            # all rows: 8 GiB of memory, 10 minutes
    python -m benchmarks.compare --rows cpu tokens --pairs 9
    python -m benchmarks.compare --engines plain kvtier     # end to end, in a real vLLM
    python -m benchmarks.compare --json compare.json

LMCache runs in an environment of its own, which is made when it is first wanted (benchmarks/peer). A ratio is
how many times as fast kvtier is; ``sealed`` is with its header and checksum, as a cache runs it, ``plain``
without, which is like for like: LMCache computes none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio

from benchmarks.compare import tiers
from benchmarks.compare.pairs import Pair, show_pairs
from kvtier.units import MIB

ENGINES = ("plain", "kvtier", "kvtier-partial", "lmcache", "offload")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The same work on kvtier and LMCache.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all")
    parser.add_argument("--pairs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--chunks", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, default=32, metavar="MIB", help="of a chunk; default: %(default)s"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the prompt's model; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the disk tiers; default: here")
    parser.add_argument(
        "--engines", nargs="*", choices=ENGINES, help="a real vLLM instead; default: all of them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all seconds there, too")
    given = parser.parse_args(arguments)
    if given.engines is not None:
        from benchmarks.compare import engines

        engines.compare(given.engines or ENGINES, given.pairs, given.json)
        return
    pairs: list[Pair] = []
    for row in given.rows or ROWS:
        measured = ROWS[row](given)
        show_pairs(row, measured)
        pairs += measured
    if given.json:
        given.json.write_text(json.dumps([pair.as_json() for pair in pairs], indent=2) + "\n")


def in_loop(measure: Callable[..., object], given: argparse.Namespace, **options: object) -> list[Pair]:
    extent = tiers.Extent(given.size * MIB, given.chunks, given.pairs)
    found: list[Pair] = anyio.run(partial(measure, extent, **options))
    return found


def tokens(given: argparse.Namespace) -> list[Pair]:
    from benchmarks.compare.tokens import compare

    return compare(given.layers, given.tokens, given.pairs)


ROWS: dict[str, Callable[[argparse.Namespace], list[Pair]]] = {
    "cpu": lambda given: in_loop(tiers.cpu, given),
    "disk": lambda given: in_loop(tiers.disk, given, folder=given.folder, direct=False),
    "direct": lambda given: in_loop(tiers.disk, given, folder=given.folder, direct=True),
    "redis": lambda given: in_loop(tiers.redis, given, kinds=["redis"]),
    "resp": lambda given: in_loop(tiers.redis, given, kinds=["resp"]),
    "tokens": tokens,
}


if __name__ == "__main__":
    main()
