"""Measure one proxy with thousands of streams that are open at once, and what happens beyond a limit.

::

    python -m benchmarks.proxy_streams                      # 9,600 streams: needs 20,000 open files
    python -m benchmarks.proxy_streams --streams 1000

Engines are stubs (:mod:`benchmarks.proxy_engine`); the clients are one process, which checks every stream's
content. Each prompt is prefilled by another engine than the one that decodes it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

from benchmarks.common import parse, show
from benchmarks.proxy_processes import ProxyProcess, engine_process, proxy_process
from kvtier.concurrency.processes import raise_file_limit

PAUSE_SECONDS = 1.0
SETTLE_SECONDS = 60.0
FEW_FILES = 1024
UNREAD = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a proxy with thousands of open streams.")
    parser.add_argument("--streams", type=int, default=9600)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream, one a second")
    parser.add_argument("--rate", type=float, default=300, help="streams started a second")
    parser.add_argument("--parts", default="open,unread,files", help="what to run")
    options = parse(parser)
    raise_file_limit()
    streams, tokens, parts = options.streams, options.tokens, options.parts.split(",")
    if options.small:
        streams, tokens, parts = 40, 2, ["open"]
    with engine_process() as engine, engine_process() as prefiller:
        if "open" in parts:
            with proxy_process(engine, prefiller, requests=streams) as proxy:
                run_all = partial(run, proxy, engine, streams, tokens)
                rows = [
                    run_all(f"{options.rate:g} started a second", options.rate),
                    run_all("all started at once", 0),
                    run_all("half dropped at once", options.rate, dropped=streams // 2),
                ]
            print_rows(rows)
        if "unread" in parts:
            with (
                proxy_process(engine, prefiller) as proxy,
                clients(proxy.port, UNREAD, 100_000, -1) as process,
            ):
                assert process.stdout is not None
                assert process.stdout.readline() == "open\n"
                row = run(proxy, engine, streams // 20, 10, f"beside {UNREAD} clients that do not read", 0)
            print_rows([row])
        if "files" in parts:
            count = 3 * FEW_FILES
            with proxy_process(engine, prefiller, requests=count, files=FEW_FILES) as proxy:
                name = f"{FEW_FILES:,} open files, {count:,} at once"
                rows = [
                    run(proxy, engine, count, tokens // 3, name, 0),
                    run(proxy, engine, FEW_FILES // 4, 2, f"{FEW_FILES // 4} afterwards", 0),
                ]
            print_rows(rows)


class Sampler:
    """Asks the proxy for its health and metrics while the clients run."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._proxy = proxy
        self._stopped = threading.Event()
        self.seconds: dict[str, list[float]] = {"/health": [], "/metrics": []}
        self.failed: Counter[str] = Counter()
        self.resident, self.descriptors = 0.0, 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.25):
            self.resident = max(self.resident, self._proxy.resident_mib())
            self.descriptors = max(self.descriptors, self._proxy.descriptors())
            for path, seconds in self.seconds.items():
                began = time.monotonic()
                try:
                    status, _ = get(self._proxy.port, path)
                except OSError as error:
                    self.failed[f"{path} {type(error).__name__}"] += 1
                else:
                    seconds.append(time.monotonic() - began)
                    if status != 200:
                        self.failed[f"{path} {status}"] += 1


def get(port: int, path: str) -> tuple[int, bytes]:
    """GET over a new connection, as a health check does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def clients(port: int, streams: int, tokens: int, rate: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.proxy_clients"]
    command += [str(part) for part in (port, streams, tokens, 0 if rate < 0 else PAUSE_SECONDS, rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(
    proxy: ProxyProcess, engine: int, streams: int, tokens: int, name: str, rate: float, dropped: int = 0
) -> list[Any]:
    """Run that many streams, and return a row."""
    cpu, log = proxy.cpu_seconds(), len(proxy.log())
    with Sampler(proxy) as sampler, clients(proxy.port, streams, tokens, rate) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        open_at_engine, freed = streams_at(engine), 0.0
        if dropped:
            print(dropped, file=process.stdin, flush=True)
            began = time.monotonic()
            while streams_at(engine) > open_at_engine - dropped:
                assert time.monotonic() < began + SETTLE_SECONDS, streams_at(engine)
                time.sleep(0.05)
            freed = time.monotonic() - began
        result = read_result(process.stdout)
    spent = proxy.cpu_seconds() - cpu
    began = time.monotonic()
    while left := streams_at(engine) + in_flight(proxy):
        assert time.monotonic() < began + SETTLE_SECONDS, left
        time.sleep(0.1)
    time.sleep(3)  # Idle connections to engines are kept for 2 s.
    first = result["first_byte"] or [0.0]
    events = result["outcomes"].get("right", 0) * (tokens + 1)
    for line, count in Counter(line[24:150] for line in proxy.log()[log:].splitlines()).most_common(6):
        print(f"  log, {count} times: {line}", file=sys.stderr)
    print(f"  {result['errors']} {dict(sampler.failed)} freed {freed:.2f}", file=sys.stderr)
    return [
        name,
        open_at_engine,
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items())),
        f"{statistics.median(first):.2f}, {first[int(len(first) * 0.99)]:.2f}",
        round(events / result["seconds"]),
        spent / streams * 1000,
        round(sampler.resident),
        f"{sampler.descriptors}, {proxy.descriptors()}",
        *(
            f"{statistics.median(values) * 1e3:.0f}, {max(values) * 1e3:.0f}"
            for values in sampler.seconds.values()
        ),
        f"{freed:.1f}",
    ]


def read_result(stream: IO[str]) -> dict[str, Any]:
    """Return the result of the clients."""
    result: dict[str, Any] = json.loads(stream.readline())
    return result


def streams_at(engine: int) -> int:
    """Return the number of streams open at an engine."""
    return int(json.loads(get(engine, "/health")[1])["streams"])


def in_flight(proxy: ProxyProcess) -> int:
    """Return the number of requests in flight at the proxy."""
    return int(json.loads(get(proxy.port, "/stats")[1])["in_flight"])


def print_rows(rows: Sequence[Sequence[Any]]) -> None:
    columns = (
        "streams",
        "open at once",
        "outcome",
        "first byte, s: median, p99",
        "events/s",
        "CPU s per 1,000",
        "MiB",
        "descriptors: most, after",
        "/health, ms: median, max",
        "/metrics, ms",
        "freed, s",
    )
    names = [str(row[0]) for row in rows]
    show(
        "one proxy",
        ["", *names],
        [[column, *(row[at] for row in rows)] for at, column in enumerate(columns) if at],
    )


if __name__ == "__main__":
    main()
