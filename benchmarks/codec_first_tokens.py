"""Compare first tokens from a slow medium with and without codecs, beside LMCache's.

::

    python -m benchmarks.codec_first_tokens            # as root: it creates a network namespace
    python -m benchmarks.codec_first_tokens --rate 2   # a Redis behind 2 Gb/s; default: 1, 10 and 25

One vLLM for each way to store, all with the model of benchmarks.codecs in bfloat16: kvtier without a codec,
with ``lossless`` and with ``fp8``, LMCache without a serde and with ``fp8``. The medium is a folder on this
disk, or a Redis in a namespace of its own behind a limited link. The prompts of a set are sent at once. All
are stored; when the turn of a set comes again, others have taken its place in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import torch

from benchmarks.codec_links import limit, link, redis_at
from benchmarks.codecs import corpus, trained_model
from benchmarks.common import MIB, parse, show
from benchmarks.compare.systems import Parts, System, kvtier, lmcache, running
from kvtier.lab.demo.client import Completion
from kvtier.lab.demo.model import make_model

TOKENS, AT_ONCE, SETS = 1984, 8, 6
TOKEN_BYTES = 3 << 10
ENGINE_BYTES = KVTIER_BYTES = 64 * MIB
LMCACHE_BYTES = 160 * MIB
"""With room for one set, which takes 47 MiB, it finds half of the prompts."""
STORE_SECONDS = 3.0
WAYS = {
    "kvtier": "",
    "kvtier-lossless": "lossless",
    "kvtier-fp8": "fp8",
    "lmcache": "",
    "lmcache-fp8": "fp8",
}
"""Systems by codec."""
Pool = dict[str, Any]
Answers = dict[tuple[str, str], list[list[Completion]]]
"""By medium and system."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare first tokens with codecs, beside LMCache's.")
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[1, 10, 25], help="Gb/s; default: %(default)s"
    )
    parser.add_argument("--train", type=int, default=400, help="see benchmarks.codecs; default: %(default)s")
    parser.add_argument("--systems", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    options = parse(parser, turns=1, train=1, rate=[10], systems=["kvtier", "kvtier-lossless"])
    answers = measure({}, [], options)
    if options.rate:
        with link(max(options.rate)) as inside, ExitStack() as stack:
            # One for each: LMCache has the same keys with and without a serde.
            pools = {name: stack.enter_context(redis_at(inside)) for name in options.systems}
            answers |= measure(pools, options.rate, options)
    show(
        f"{AT_ONCE} prompts of {TOKENS:,} tokens at once, {TOKEN_BYTES * TOKENS * AT_ONCE // MIB} MiB of KV",
        ("", "", "found, %", "first token, ms", "last one's, ms", "times as fast as kvtier without a codec"),
        [row(answers, *place) for place in answers],
    )


def measure(pools: dict[str, Pool], rates: list[float], options: argparse.Namespace) -> Answers:
    """Return the answers to each set. ``pools``: that of each system; without any, from disk."""
    model = trained_model(options.train)
    found: Answers = defaultdict(list)

    def make(folder: Path) -> None:
        make_model(folder, 1)  # For its tokenizer.
        model.save_pretrained(folder)

    with running(
        options.systems, partial(parts_of, pools=pools), make=make, max_tokens=TOKENS + 64
    ) as systems:
        for system in systems:
            for number in range(SETS):
                ask(system, number)
                time.sleep(STORE_SECONDS)
        for turn in range(options.turns):
            for rate in rates or [0.0]:
                medium = f"Redis, {rate:g} Gb/s" if rate else "disk"
                if rate:
                    limit(rate)
                for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                    for number in range(SETS):
                        found[medium, system.name].append(ask(system, number))
                print(f"{medium}: turn {turn + 1} of {options.turns} done", file=sys.stderr, flush=True)
    return dict(found)


@cache
def prompts() -> list[list[int]]:
    """Return the prompts of all sets: text, about half of which the model was not trained on."""
    text = torch.cat(corpus())[-SETS * AT_ONCE * TOKENS :]
    return [[int(token) for token in prompt] for prompt in text.reshape(-1, TOKENS)]


def ask(system: System, number: int) -> list[Completion]:
    """Send a set of prompts, with nothing in vLLM's own cache."""
    if not system.client.reset_prefix_cache():
        raise SystemExit("vLLM did not reset its prefix cache")

    async def all_at_once() -> list[Completion]:
        answers: list[Completion] = []

        async def one(prompt: list[int]) -> None:
            answers.append(await system.client.stream(prompt, 2))

        async with anyio.create_task_group() as tasks:
            for prompt in prompts()[number * AT_ONCE : (number + 1) * AT_ONCE]:
                tasks.start_soon(one, prompt)
        return answers

    return anyio.run(all_at_once)


def parts_of(name: str, folder: Path, *, pools: dict[str, Pool]) -> Parts:
    """Return the parts of a system that stores in a pool, or without one in a folder."""
    codec, pool = WAYS[name], pools.get(name)
    if name.startswith("lmcache"):
        (folder / "files").mkdir()
        medium: Pool = {"type": "fs", "base_path": str(folder / "files")}
        if pool is not None:
            host, port = pool["url"].removeprefix("redis://").split(":")
            medium = {"type": "resp", "host": host, "port": int(port)}
        if codec:
            medium["serde"] = {"type": codec}
        parts = lmcache(folder, memory=LMCACHE_BYTES, adapter=medium)
    else:
        tier = {"name": "ssd", "type": "disk", "path": str(folder / "files"), "capacity": "4GiB"}
        if pool is not None:
            tier = pool
        if codec:
            tier["codec"] = codec
        memory = {"name": "ram", "type": "cpu", "capacity": KVTIER_BYTES}
        parts = kvtier(folder, settings={"tiers": [memory, tier], "accept_lossy": codec == "fp8"})
    sizes = ["--kv-cache-memory-bytes", str(ENGINE_BYTES), "--gpu-memory-utilization", "0.1"]
    parts.arguments = [*parts.arguments, "--dtype", "bfloat16", *sizes]
    return parts


def row(answers: Answers, medium: str, name: str) -> tuple[object, ...]:
    """Return medians over the sets."""

    def times(system: str, pick: Callable[[list[float]], float]) -> list[float]:
        return [1000 * pick([answer.ttft for answer in each]) for each in answers[medium, system]]

    first, last = times(name, statistics.median), times(name, max)
    ratios = [plain / own for plain, own in zip(times("kvtier", statistics.median), first, strict=True)]
    found = statistics.mean(answer.cached_tokens for each in answers[medium, name] for answer in each)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return medium, name, 100 * found / TOKENS, statistics.median(first), statistics.median(last), spread


if __name__ == "__main__":
    main()
