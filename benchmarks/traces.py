"""Measure what traces cost: the speed of a real vLLM with and without, and the microseconds of a span.

::

    python -m benchmarks.traces
    python -m benchmarks.traces --rounds 100

One engine, its cache process with ``traces`` and a collector. A request whose client has sampled it is
compared with one whose client has not, right after each other and in alternating order: both in the same
processes. A sample is one prompt, which is stored, and the same again, which is loaded. The first table is
the speed with traces relative to that without: as measured, and as it should be by what is added: the time in
the connector's hooks, and the CPU time of the cache process, which includes the export. The second one is
what a span takes, by where.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import confidence, parse, show
from benchmarks.no_hits import (
    HOST_BYTES,
    MODELS,
    TIMED,
    Sample,
    by_what_is_added,
    cpu_seconds,
    difference,
    of_sums,
)
from kvtier.integrations.vllm.traces import LOOKUP, Traces
from kvtier.observability.traces import export
from kvtier.observability.traces.spans import Sampling, Span, Tracer
from tests.rigs.cache_process import CacheProcess
from tests.rigs.collector import Collector
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt

MODEL = MODELS["llama"]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NEW_TOKENS = 32
SPANS = 2000
PARENT = bytes.fromhex(TRACE) + b"\1" * 8


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of traces.")
    parser.add_argument("--rounds", type=int, default=60, help="pairs, default: %(default)s")
    options = parse(parser, rounds=2)
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, opened(Path(folder)) as side:
        side.round(0)
        before = len(side.collector.spans)
        pairs = [side.round(number) for number in range(1, options.rounds + 1)]
        time.sleep(3 * export.INTERVAL_SECONDS)
        spans = (len(side.collector.spans) - before) / options.rounds
    added = [sum(values) / len(pairs) * 1e3 for values in zip(*map(difference, pairs), strict=True)]
    speeds = confidence(pairs, of_sums), confidence(pairs, by_what_is_added)
    show(
        f"traces: two requests of {MODEL.prompt_tokens:,} and {NEW_TOKENS} tokens, {len(pairs)} pairs",
        ("", "spans", "measured (95 %)", "hooks, ms", "cache process, CPU ms", "by what is added (95 %)"),
        [("speed with traces : without", spans, speeds[0], added[1], added[4], speeds[1])],
    )
    show("traces: a span, µs", ("where", "median"), list(spans_one_by_one()))


class Side:
    """The engine, its cache process and the collector."""

    def __init__(self, engine: Engine, cache: CacheProcess, collector: Collector) -> None:
        self._engine = engine
        self._cache = cache
        self.collector = collector

    def round(self, number: int) -> tuple[Sample, Sample]:
        """Measure a pair. Every other one begins without traces."""
        samples = {flag: self._sample(2 * number + flag, flag) for flag in ((0, 1) if number % 2 else (1, 0))}
        return samples[1], samples[0]

    def _sample(self, number: int, flag: int) -> Sample:
        tokens = prompt(MODEL.prompt_tokens, start=number * 97)
        before = self._counters()
        for _ in range(2):
            self._engine.answer(
                self._engine.submit(tokens, NEW_TOKENS, trace=f"00-{TRACE}-00f067aa0ba902b7-0{flag}")
            )
            self._engine.reset_prefix_cache()
        time.sleep(2 * export.INTERVAL_SECONDS)  # The export is part of the cost.
        sample = self._counters().minus(before)
        return sample._replace(seconds=sample.seconds - 2 * export.INTERVAL_SECONDS)

    def _counters(self) -> Sample:
        now, metrics = time.perf_counter(), self._engine.metrics()
        hooks, hooks_cpu = metrics["no_hits_hooks_total"], metrics["no_hits_hooks_cpu_total"]
        assert self._cache.pid is not None
        return Sample(now, hooks, hooks_cpu, metrics["waited"], cpu_seconds(self._cache.pid))


@contextmanager
def opened(folder: Path) -> Iterator[Side]:
    """Start a collector, a cache process and an engine."""
    MODEL.make(folder / "model")
    disk = {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": 4 * HOST_BYTES}
    tiers = [{"name": "ram", "type": "cpu", "capacity": HOST_BYTES}, disk]
    cache = CacheProcess(folder, tiers=tiers, prefetch={}, traces=True, **MODEL.settings)
    collector = Collector(folder).start()
    cache.environment = collector.environment()
    cache.start()
    try:
        started = Engines(folder).engine(
            folder / "model", cache.connector, connector_type=TIMED, **MODEL.arguments
        )
        with started as engine:
            yield Side(engine, cache, collector)
    finally:
        cache.kill()
        collector.kill()


class Sink:
    """Takes messages as a bridge does whose cache process is connected."""

    welcome = None
    responsive = True

    def send(self, message: object) -> bool:
        return bool(message)


def spans_one_by_one() -> Iterator[tuple[str, float]]:
    """Yield the CPU microseconds of a span where one is made, queued and exported."""
    from kvtier.bridge.protocol import Spans, decode_from_engine
    from kvtier.integrations.vllm.traces import Trace
    from kvtier.rpc.frames import encode_body

    traces = Traces(Sink())  # type: ignore[arg-type]
    trace = Trace(traces, "cmpl-4bf92f3577b34da6a3ce929d0e0e4736", PARENT)

    def in_engine() -> None:
        trace.begin(LOOKUP)
        trace.end(LOOKUP, tokens=1000, local_tokens=0)

    yield "engine: begin and end", timed(in_engine)
    spans = [Span.ended("kvtier.lookup", PARENT, time.monotonic(), tokens=1000)] * SPANS
    yield "engine: encode, in a message of 4", timed(lambda: encode_body(Spans(spans[:4]))) / 4
    body = encode_body(Spans(spans[:4]))
    yield "cache process: decode", timed(lambda: decode_from_engine(body)) / 4
    tracer = Tracer(Sampling.of({}))
    yield (
        "cache process: record",
        timed(lambda: tracer.record("kvtier.tier.read", PARENT, time.monotonic(), tier="ssd")),
    )
    os.environ |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "10"}
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(Path(folder)).start()
        os.environ |= collector.environment()
        thread = export._Thread({"service.name": "benchmark"})
        convert, send = thread._converted, thread._exporter.export
        batch = spans[: export.BATCH]
        yield (
            "exporting thread: convert, encode and send",
            timed(lambda: send(list(map(convert, batch))), 10) / export.BATCH,
        )
        collector.kill()


def timed(call: Callable[[], object], runs: int = SPANS) -> float:
    """Return the median CPU microseconds of a call."""
    seconds = []
    for _ in range(runs):
        began = time.thread_time_ns()
        call()
        seconds.append(time.thread_time_ns() - began)
    return statistics.median(seconds) / 1e3


if __name__ == "__main__":
    main()
