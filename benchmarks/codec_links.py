"""Compare reading from a pool and from a peer behind a slow link with and without the codec `lossless`.

::

    python -m benchmarks.codec_links              # 1, 10 and 25 Gb/s; as root: it creates a network namespace
    python -m benchmarks.codec_links --rate 2     # 2 Gb/s

A Redis runs in a namespace of its own, behind a link that is limited in both directions. One cache stores
prompts, others that start empty retrieve one each, in turns with and without the codec: what a first token
waits for on another host. Then a peer takes the place of the Redis, and instances fetch a prompt from it in
turns, also with `codec: auto`. The KV is that of benchmarks.codecs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, cast

import anyio
import torch

from benchmarks.codecs import blocks_of, kv_of, trained_model
from benchmarks.common import MIB, parse, show
from benchmarks.links import THERE, link, peer_settings, redis_at
from benchmarks.peers_process import opened
from kvtier import Settings, TieredCache
from kvtier.testing.servers import free_port

TOKENS, TOKEN_BYTES = 4096, 16 << 10
CODECS = ("identity", "lossless")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare reading over slow links with and without a codec.")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[1, 10, 25], help="Gb/s; default: %(default)s"
    )
    parser.add_argument("--train", type=int, default=400, help="see benchmarks.codecs; default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    options = parse(parser, runs=1, rate=[25])
    if os.geteuid():
        raise SystemExit("it creates a network namespace: run it as root")
    keys, values = (
        (torch.randn(2, 2, 2048, 64),) * 2 if options.small else kv_of(trained_model(options.train))
    )
    content = blocks_of(keys.bfloat16(), values.bfloat16())
    kv = (content * (TOKENS * TOKEN_BYTES // len(content) + 1))[: TOKENS * TOKEN_BYTES]
    rows = [
        (f"{rate:g} Gb/s, {verb}", *figures)
        for rate in options.rate
        for verb, figures in anyio.run(measure, rate, kv, options.runs).items()
    ]
    columns = ("", "without, ms", "lossless, ms", "times as fast", "range")
    show(f"{len(kv) // MIB} MiB of KV to and from Redis behind a link", columns, rows)
    fetches = [
        (f"{rate:g} Gb/s, fetched", *anyio.run(measure_fetches, rate, kv, options.runs))
        for rate in options.rate
    ]
    with_auto = (*columns, "auto, ms", "auto encodes")
    show(f"{len(kv) // MIB} MiB of KV from a peer behind a link", with_auto, fetches)


async def measure(rate: float, kv: bytes, runs: int) -> dict[str, tuple[float, float, float, str]]:
    """Return the figures of storing and of retrieving."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with server_behind(rate) as pool:
        for turn in range(runs + 1):
            for codec in CODECS:
                settings = [pool | {"codec": codec, "prefix": f"{codec}-{turn}:"}]
                stored = await timed(settings, kv, stores=True)
                found = await timed(settings, kv, stores=False)
                if turn:
                    seconds.setdefault(("stored", codec), []).append(stored)
                    seconds.setdefault(("retrieved", codec), []).append(found)
    return {verb: compared(*(seconds[verb, codec] for codec in CODECS)) for verb in ("stored", "retrieved")}


async def measure_fetches(rate: float, kv: bytes, runs: int) -> tuple[float, float, float, str, float, str]:
    """Return the figures of fetching from a peer: those of :func:`compared`, and those of ``codec: auto``."""
    seconds: dict[str, list[float]] = {codec: [] for codec in (*CODECS, "auto")}
    async with AsyncExitStack() as stack:
        peer = stack.enter_context(peer_at(stack.enter_context(link(rate)), kv))
        readers = {
            codec: await stack.enter_async_context(opened(settings_of(len(kv), codec, others=[peer])))
            for codec in seconds
        }
        await anyio.sleep(1)
        for turn in range(runs + 1):
            for codec, reader in readers.items():
                took = await fetched(reader.cache, kv)
                if turn:
                    seconds[codec].append(took)
        status = cast("list[dict[str, Any]]", readers["auto"].status()["peers"])[0]
    auto = 1000 * statistics.median(seconds["auto"])
    encodes = "yes" if status["encodes"] else "no"
    return (*compared(*(seconds[codec] for codec in CODECS)), auto, encodes)


async def fetched(cache: TieredCache, kv: bytes) -> float:
    """Return the seconds until a cache has the KV in its memory. Removes it afterwards."""
    model, tokens, out = (
        cache.model("llama", token_bytes=TOKEN_BYTES),
        list(range(TOKENS)),
        bytearray(len(kv)),
    )
    began = time.perf_counter()
    assert await model.retrieve(tokens, out) == TOKENS
    took = time.perf_counter() - began
    assert out == kv
    await model.clear(tokens)
    return took


def settings_of(kv_bytes: int, codec: str, **peer: object) -> dict[str, Any]:
    return {
        "tiers": [{"name": "ram", "type": "cpu", "capacity": 4 * kv_bytes}],
        "prefetch": {"policy": "wait"},
        "peer": peer_settings(codec, **peer),
    }


def compared(without: list[float], encoded: list[float]) -> tuple[float, float, float, str]:
    ratios = [one / other for one, other in zip(without, encoded, strict=True)]
    slow, fast = 1000 * statistics.median(without), 1000 * statistics.median(encoded)
    return slow, fast, statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"


async def timed(pools: list[dict[str, Any]], kv: bytes, *, stores: bool) -> float:
    """Return the seconds until the pool has the KV, or until a cache that was empty has it."""
    memory = {"name": "ram", "type": "cpu", "capacity": 4 * len(kv)}
    settings = Settings.model_validate({"tiers": [memory, *pools], "prefetch": {"policy": "wait"}})
    async with TieredCache.open(settings) as cache:
        model, tokens, out = (
            cache.model("llama", token_bytes=TOKEN_BYTES),
            list(range(TOKENS)),
            bytearray(len(kv)),
        )
        await anyio.sleep(0.2)
        began = time.perf_counter()
        if stores:
            assert await model.store(tokens, kv) == TOKENS
            assert await cache.drain(120)
        else:
            assert await model.retrieve(tokens, out) == TOKENS
        took = time.perf_counter() - began
        assert stores or out == kv
        return took


@contextmanager
def server_behind(rate: float) -> Iterator[dict[str, Any]]:
    """Yield the settings of a Redis behind a link."""
    with link(rate) as inside, redis_at(inside) as pool:
        yield pool


@contextmanager
def peer_at(inside: str, kv: bytes) -> Iterator[str]:
    """Yield the address of an instance in a namespace that holds the KV."""
    address = f"{THERE}:{free_port()}"
    command = [*shlex.split(inside), sys.executable, "-m", "benchmarks.codec_links_peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = json.dumps([settings_of(len(kv), "lossless", listen=address), TOKENS, TOKEN_BYTES])
        process.stdin.write(line.encode() + b"\n" + kv)
        process.stdin.flush()
        assert process.stdout.readline(), "the peer has failed"
        yield address
        process.stdin.close()  # Which ends it.


if __name__ == "__main__":
    main()
