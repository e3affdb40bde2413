"""Compare a move by the controller, from ``POST /move`` until its event is done, with the transport alone.

::

    python -m benchmarks.move                      # tcp and nixl, 1.5 GiB of memory, a minute
    python -m benchmarks.move --transport tcp

A controller and two instances, one process each, on loopback. A prompt is moved back and forth; each time it
is looked up, fetched, verified, reported to the controller, and deleted at its source. The limit is the time
of the transport alone to read the same bytes from the same memory in the same run.
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

from benchmarks.common import MIB, parse, ratio, show, speed
from benchmarks.move_process import CHUNK_TOKENS, MODEL, Call, instance_process, prompt
from benchmarks.peers_process import address, settings_of
from kvtier.testing.servers import free_port

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
NAMES = ("one", "other")
START_SECONDS = 60
MOVE_SECONDS = 60


class Extent(NamedTuple):
    """Amount of work to measure."""

    rows: Sequence[tuple[int, int]]
    """Number of chunks, and the bytes of each."""
    turns: int


FULL = Extent([(1, 32 * MIB), (16, 32 * MIB), (128, 2 * MIB), (128, 64 << 10)], 9)
SMALL = Extent([(4, MIB)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare moves by the controller with the transport alone.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: all")
    options = parse(parser)
    extent = SMALL if options.small else FULL
    for transport in options.transport or TRANSPORTS:
        rows = [make_row(transport, chunks, length, extent.turns) for chunks, length in extent.rows]
        columns = ("", "move ms", "limit ms", "move GB/s", "limit GB/s", "move : limit")
        show(f"{transport}: moves between two instances", columns, rows)


def make_row(transport: str, chunks: int, length: int, turns: int) -> tuple[object, ...]:
    """Return the row for one size: moves in both directions, and reads by the transport alone."""
    with controller() as url, instances(transport, url, chunks * length, length // CHUNK_TOKENS) as calls:
        first, second = (calls[name] for name in NAMES)
        mover = Mover(url, prompt(chunks))
        first("store", chunks)
        second("wait_for_link", 0)
        mover.wait_until_held(NAMES[0])
        moves, limit = [], []
        for turn in range(-1, turns):
            direct = second("read_directly", chunks)
            forth, back = mover.move(*NAMES), mover.move(*reversed(NAMES))
            if turn >= 0:
                limit.append(direct)
                moves.append((forth + back) / 2)
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
    """Run a controller; yield its URL."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "state")
        command = [sys.executable, "-m", "kvtier", "controller", "--listen", address(port), "--state", state]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            yield f"http://{address(port)}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def instances(transport: str, url: str, total: int, token_bytes: int) -> Iterator[dict[str, Call]]:
    """Run both instances, which are each other's peers and registered; yield a command function for each."""
    ports = free_port(), free_port()
    capacity = 2 * total + 64 * MIB
    settings: list[dict[str, Any]] = [
        {
            **settings_of(transport, port, [peer_port], capacity, checksum=True),
            "chunk_tokens": CHUNK_TOKENS,
            "controller": {"url": url, "instance_id": name},
        }
        for name, port, peer_port in zip(NAMES, ports, reversed(ports), strict=True)
    ]
    with (
        instance_process(settings[0], token_bytes) as first,
        instance_process(settings[1], token_bytes) as second,
    ):
        yield dict(zip(NAMES, (first, second), strict=True))


class Mover:
    """Client of the controller that moves a prompt."""

    def __init__(self, url: str, tokens: list[int]) -> None:
        self._http = httpx.Client(base_url=url, timeout=MOVE_SECONDS, trust_env=False)
        self._tokens = tokens

    def wait_until_held(self, name: str) -> None:
        """Wait until the controller knows both instances, and that ``name`` holds the whole prompt."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = self._http.post("/lookup", json={"tokens": self._tokens, "model": MODEL}).json()
                registered = self._http.get("/instances").json()["instances"]
            except httpx.TransportError:
                answer, registered = {}, []
            complete = answer.get("instances") == {name: {"ram": len(self._tokens)}}
            if complete and len(registered) == len(NAMES):
                return
            time.sleep(0.05)
        raise SystemExit("the instances did not register")

    def move(self, source: str, target: str) -> float:
        """Move the prompt; return the seconds until the event is done."""
        request = {
            "old_position": [source, "ram"],
            "new_position": [target, "ram"],
            "tokens": self._tokens,
            "model": MODEL,
        }
        started = time.perf_counter()
        event = self._http.post("/move", json=request).json()["event_id"]
        ended = self._http.get(f"/events/{event}", params={"wait": MOVE_SECONDS}).json()
        seconds = time.perf_counter() - started
        if ended["state"] != "done" or ended["result"]["tokens"] != len(self._tokens):
            raise SystemExit(f"the move failed: {ended}")
        return seconds

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


if __name__ == "__main__":
    main()
