"""Measure the controller with millions of keys: lookups, updates, bytes per key; optionally LMCache's too.

::

    python -m benchmarks.controller                  # one million keys and ten: 3 GiB and some minutes
    python -m benchmarks.controller --peer           # LMCache's controller as well, with as many keys
    python -m benchmarks.controller --keys 100000

Eight instances, prompts of 128 chunks, each held by one instance. Each controller has its own process, and
the runs are interleaved. Lookups use prompts from all over the index, with new key objects, so that neither
the CPU caches nor a cached hash helps; lookups by tokens use one prompt of 32,768. Updates are messages of
1,024 new keys, either decoded and indexed within the process, or sent by another process as instances do:
over a WebSocket for kvtier, over ZeroMQ for LMCache. Times within a process are CPU times of its thread, so
that a pause is one of the controller and not of a busy machine; the others are wall-clock times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
from websockets.asyncio.client import connect

from benchmarks import controller_process
from benchmarks.commands import CommandProcess
from benchmarks.common import parse, show
from benchmarks.controller_process import BATCH_KEYS, PROMPT_TOKENS, hello, prompt_keys, update_message
from benchmarks.peer import python
from kvtier.fleet.member.protocol import CONNECT_PATH, WhoHolds
from kvtier.memory.keys import join_keys
from kvtier.rpc.frames import encode_body

PEER = Path(__file__).with_name("peer") / "controller.py"
SERVED_WITH = ("fastapi", "uvicorn", "opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0")
"""Packages that LMCache's controller needs in addition to its storage layer."""

Measurement = Callable[[CommandProcess], float]
"""Returns the seconds for a number of calls or keys."""


class Extent(NamedTuple):
    """Amount of work to measure."""

    keys: list[int]
    turns: int
    lookups: int
    """Per turn."""
    requests: int
    batches: int


FULL = Extent([1_000_000, 10_000_000], turns=7, lookups=500, requests=20, batches=100)
SMALL = Extent([20_000], turns=1, lookups=5, requests=1, batches=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the controller with millions of keys.")
    parser.add_argument(
        "--keys", action="append", type=int, help="number of keys; repeatable; default: 1 and 10 million"
    )
    parser.add_argument("--peer", action="store_true", help="also measure LMCache; installs it")
    options = parse(parser)
    extent = SMALL if options.small else FULL
    for keys in options.keys or extent.keys:
        with ExitStack() as processes:
            kvtier = processes.enter_context(CommandProcess("kvtier", controller_process.command()))
            sides = [kvtier]
            if options.peer:
                sides.append(processes.enter_context(CommandProcess("LMCache", [peer_python(), str(PEER)])))
            measure(keys, extent, sides)


def measure(keys: int, extent: Extent, sides: Sequence[CommandProcess]) -> None:
    """Fill the controllers with that many keys, measure them, and print the table."""
    filled = [side.ask("fill", keys) / keys for side in sides]
    updates = extent.batches * BATCH_KEYS
    calls: list[tuple[str, int, Measurement]] = [
        ("lookups/s, known keys", extent.lookups, lambda side: side.ask("look_up", extent.lookups)),
        (
            "lookups/s of 32,768 tokens",
            extent.requests,
            lambda side: side.ask("look_up_tokens", extent.requests),
        ),
        ("POST /lookup of 32,768 tokens, /s", extent.requests, lambda side: post(side, extent.requests)),
        ("updated keys/s, in process", updates, lambda side: side.ask("update", extent.batches)),
        ("updated keys/s, from another process", updates, lambda side: push(side, extent.batches)),
    ]
    rows: list[Sequence[object]] = []
    for name, amount, call in calls:
        seconds = interleave_sides(sides, call, extent.turns)
        rates = [amount / statistics.median(runs) for runs in seconds]
        rows.append(make_row(name, rates, speedup_of(seconds)))
    second = [side.ask("add_holder") / keys for side in sides]
    pauses = [max(side.ask("leave", number) for number in (3, 4)) * 1e3 for side in sides]
    rows.append(make_row("bytes per key, one holder", filled, None))
    rows.append(make_row("bytes per key, second holder", second, None))
    rows.append(make_row("longest pause when 2 of 8 instances leave, ms", pauses, None))
    names = [side.name for side in sides]
    speedup = ["speed-up"] if len(sides) > 1 else []
    show(f"a controller with {keys:,} keys", ["", *names, *speedup], rows)


def interleave_sides(sides: Sequence[CommandProcess], call: Measurement, turns: int) -> list[list[float]]:
    """Return the seconds of each turn of each side, without a first warm-up turn."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(-1, turns):
        for runs, side in zip(seconds, sides, strict=True):
            side.ask("settle")
            took = call(side)
            if turn >= 0:
                runs.append(took)
    return seconds


def speedup_of(seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the speed of the first side relative to the second, as the median over the turns."""
    if len(seconds) < 2:
        return None
    ours, theirs = seconds
    return statistics.median(slow / fast for fast, slow in zip(ours, theirs, strict=True))


def make_row(name: str, figures: Sequence[float], speedup: float | None) -> list[object]:
    shown = [f"{figure:,.0f}" if figure >= 100 else f"{figure:,.1f}" for figure in figures]
    if len(figures) < 2:
        return [name, *shown]
    return [name, *shown, "" if speedup is None else f"{speedup:.1f}"]


def post(side: CommandProcess, requests: int) -> float:
    """Return the seconds for lookups over HTTP, on one connection."""
    url = f"http://127.0.0.1:{side.ask('port'):.0f}/lookup"
    body = json.dumps({"tokens": PROMPT_TOKENS})
    with httpx.Client(headers={"Content-Type": "application/json"}, trust_env=False) as client:
        client.post(url, content=body).raise_for_status()
        started = time.perf_counter()
        for _ in range(requests):
            client.post(url, content=body).raise_for_status()
        return time.perf_counter() - started


def push(side: CommandProcess, batches: int) -> float:
    """Return the seconds until all updates from another process are in the index."""
    if side.name != "kvtier":
        return side.ask("push", batches)
    return anyio.run(push_over_websocket, int(side.ask("port")), batches)


async def push_over_websocket(port: int, batches: int) -> float:
    bodies = [update_message(batch) for batch in range(batches)]
    url = f"ws://127.0.0.1:{port}{CONNECT_PATH}"
    async with connect(url, compression=None, proxy=None) as websocket:
        await websocket.send(encode_body(hello(1000)))
        await websocket.recv()
        started = time.perf_counter()
        for body in bodies:
            await websocket.send(body)
        # Messages are processed in order: the answer means that all updates are in the index.
        await websocket.send(encode_body(WhoHolds(1, join_keys(prompt_keys(0)))))
        await websocket.recv()
        return time.perf_counter() - started


def peer_python() -> str:
    """Return the path of LMCache's interpreter. Installs the packages that its controller needs."""
    interpreter = str(python())
    if subprocess.run(
        [interpreter, "-c", "import fastapi, uvicorn"], check=False, capture_output=True
    ).returncode:
        print("installing the packages for LMCache's controller (once)", file=sys.stderr)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *SERVED_WITH], check=True)
    return interpreter


if __name__ == "__main__":
    main()
