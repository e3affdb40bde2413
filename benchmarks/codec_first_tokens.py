"""Compare first tokens from a slow medium with and without codecs, beside LMCache's.

::

    python -m benchmarks.codec_first_tokens            # as root: it creates a network namespace
    python -m benchmarks.codec_first_tokens --rate 2   # links with 2 Gb/s; default: 1, 10 and 25
    python -m benchmarks.codec_first_tokens --media s3 peer

One vLLM for each way to store, all with the model of benchmarks.codecs in bfloat16: kvtier without a codec,
with ``lossless`` and with ``fp8``, LMCache without a serde and with ``fp8``. The medium is a folder on this
disk, or in a namespace behind a limited link a Redis, an S3 store (SeaweedFS) or a peer. LMCache is not
measured with S3, as its adapter needs awscrt, which it does not install. The peer is a cache process that
holds the prompts of a vLLM of its own; from it, kvtier fetches them without a codec, with ``lossless`` and
with ``auto``. The prompts of a set are sent at once. All are stored; when the turn of a set comes again,
others have taken its place in memory.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch

from benchmarks.codecs import corpus, trained_model
from benchmarks.common import MIB, parse, show
from benchmarks.compare.systems import READY_SECONDS, Parts, System, kvtier, lmcache, running
from benchmarks.links import THERE, limit, link, peer_settings, redis_at, s3_at
from kvtier.lab.demo.client import Completion
from kvtier.lab.demo.model import make_model
from kvtier.lab.demo.server import Server
from kvtier.testing.servers import free_port

TOKENS, AT_ONCE, SETS = 1984, 8, 6
TOKEN_BYTES = 3 << 10
ENGINE_BYTES = KVTIER_BYTES = 64 * MIB
LMCACHE_BYTES = 160 * MIB
"""With room for one set, which takes 47 MiB, it finds half of the prompts."""
HOLDER_BYTES = 2 << 30
STORE_SECONDS = 3.0
WAYS = {
    "kvtier": "",
    "kvtier-lossless": "lossless",
    "kvtier-fp8": "fp8",
    "kvtier-auto": "auto",
    "lmcache": "",
    "lmcache-fp8": "fp8",
}
"""Systems by codec."""
HOLDER = "holder"
"""The system whose cache process is the peer of the others."""
Place = dict[str, Any]
"""Settings of a pool, or the address of a peer; empty: a folder on disk."""
Answers = dict[tuple[str, str], list[list[Completion]]]
"""By medium and system."""


class Medium(NamedTuple):
    name: str
    systems: tuple[str, ...]


KVTIER = ("kvtier", "kvtier-lossless", "kvtier-fp8")
MEDIA = {
    "disk": Medium("disk", (*KVTIER, "lmcache", "lmcache-fp8")),
    "redis": Medium("Redis", (*KVTIER, "lmcache", "lmcache-fp8")),
    "s3": Medium("S3", KVTIER),
    "peer": Medium("peer", ("kvtier", "kvtier-lossless", "kvtier-auto")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare first tokens with codecs, beside LMCache's.")
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=list(MEDIA), help="default: all")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[1, 10, 25], help="Gb/s; default: %(default)s"
    )
    parser.add_argument("--train", type=int, default=400, help="see benchmarks.codecs; default: %(default)s")
    parser.add_argument("--systems", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument(
        "--sets", type=int, choices=range(2, SETS + 1), default=SETS, help="default: %(default)s"
    )
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    options = parse(parser, turns=1, sets=2, train=1, rate=[10], systems=["kvtier", "kvtier-lossless"])
    answers: Answers = {}
    with nullcontext("") if options.media == ["disk"] else link(max(options.rate)) as inside:
        for medium in options.media:
            answers |= measure(medium, inside, options)
    show(
        f"{AT_ONCE} prompts of {TOKENS:,} tokens at once, {TOKEN_BYTES * TOKENS * AT_ONCE // MIB} MiB of KV",
        ("", "", "found, %", "first token, ms", "last one's, ms", "times as fast as kvtier without a codec"),
        [row(answers, *place) for place in answers],
    )


def measure(medium: str, inside: str, options: argparse.Namespace) -> Answers:
    """Return the answers to each set, with the systems of one medium."""
    model = trained_model(options.train)
    names = [name for name in MEDIA[medium].systems if name in options.systems]
    found: Answers = defaultdict(list)

    def make(folder: Path) -> None:
        make_model(folder, 1)  # For its tokenizer.
        model.save_pretrained(folder)

    if medium != "disk":
        limit(max(options.rate))
    with (
        places(medium, inside, names) as found_at,
        running(
            list(found_at), partial(parts_of, places=found_at), make=make, max_tokens=TOKENS + 64
        ) as started,
    ):
        systems = [system for system in started if system.name != HOLDER]
        for system in [system for system in started if system.name == HOLDER] or systems:
            for number in range(options.sets):
                ask(system, number)
                time.sleep(STORE_SECONDS)
        # All turns with one rate before the next: ``auto`` goes by the reads of the last minutes.
        for rate in [0.0] if medium == "disk" else options.rate:
            label = f"{MEDIA[medium].name}, {rate:g} Gb/s" if rate else MEDIA[medium].name
            if rate:
                limit(rate)
            for turn in range(options.turns):
                for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                    for number in range(options.sets):
                        found[label, system.name].append(ask(system, number))
                print(f"{label}: turn {turn + 1} of {options.turns} done", file=sys.stderr, flush=True)
    return dict(found)


@contextmanager
def places(medium: str, inside: str, names: Sequence[str]) -> Iterator[dict[str, Place]]:
    """Yield where each system finds its chunks, and for a peer also where that holds them."""
    with ExitStack() as stack:
        if medium == "redis":
            # One for each: LMCache has the same keys with and without a serde.
            yield {name: stack.enter_context(redis_at(inside)) for name in names}
        elif medium == "s3":
            pool = stack.enter_context(s3_at(inside))
            yield {name: pool | {"url": f"{pool['url']}/{name}"} for name in names}
        elif medium == "peer":
            address = f"{THERE}:{free_port()}"
            yield {HOLDER: {"inside": inside, "peer": address}, **{name: {"peer": address} for name in names}}
        else:
            yield {name: {} for name in names}


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


def parts_of(name: str, folder: Path, *, places: dict[str, Place]) -> Parts:
    """Return the parts of a system with its place."""
    place = places[name]
    if name == HOLDER:
        parts = holder(folder, **place)
    elif name.startswith("lmcache"):
        parts = lmcache(folder, memory=LMCACHE_BYTES, adapter=adapter(folder, place, WAYS[name]))
    else:
        parts = kvtier(folder, settings=settings(folder, place, WAYS[name]))
    sizes = ["--kv-cache-memory-bytes", str(ENGINE_BYTES), "--gpu-memory-utilization", "0.1"]
    parts.arguments = [*parts.arguments, "--dtype", "bfloat16", *sizes]
    return parts


def adapter(folder: Path, place: Place, serde: str) -> dict[str, Any]:
    """Return the settings of LMCache for a Redis or a folder."""
    (folder / "files").mkdir()
    found: dict[str, Any] = {"type": "fs", "base_path": str(folder / "files")}
    if place:
        host, port = place["url"].removeprefix("redis://").split(":")
        found = {"type": "resp", "host": host, "port": int(port)}
    return found | ({"serde": {"type": serde}} if serde else {})


def settings(folder: Path, place: Place, codec: str) -> dict[str, Any]:
    """Return the settings of kvtier for a peer, a pool or a folder."""
    memory = {"name": "ram", "type": "cpu", "capacity": KVTIER_BYTES}
    if "peer" in place:
        return {"tiers": [memory], "peer": peer_settings(codec or "identity", others=[place["peer"]])}
    disk = {"name": "ssd", "type": "disk", "path": str(folder / "files"), "capacity": "4GiB"}
    tier = (place or disk) | ({"codec": codec} if codec else {})
    return {"tiers": [memory, tier], "accept_lossy": codec == "fp8"}


def holder(folder: Path, *, inside: str, peer: str) -> Parts:
    """Return the parts of a vLLM whose cache process is in a namespace, and serves peers there."""
    memory = {"name": "ram", "type": "cpu", "capacity": HOLDER_BYTES}
    served = {"tiers": [memory], "peer": peer_settings("lossless", listen=peer)}
    parts = kvtier(folder, serve=True, settings=served)
    command = [*shlex.split(inside), sys.executable, "-m", "kvtier", "serve"]

    def start() -> Server:
        process = Server("the peer", command, {**os.environ, **parts.variables}, folder / "cache.log")
        process.wait_until((folder / "socket").exists, READY_SECONDS)
        return process

    parts.start = start
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
