"""A move by order of the controller, from ``POST /move`` until its event is done, beside the bare transport.

::

    python -m benchmarks.move                      # tcp and nixl, 1.5 GiB of memory, a minute
    python -m benchmarks.move --transport tcp

A controller and two instances, a process each, on loopback. A prompt goes to and fro; each time it is looked
up, fetched, verified, told of, and deleted where it came from. The limit is what the transport alone takes to
read the same bytes from the same memory in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common import MIB, ratio, show, speed
from benchmarks.move_process import CHUNK_TOKENS, MODEL, Ask, instance_process, prompt
from benchmarks.peers_process import address, free_ports, settings_of

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
NAMES = ("one", "other")
START_SECONDS = 60
MOVE_SECONDS = 60


class Extent(NamedTuple):
    """How much is measured."""

    rows: Sequence[tuple[int, int]]
    """Chunks, and the bytes of each."""
    turns: int


FULL = Extent([(1, 32 * MIB), (16, 32 * MIB), (128, 2 * MIB), (128, 64 << 10)], 9)
QUICK = Extent([(4, MIB)], 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Moves by order of the controller beside the bare transport."
    )
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to see that it runs")
    given = parser.parse_args(arguments)
    extent = QUICK if given.quick else FULL
    for transport in given.transport or TRANSPORTS:
        rows = [measured(transport, chunks, length, extent.turns) for chunks, length in extent.rows]
        columns = ("", "move ms", "limit ms", "move GB/s", "limit GB/s", "move : limit")
        show(f"{transport}: moves between two instances", columns, rows)


def measured(transport: str, chunks: int, length: int, turns: int) -> tuple[object, ...]:
    """One row: the move to and fro, and the same bytes by the transport alone."""
    with controller() as url, instances(transport, url, chunks * length, length // CHUNK_TOKENS) as told:
        one, other = (told[name] for name in NAMES)
        mover = Mover(url, prompt(chunks))
        one("store", chunks)
        other("linked", 0)
        mover.wait_until_held(NAMES[0])
        moves, limit = [], []
        for turn in range(-1, turns):
            bare = other("bare", chunks)
            there, back = mover.move(*NAMES), mover.move(*reversed(NAMES))
            if turn >= 0:
                limit.append(bare)
                moves.append((there + back) / 2)
        mover.close()
    print(f"{transport}: {chunks} x {length} bytes measured", file=sys.stderr)
    total = chunks * length
    return (
        f"{chunks} x {length >> 10:,} KiB",
        statistics.median(moves) * 1e3,
        statistics.median(limit) * 1e3,
        speed(total, moves),
        speed(total, limit),
        ratio(moves, limit),
    )


@contextmanager
def controller() -> Iterator[str]:
    """A controller runs meanwhile; its URL."""
    (port,) = free_ports(1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        command = [sys.executable, "-m", "kvtier", "controller", "--listen", address(port), "--state", state]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            yield f"http://{address(port)}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def instances(transport: str, url: str, total: int, token_bytes: int) -> Iterator[dict[str, Ask]]:
    """Both run meanwhile, each other's peers and registered."""
    ports = free_ports(2)
    capacity = 2 * total + 64 * MIB
    made: list[dict[str, Any]] = [
        {
            **settings_of(transport, port, [another], capacity, checksum=True),
            "chunk_tokens": CHUNK_TOKENS,
            "controller": {"url": url, "instance_id": name},
        }
        for name, port, another in zip(NAMES, ports, reversed(ports), strict=True)
    ]
    with instance_process(made[0], token_bytes) as one, instance_process(made[1], token_bytes) as other:
        yield dict(zip(NAMES, (one, other), strict=True))


class Mover:
    """Has a prompt moved, as a client of the controller."""

    def __init__(self, url: str, tokens: list[int]) -> None:
        self._http = httpx.Client(base_url=url, timeout=MOVE_SECONDS, trust_env=False)
        self._tokens = tokens

    def wait_until_held(self, name: str) -> None:
        """The controller knows that both are there, and that this one holds all of it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = self._http.post("/lookup", json={"tokens": self._tokens, "model": MODEL}).json()
                there = self._http.get("/instances").json()["instances"]
            except httpx.TransportError:
                answer, there = {}, []
            if answer.get("instances") == {name: {"ram": len(self._tokens)}} and len(there) == len(NAMES):
                return
            time.sleep(0.05)
        raise SystemExit("the instances have not registered")

    def move(self, source: str, target: str) -> float:
        """The seconds until it is done."""
        question = {
            "old_position": [source, "ram"],
            "new_position": [target, "ram"],
            "tokens": self._tokens,
            "model": MODEL,
        }
        started = time.perf_counter()
        event = self._http.post("/move", json=question).json()["event_id"]
        ended = self._http.get(f"/events/{event}", params={"wait": MOVE_SECONDS}).json()
        seconds = time.perf_counter() - started
        if ended["state"] != "done" or ended["result"]["tokens"] != len(self._tokens):
            raise SystemExit(f"it was not moved: {ended}")
        return seconds

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()


if __name__ == "__main__":
    main()
