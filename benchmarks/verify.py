"""Measure what shadow verification costs: one model, without it, with 0.001 and with 1.0, in turn.

::

    python -m benchmarks.verify                      # five minutes
    python -m benchmarks.verify --rounds 3

Three engines, each with a cache process of its own that holds the same prompts. In each round, every engine
answers them twice from there: one after the other, so that it is idle before each, and all at once. The
ratio is that of the throughput to that without verification, as the median over the rounds. With 1.0, an idle
engine computes every prompt; with 0.001, one in a thousand, which most runs do not contain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import parse, ratio, show
from kvtier.lab.bench.rows import rotated
from kvtier.lab.demo.model import make_model
from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm.engine import Engine, Engines

SHARES = ("0", "0.001", "1")
TOKENS, PROMPTS, NEW_TOKENS = 1024, 8, 8
VOCABULARY = 8000
KINDS = ("one after the other", "all at once")


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with and without shadow verification.")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    options = parse(parser, rounds=1)
    seeds = random.Random(1)
    prompts = [seeds.choices(range(100, VOCABULARY), k=TOKENS) for _ in range(PROMPTS)]
    seconds: dict[tuple[str, str], list[float]] = {(share, kind): [] for share in SHARES for kind in KINDS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        make_model(folder / "model")
        sides = {share: started(stack, folder, share, prompts) for share in SHARES}
        for turn in range(options.rounds):
            for share in rotated(list(SHARES), turn):
                for kind in KINDS:
                    seconds[share, kind].append(answer(*sides[share], kind, prompts))
        computed = {
            share: side[0].metrics().get("kvtier_verified_tokens_total", 0) for share, side in sides.items()
        }
    show(
        f"{PROMPTS} prompts of {TOKENS} tokens from memory, {NEW_TOKENS} new tokens, {options.rounds} rounds",
        ("verify", "requests", "tokens/s", "ratio", "computed to verify"),
        [
            (
                share,
                kind,
                PROMPTS * (TOKENS + NEW_TOKENS) / statistics.median(taken),
                ratio(taken, seconds["0", kind]),
                int(computed[share]),
            )
            for (share, kind), taken in seconds.items()
        ],
    )


def started(
    stack: ExitStack, folder: Path, share: str, prompts: list[list[int]]
) -> tuple[Engine, CacheProcess]:
    """Start an engine and its cache process, which stores the prompts."""
    own = folder / share
    own.mkdir()
    cache = CacheProcess(own, ram={"capacity": 1 << 30}, verify=float(share)).start()
    stack.callback(cache.kill)
    engines, memory = Engines(own), 256 << 20
    engine = stack.enter_context(
        engines.engine(folder / "model", cache.connector, kv_cache_memory_bytes=memory)
    )
    # On a busy machine, some are dropped.
    while cache.status()["tiers"][0]["chunks"] < PROMPTS * TOKENS // CHUNK:
        engine.generate_all(prompts, 1)
        engine.reset_prefix_cache()
        cache.wait_until_idle()
    return engine, cache


def answer(engine: Engine, cache: CacheProcess, kind: str, prompts: list[list[int]]) -> float:
    """Return the seconds in which an engine answers the prompts, which only its cache process holds."""
    engine.reset_prefix_cache()
    cache.wait_until_idle()
    began = time.perf_counter()
    if kind == KINDS[0]:
        for tokens in prompts:
            engine.generate(tokens, NEW_TOKENS)
    else:
        engine.generate_all(prompts, NEW_TOKENS)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
