"""Measure what kvtier gains in a real vLLM, and what it costs requests that never hit.

::

    python -m benchmarks.engine                      # both, ten minutes
    python -m benchmarks.engine --rounds 3
    python -m benchmarks.engine --serve              # with ``kvtier serve``, not the process that vLLM starts

Two servers with the same model, one with kvtier and one without, are measured alternately. *Cost*: eight
concurrent requests with new prompts, so that every lookup misses and every chunk is stored. *Gain*: the time
to first token of a long prompt, cold, from memory, and from disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cache_process import CacheProcess
from benchmarks.common import parse, show
from kvtier.bridge.client import status
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.model import make_model
from kvtier.lab.demo.server import Server, start_vllm
from kvtier.lab.demo.work import GENERATED_MODEL_ARGUMENTS
from kvtier.testing.servers import free_port

AT_ONCE = 8
NEW_TOKENS = 16
VOCABULARY = 4000
READY_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a real vLLM with and without kvtier.")
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--cost-only", action="store_true", help="do not measure the gain")
    parser.add_argument("--serve", action="store_true", help="run kvtier serve; by default, vLLM starts it")
    parser.add_argument("--tokens", type=int, default=4096, help="of a long prompt; default: %(default)s")
    options = parse(parser, rounds=1, tokens=1024)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), options.tokens, serve=options.serve) as (plain, kvtier, cache),
    ):
        cost(plain, kvtier, options.tokens * 3 // 16, options.rounds)
        if not options.cost_only:
            gain(kvtier, cache, options.tokens, max(1, options.rounds // 2))


def cost(plain: Client, kvtier: Client, tokens: int, rounds: int) -> None:
    """Compare the servers with requests of ``tokens`` tokens that never hit."""
    seconds: dict[str, list[float]] = {"plain": [], "kvtier": []}
    clients = {"plain": plain, "kvtier": kvtier}
    seeds = random.Random(1)
    for turn in range(-1, rounds):
        # Alternate which one goes first.
        for name in sorted(clients, reverse=turn % 2 == 0):
            prompts = [fresh_prompt(seeds.random(), tokens) for _ in range(AT_ONCE)]
            started = time.perf_counter()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda prompt, name=name: clients[name].complete(prompt, NEW_TOKENS), prompts))
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    total = AT_ONCE * (tokens + NEW_TOKENS)
    ratios = [base / own for base, own in zip(seconds["plain"], seconds["kvtier"], strict=True)]
    show(
        f"never hit: {AT_ONCE} at once, {tokens} tokens in, {NEW_TOKENS} out, {rounds} pairs",
        ("server", "tokens/s", "ratio to plain", "lowest", "highest"),
        [
            ("plain vLLM", total / statistics.median(seconds["plain"]), 1.0, 1.0, 1.0),
            (
                "with kvtier",
                total / statistics.median(seconds["kvtier"]),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            ),
        ],
    )


def gain(client: Client, cache: CacheProcess, tokens: int, rounds: int) -> None:
    """Measure the time to first token of a long prompt."""
    ttft: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    for turn in range(rounds):
        prompt = fresh_prompt(1000 + turn, tokens)
        cold = client.complete(prompt, 4)
        wait_until_stored(cache)
        client.reset_prefix_cache()
        memory = client.complete(prompt, 4)
        evict_from_memory(client, cache, tokens, turn)
        client.reset_prefix_cache()
        disk = client.complete(prompt, 4)
        assert cold.tokens == memory.tokens == disk.tokens, "tokens differ"
        assert cold.cached_tokens == 0
        assert memory.sources.get("host"), "no hit in memory"
        assert disk.sources.get("disk"), "no hit on disk"
        for name, answer in (("cold", cold), ("memory", memory), ("disk", disk)):
            ttft[name].append(answer.ttft)
    cold_seconds = statistics.median(ttft["cold"])
    show(
        f"time to first token of {tokens:,} tokens, {rounds} prompts",
        ("from", "median ms", "speed-up"),
        [
            (name, statistics.median(seconds) * 1e3, cold_seconds / statistics.median(seconds))
            for name, seconds in ttft.items()
        ],
    )


def evict_from_memory(client: Client, cache: CacheProcess, tokens: int, turn: int) -> None:
    """Store other prompts until the first tier has evicted the measured one."""
    for number in range(3):
        client.complete(fresh_prompt(5000 + 10 * turn + number, tokens), 1)
        wait_until_stored(cache)


def wait_until_stored(cache: CacheProcess) -> None:
    """Wait until no writes to disk are pending."""
    while status(cache.socket)["pending_bytes"]:
        time.sleep(0.02)
    time.sleep(0.1)


def fresh_prompt(seed: float, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=tokens)


@contextmanager
def servers(folder: Path, tokens: int, *, serve: bool) -> Iterator[tuple[Client, Client, CacheProcess]]:
    """Start a plain vLLM and one with kvtier, whose first tier holds two prompts of ``tokens`` tokens."""
    # By default, the second of two servers is bound to other cores than the first.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(os.cpu_count()))
    model = folder / "model"
    make_model(model)
    settings = {
        "tiers": [
            {"name": "ram", "type": "cpu", "capacity": tokens << 16},
            {"name": "ssd", "type": "disk", "path": str(folder / "disk"), "capacity": "16GiB"},
        ],
        "prefetch": {"policy": "wait"},
    }
    cache = CacheProcess(folder, settings, serve=serve)
    started: list[Server | CacheProcess] = [cache]
    clients = []
    try:
        cache.start()
        for name in ("plain", "kvtier"):
            port = free_port()
            client = Client(port, str(model))
            clients.append(client)
            server = start_vllm(
                str(model),
                port=port,
                config=None,
                log=folder / f"{name}.log",
                max_tokens=tokens + 64,
                arguments=[*GENERATED_MODEL_ARGUMENTS, "--dtype", "float32"],
                connector=name == "kvtier",
                variables=cache.variables,
            )
            started.append(server)
            server.wait_until(client.healthy, READY_SECONDS)
        yield clients[0], clients[1], cache
    finally:
        for client in clients:
            client.__exit__(None, None, None)
        for process in reversed(started):
            process.stop()


if __name__ == "__main__":
    main()
