"""Compare kvtier and LMCache 0.5.6: the same work, interleaved, with a ratio per pair of runs.

::

    python -m benchmarks.compare                            # all rows: 8 GiB of memory, 10 minutes
    python -m benchmarks.compare --rows cpu tokens --pairs 9
    python -m benchmarks.compare --engines plain kvtier     # end to end, in a real vLLM

LMCache runs in a separate environment, which is created on first use (benchmarks/peer). A ratio above 1
means that kvtier is faster. ``sealed`` includes header and checksum, as in a cache; ``plain`` does not, which
is the like-for-like comparison, because LMCache computes no checksum.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio

from benchmarks.common import parse
from benchmarks.compare import tiers
from benchmarks.compare.pairs import Pair, show_pairs
from kvtier.units import MIB

ENGINES = ("plain", "kvtier", "lmcache", "offload")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare kvtier and LMCache.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all")
    parser.add_argument("--pairs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--chunks", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, default=32, metavar="MIB", help="chunk size; default: %(default)s"
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the model; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt length; default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="for the disk tiers; default: current folder"
    )
    parser.add_argument(
        "--engines",
        nargs="*",
        choices=(*ENGINES, "kvtier-serve"),
        help=f"measure in a real vLLM instead; default: {' '.join(ENGINES)}; kvtier-serve is kvtier with a "
        "cache process that vLLM does not start itself",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, help="with --engines: restarts of each; default: %(default)s"
    )
    args = parse(parser)
    if args.engines is not None:
        from benchmarks.compare import engines

        engines.compare(args.engines or ENGINES, args.pairs, args.restarts)
        return
    for row in args.rows or ROWS:
        show_pairs(row, ROWS[row](args))


def in_loop(
    measure: Callable[..., Awaitable[list[Pair]]], args: argparse.Namespace, **options: object
) -> list[Pair]:
    extent = tiers.Extent(args.size * MIB, args.chunks, args.pairs)
    return anyio.run(partial(measure, extent, **options))


def tokens(args: argparse.Namespace) -> list[Pair]:
    from benchmarks.compare.tokens import compare

    return compare(args.layers, args.tokens, args.pairs)


ROWS: dict[str, Callable[[argparse.Namespace], list[Pair]]] = {
    "cpu": lambda args: in_loop(tiers.cpu, args),
    "disk": lambda args: in_loop(tiers.disk, args, folder=args.folder, direct=False),
    "direct": lambda args: in_loop(tiers.disk, args, folder=args.folder, direct=True),
    "redis": lambda args: in_loop(tiers.redis, args, kinds=["redis"]),
    "resp": lambda args: in_loop(tiers.redis, args, kinds=["resp"]),
    "tokens": tokens,
}


if __name__ == "__main__":
    main()
