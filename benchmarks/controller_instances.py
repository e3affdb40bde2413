"""Measure a controller with a thousand connected instances, and how long they take to return after a kill.

::

    python -m benchmarks.controller_instances
    python -m benchmarks.controller_instances --instances 100

The instances are stand-ins in one other process, with the messages of real ones: see
:mod:`benchmarks.controller_instances_process`. Requests are sequential, each on a new connection.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import parse, show
from benchmarks.controller_process import PROMPT_TOKENS
from benchmarks.proxy_processes import Measured
from tests.rigs.waiting import wait_until

TIMEOUT_SECONDS = 300.0
SECONDS = 10.0
REQUESTS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a controller with many instances.")
    parser.add_argument("--instances", type=int, action="append", help="repeatable; default: 10, 100, 1000")
    options = parse(parser)
    counts = [3] if options.small else options.instances or [10, 100, 1000]
    columns = [measure(count, 2 if options.small else SECONDS) for count in counts]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    show("a controller with its instances", ["", *map(str, counts)], rows)


class Figures(dict[str, str]):
    """Figures by name, printed as they are found: some take minutes."""

    def __setitem__(self, name: str, figure: str) -> None:
        super().__setitem__(name, figure)
        print(f"{name}: {figure}", file=sys.stderr, flush=True)


@contextmanager
def controller_process(port: int, state: Path) -> Iterator[Measured]:
    """Run a controller until the end of the block, where it is killed."""
    command = [sys.executable, "-m", "kvtier", "controller", "--listen", f"127.0.0.1:{port}"]
    command += ["--state", str(state), "--log-level", "WARNING"]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: get(port, "/healthz") is not None, TIMEOUT_SECONDS)
            yield Measured(process.pid)
        finally:
            process.kill()


@contextmanager
def instances_process(port: int, count: int, log: Path) -> Iterator[None]:
    """Run the instances."""
    command = [sys.executable, "-m", "benchmarks.controller_instances_process", str(port), str(count)]
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            yield
        finally:
            process.kill()


def measure(count: int, seconds: float) -> dict[str, str]:
    """Return the figures of one number of instances."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        state, log = Path(folder, "state.sqlite"), Path(folder, "instances")
        with controller_process(port, state) as controller, instances_process(port, count, log):
            figures["all connected, s"] = f"{wait_for(port, count):.1f}"
            cpu, began = controller.cpu_seconds(), time.monotonic()
            time.sleep(seconds)
            share = (controller.cpu_seconds() - cpu) / (time.monotonic() - began)
            figures["share of a core, without requests"] = f"{share:.2f}"
            for name, path, body in (
                ("GET /healthz", "/healthz", None),
                ("GET /instances", "/instances", None),
                ("GET /metrics", "/metrics", None),
                ("POST /lookup", "/lookup", json.dumps({"tokens": PROMPT_TOKENS}).encode()),
            ):
                figures[f"{name}: CPU ms; ms; kB"] = timed(port, path, body, controller, share)
            figures["one list of instances in /stream, kB"] = f"{stream_bytes(port) / 1000:.1f}"
            figures["share of a core, one reader of /stream"] = (
                f"{reader_share(port, controller, seconds):.2f}"
            )
            figures["MiB, descriptors"] = f"{controller.resident_mib():.0f}, {controller.descriptors()}"
            failed = len(log.read_text().splitlines())
            figures["connections lost meanwhile"] = str(failed)
            os.kill(controller.process, signal.SIGKILL)
            time.sleep(seconds)  # The back-off of the instances grows with its absence.
            with controller_process(port, state) as again:
                figures[f"killed for {seconds:.0f} s: all back after, s"] = f"{wait_for(port, count):.1f}"
                figures["CPU seconds for that"] = f"{again.cpu_seconds():.1f}"
    return figures


def wait_for(port: int, count: int) -> float:
    """Return the seconds until all instances have reported what they hold."""
    began = time.monotonic()
    wait_until(lambda: json.loads(get(port, "/healthz") or b"{}").get("instances") == count, TIMEOUT_SECONDS)
    wait_until(
        lambda: all(
            found["up_to_date"] for found in json.loads(get(port, "/instances") or b"{}")["instances"]
        ),
        TIMEOUT_SECONDS,
    )
    return time.monotonic() - began


def get(port: int, path: str, body: bytes | None = None) -> bytes | None:
    """Return the content of a successful response, else ``None``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        return content if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def timed(port: int, path: str, body: bytes | None, controller: Measured, share: float) -> str:
    """Return a request's CPU time, beyond the ``share`` of an idle controller, its time, and its size."""
    seconds, content = [], b""
    cpu, started = controller.cpu_seconds(), time.monotonic()
    for _ in range(REQUESTS):
        began = time.perf_counter()
        found = get(port, path, body)
        seconds.append(time.perf_counter() - began)
        assert found is not None, path
        content = found
        time.sleep(0.02)
    spent = (controller.cpu_seconds() - cpu - share * (time.monotonic() - started)) / REQUESTS
    times = f"{statistics.median(seconds) * 1e3:.1f}, {max(seconds) * 1e3:.0f}"
    return f"{spent * 1e3:.1f}; {times}; {len(content) / 1000:.1f}"


def stream_bytes(port: int) -> int:
    """Return the length of the first list of instances in the stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/stream")
    response: Any = connection.getresponse()
    while not (line := response.readline()).startswith(b"data: "):
        assert line
    connection.close()
    return len(line)


def reader_share(port: int, controller: Measured, seconds: float) -> float:
    """Return the share of a core that the controller takes while one page is open."""
    with socket.create_connection(("127.0.0.1", port)) as reader:
        reader.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        cpu, began = controller.cpu_seconds(), time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            reader.recv(1 << 20)
        return (controller.cpu_seconds() - cpu) / (now - began)


if __name__ == "__main__":
    main()
