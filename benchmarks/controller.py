"""The controller with millions of keys: look-ups, updates, and what a key takes; LMCache's beside it.

::

    python -m benchmarks.controller                  # one million keys and ten: 3 GiB and some minutes
    python -m benchmarks.controller --peer           # and LMCache's controller, with as many
    python -m benchmarks.controller --keys 100000

Eight instances, prompts of 128 chunks, each held by one of them. Each controller is a process of its own,
and they take turns. Look-ups are of prompts all over the index, with keys that were made anew, so that
neither the processor's caches nor a remembered hash helps; those from tokens are of one prompt of 32,768.
Updates are messages of 1,024 new keys: decoded and entered within the process, or sent to it by another as
instances do, over a WebSocket here and over ZeroMQ there. Times within a process are its thread's own, so
that a pause is one of the controller and not of a busy machine; the others are of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
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
from benchmarks.common import show
from benchmarks.controller_process import BATCH_KEYS, PROMPT_TOKENS, changes, hello, prompt_keys
from benchmarks.peer import python
from kvtier.agent.protocol import CONNECT_PATH, WhoHolds
from kvtier.keys import join_keys
from kvtier.sockets.frames import encode_body

PEER = Path(__file__).with_name("peer") / "controller.py"
SERVED_WITH = ("fastapi", "uvicorn", "opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0")
"""What LMCache's controller is served with, besides what its storage layer needs."""

Measure = Callable[["Process"], float]
"""Seconds, of a number of calls or keys."""


class Extent(NamedTuple):
    """How much is measured."""

    keys: list[int]
    turns: int
    look_ups: int
    """In one turn."""
    requests: int
    batches: int


FULL = Extent([1_000_000, 10_000_000], turns=7, look_ups=500, requests=20, batches=100)
QUICK = Extent([20_000], turns=1, look_ups=5, requests=1, batches=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The controller with millions of keys.")
    parser.add_argument(
        "--keys", action="append", type=int, help="how many; may be repeated; default: a million, ten million"
    )
    parser.add_argument("--peer", action="store_true", help="LMCache, too, which is installed for it")
    parser.add_argument("--quick", action="store_true", help="a few keys, to see that it runs")
    given = parser.parse_args(arguments)
    extent = QUICK if given.quick else FULL
    for keys in given.keys or extent.keys:
        with ExitStack() as processes:
            ours = processes.enter_context(Process("kvtier", controller_process.command()))
            sides = [ours]
            if given.peer:
                sides.append(processes.enter_context(Process("LMCache", [peer_python(), str(PEER)])))
            measure(keys, extent, sides)


class Process:
    """A controller that answers what it is asked."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._answer()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.close()
        self._process.wait()
        self._answers.close()

    def ask(self, what: str, number: int = 0) -> float:
        print(json.dumps([what, number]), file=self._questions)
        return self._answer()

    def _answer(self) -> float:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the controller of {self.name} has ended; what it said is above")
        return float(json.loads(line))


def measure(keys: int, extent: Extent, sides: Sequence[Process]) -> None:
    """Fill the controllers with so many keys and print the table."""
    filled = [side.ask("fill", keys) / keys for side in sides]
    updates = extent.batches * BATCH_KEYS
    calls: list[tuple[str, int, Measure]] = [
        ("look-ups/s, keys known", extent.look_ups, lambda side: side.ask("look_up", extent.look_ups)),
        (
            "look-ups/s of 32,768 tokens",
            extent.requests,
            lambda side: side.ask("look_up_tokens", extent.requests),
        ),
        ("POST /lookup of 32,768 tokens, /s", extent.requests, lambda side: post(side, extent.requests)),
        ("updated keys/s, within", updates, lambda side: side.ask("update", extent.batches)),
        ("updated keys/s, sent to it", updates, lambda side: push(side, extent.batches)),
    ]
    rows: list[Sequence[object]] = []
    for name, amount, call in calls:
        seconds = in_turns(sides, call, extent.turns)
        rows.append(row(name, [amount / statistics.median(taken) for taken in seconds], times(seconds)))
    again = [side.ask("hold_again") / keys for side in sides]
    left = [max(side.ask("leave", number) for number in (3, 4)) * 1e3 for side in sides]
    rows.append(row("bytes a key, one holder", filled, None))
    rows.append(row("bytes of a second holder of each", again, None))
    rows.append(row("ms, the longest pause when two of 8 leave", left, None))
    names = [side.name for side in sides]
    compared = ["times as fast"] if len(sides) > 1 else []
    show(f"a controller with {keys:,} keys", ["what", *names, *compared], rows)


def in_turns(sides: Sequence[Process], call: Measure, turns: int) -> list[list[float]]:
    """The seconds of each turn of each side, after one of each that is not counted."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(-1, turns):
        for taken, side in zip(seconds, sides, strict=True):
            side.ask("settle")
            one = call(side)
            if turn >= 0:
                taken.append(one)
    return seconds


def times(seconds: Sequence[Sequence[float]]) -> float | None:
    """How fast the first is beside the second: the median over the turns."""
    if len(seconds) < 2:
        return None
    return statistics.median(there / here for here, there in zip(*seconds, strict=True))


def row(name: str, figures: Sequence[float], compared: float | None) -> list[object]:
    shown = [f"{figure:,.0f}" if figure >= 100 else f"{figure:,.1f}" for figure in figures]
    if len(figures) < 2:
        return [name, *shown]
    return [name, *shown, "" if compared is None else f"{compared:.1f}"]


def post(side: Process, requests: int) -> float:
    """Seconds of look-ups over HTTP, on one connection."""
    url = f"http://127.0.0.1:{side.ask('port'):.0f}/lookup"
    body = json.dumps({"tokens": PROMPT_TOKENS})
    with httpx.Client(headers={"Content-Type": "application/json"}, trust_env=False) as client:
        client.post(url, content=body).raise_for_status()
        started = time.perf_counter()
        for _ in range(requests):
            client.post(url, content=body).raise_for_status()
        return time.perf_counter() - started


def push(side: Process, batches: int) -> float:
    """Seconds until all that another process has sent is in the index."""
    if side.name != "kvtier":
        return side.ask("push", batches)
    return anyio.run(push_over_websocket, int(side.ask("port")), batches)


async def push_over_websocket(port: int, batches: int) -> float:
    bodies = [changes(batch) for batch in range(batches)]
    url = f"ws://127.0.0.1:{port}{CONNECT_PATH}"
    async with connect(url, compression=None, proxy=None) as websocket:
        await websocket.send(encode_body(hello(1000)))
        await websocket.recv()
        started = time.perf_counter()
        for body in bodies:
            await websocket.send(body)
        # Answered in its turn, so when all before it has been taken in.
        await websocket.send(encode_body(WhoHolds(1, join_keys(prompt_keys(0)))))
        await websocket.recv()
        return time.perf_counter() - started


def peer_python() -> str:
    """The interpreter of LMCache, with what its controller is served with."""
    interpreter = str(python())
    if subprocess.run(
        [interpreter, "-c", "import fastapi, uvicorn"], check=False, capture_output=True
    ).returncode:
        print("installing what LMCache's controller is served with: once", file=sys.stderr)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *SERVED_WITH], check=True)
    return interpreter


if __name__ == "__main__":
    main()
