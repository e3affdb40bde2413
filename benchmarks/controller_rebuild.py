"""Measure how long a controller takes to rebuild its index, and how fast it answers meanwhile.

::

    python -m benchmarks.controller_rebuild                       # 100 instances with 10,000 chunks each
    python -m benchmarks.controller_rebuild --instances 1000 --chunks 100000 --holders 1 --holders 4
    python -m benchmarks.controller_rebuild --python              # also without the native core

The controller is a real one. The instances are stand-ins in one other process, with the messages of real
ones: see :mod:`benchmarks.controller_rebuild_process`. All start to send at the same time.
``--holders 4``: each chunk is held by four instances, so that there are a quarter as many keys. Lookups are
of a prompt of 32,768 tokens that the first instance holds, one after the other, on one connection.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import parse, show
from benchmarks.controller_process import PROMPT_TOKENS
from benchmarks.proxy_processes import Measured
from kvtier.native import VARIABLE
from tests.rigs.waiting import wait_until

TIMEOUT_SECONDS = 600.0
PAUSE_SECONDS = 0.05


@contextmanager
def controller_process(port: int, state: Path, *, native: bool) -> Iterator[Measured]:
    """Run a controller until the end of the block."""
    command = [sys.executable, "-m", "kvtier", "controller", "--listen", f"127.0.0.1:{port}"]
    command += ["--state", str(state), "--log-level", "WARNING"]
    environment = os.environ | ({} if native else {VARIABLE: "0"})
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until(lambda: answers(port), TIMEOUT_SECONDS)
            yield Measured(process.pid)
        finally:
            process.kill()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class Client:
    """Asks the controller, on one connection."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """Return the content of a response, whatever its status is."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        self._http.request("GET" if body is None else "POST", path, body, headers)
        return self._http.getresponse().read()

    def keys(self) -> int:
        """Return how many chunks are in the index."""
        found = re.search(rb"^kvtier_controller_keys (\S+)$", self.ask("/metrics"), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


def measure(instances: int, chunks: int, holders: int, *, native: bool) -> dict[str, object]:
    """Return the figures of one rebuild."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    body = json.dumps({"tokens": PROMPT_TOKENS}).encode()
    feeder = [sys.executable, "-m", "benchmarks.controller_rebuild_process"]
    feeder += map(str, (port, instances, chunks, holders))
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        controller_process(port, Path(folder, "state.sqlite"), native=native) as controller,
        subprocess.Popen(feeder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as feeding,
    ):
        assert feeding.stdin is not None
        assert feeding.stdout is not None
        try:
            assert feeding.stdout.readline() == "connected\n"
            client = Client(port)
            assert b"instances" in client.ask("/lookup", body)
            memory, cpu, began = controller.resident_mib(), controller.cpu_seconds(), time.monotonic()
            feeding.stdin.write("go\n")
            feeding.stdin.flush()
            os.set_blocking(feeding.stdout.fileno(), False)
            lookups = []
            # The process says so once each instance has got an answer to a question behind its last message.
            while not feeding.stdout.readline():
                asked = time.perf_counter()
                client.ask("/lookup", body)
                lookups.append(time.perf_counter() - asked)
                assert feeding.poll() is None, "an instance was disconnected"
                time.sleep(PAUSE_SECONDS)
            seconds = time.monotonic() - began
            spent = controller.cpu_seconds() - cpu
            keys, reports = client.keys(), instances * chunks
            grown = controller.resident_mib() - memory
            assert keys == -(-instances // holders) * chunks, keys
        finally:
            feeding.kill()
    ranked = sorted(lookups)
    return {
        "reports": reports,
        "keys": keys,
        "seconds": seconds,
        "CPU seconds of the controller": spent,
        "million reports/s": reports / seconds / 1e6,
        "memory, MiB": round(grown),
        "bytes per key": grown * 2**20 / keys,
        "POST /lookup meanwhile, median ms": statistics.median(ranked) * 1e3,
        "the same, 99th percentile": ranked[int(0.99 * (len(ranked) - 1))] * 1e3,
        "the same, slowest": ranked[-1] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a controller takes to rebuild its index.")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=10_000, help="that each instance holds")
    parser.add_argument(
        "--holders", type=int, action="append", help="of each chunk; repeatable; default: 1, 4"
    )
    parser.add_argument("--python", action="store_true", help="also without the native core")
    options = parse(parser, instances=4, chunks=1000)
    columns = {
        f"{holders} holder{'s' * (holders > 1)}, {'native' if native else 'Python'}": measure(
            options.instances, options.chunks, holders, native=native
        )
        for holders in options.holders or [1, 4]
        for native in ([True, False] if options.python else [True])
    }
    first = next(iter(columns.values()))
    rows = [[name, *(column[name] for column in columns.values())] for name in first]
    title = f"{options.instances:,} instances with {options.chunks:,} chunks each"
    show(title, ["", *columns], rows)


if __name__ == "__main__":
    main()
