"""Measure what kvtier costs if nothing hits: one real vLLM, with and without the cache in turn.

::

    python -m benchmarks.no_hits                     # ten minutes
    python -m benchmarks.no_hits --rounds 5 --conditions idle
    python -m benchmarks.no_hits --model hybrid      # a small Granite-4-H, which stores states as well
    python -m benchmarks.no_hits --disk .            # writes every chunk to a disk tier in this folder

A request with ``cache: off`` costs what it would cost without kvtier, so both sides of a pair use the same
process, memory and machine, one right after the other, in alternating order. All prompts are unique. Each
round measures the first token of one prompt, and then a few concurrent requests. The conditions, an idle
machine and one with a spinning process per core, alternate.

The first table is the speed with the cache relative to that without it: the median over the pairs, and the
ratio of the sums, which contains rare stalls as well. The second one is what the speed should be by what is
added: the time in the connector's hooks (``no_hits_timed.py``), which no other thread of the engine uses, and
the CPU time of the cache process. On a machine with other load, the first varies by a tenth from run to run,
and only the second shows a percent. Each has its 95 % confidence interval (bootstrap over pairs).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import states
from benchmarks.common import confidence, parse, show
from kvtier.lab.demo.model import make_model
from tests.rigs.cache_process import CacheProcess
from tests.rigs.loads import saturated
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines

AT_ONCE, NEW_TOKENS = 2, 8
HOST_BYTES = 256 << 20
"""Filled before the first round, so that chunks are evicted in every round."""
DISK_BYTES = 1 << 30
BLOCKS = 4
"""How often each condition has its turn."""
CORES = len(os.sched_getaffinity(0))

TIMED = {"kv_connector_module_path": "benchmarks.no_hits_timed", "kv_connector": "Timed"}
OFF = {"kvtier": {"cache": "off"}}


class Sample(NamedTuple):
    """What some requests took."""

    seconds: float
    hooks: float
    """Seconds in the connector's hooks."""
    hooks_cpu: float
    waited: float
    """Seconds for which the scheduler has waited for the cache process, in its hooks."""
    cache_cpu: float
    """CPU seconds of the cache process."""

    def minus(self, other: Sample) -> Sample:
        return Sample(*(mine - its for mine, its in zip(self, other, strict=True)))


Pairs = list[tuple[Sample, Sample]]
"""With and without the cache."""


@dataclass(frozen=True)
class Model:
    """A model, and how its engine and cache process are started."""

    make: Callable[[Path], object]
    arguments: dict[str, Any]
    settings: dict[str, Any]
    prompt_tokens: int
    vocabulary: int


MODELS = {
    "llama": Model(make_model, {"kv_cache_memory_bytes": 256 << 20}, {"chunk_tokens": 256}, 1024, 8000),
    "hybrid": Model(models.make_granite, states.ARGUMENTS, {"chunk_tokens": "auto"}, 2000, 250),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of kvtier if nothing hits.")
    parser.add_argument("--rounds", type=int, default=40, help="pairs per condition, default: %(default)s")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--conditions", nargs="+", choices=("idle", "busy"), default=["idle", "busy"])
    parser.add_argument("--disk", type=Path, help="folder for a disk tier; default: none")
    options = parse(parser, rounds=1, conditions=["idle"])
    model = MODELS[options.model]
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=options.disk) as folder:
        results = run(model, Path(folder), options.conditions, options.rounds, disk=bool(options.disk))
    report(options.model, model, results)


@dataclass
class Result:
    """What was measured in one condition."""

    first_token: Pairs = field(default_factory=list)
    at_once: Pairs = field(default_factory=list)


def run(
    model: Model, folder: Path, conditions: Sequence[str], rounds: int, *, disk: bool
) -> dict[str, Result]:
    """Return the results by condition."""
    results = {name: Result() for name in conditions}
    with opened(model, folder, disk=disk) as side:
        side.fill()
        for block in range(min(BLOCKS, rounds)):
            for name, result in results.items():
                with load(name):
                    for turn in range(block, rounds, BLOCKS):
                        side.round(result, turn)
    return results


def load(condition: str) -> AbstractContextManager[object]:
    return saturated(1) if condition == "busy" else nullcontext()


class Side:
    """The engine and its cache process."""

    def __init__(self, model: Model, engine: Engine, cache: CacheProcess) -> None:
        self._model = model
        self._engine = engine
        self._cache = cache
        self._seeds = itertools.count()

    def fill(self) -> None:
        """Fill the memory of the cache process, which warms up everything else as well."""
        self._sample(1, 1, on=True)
        stored = self._cache.status()["tiers"][0]["used_bytes"]
        for number in range(HOST_BYTES // max(1, stored) + 1):
            self._sample(1, NEW_TOKENS, on=number % 4 != 0)

    def round(self, result: Result, turn: int) -> None:
        """Measure a pair of each kind."""
        result.first_token.append(self._pair(turn, 1, 1))
        result.at_once.append(self._pair(turn, AT_ONCE, NEW_TOKENS))

    def _pair(self, turn: int, count: int, new: int) -> tuple[Sample, Sample]:
        """Measure with and without the cache. Every other turn begins without it."""
        samples = {on: self._sample(count, new, on=on) for on in (turn % 2 == 0, turn % 2 != 0)}
        return samples[True], samples[False]

    def _sample(self, count: int, new: int, *, on: bool) -> Sample:
        prompts = [self._prompt() for _ in range(count)]
        before = self._counters()
        self._engine.generate_all(prompts, new, params=None if on else OFF)
        sample = self._counters().minus(before)
        self._cache.wait_until_idle()  # Whatever goes on in the background must not slow down the other side.
        return sample

    def _counters(self) -> Sample:
        now, metrics = time.perf_counter(), self._engine.metrics()
        hooks, hooks_cpu = metrics["no_hits_hooks_total"], metrics["no_hits_hooks_cpu_total"]
        assert self._cache.pid is not None
        return Sample(now, hooks, hooks_cpu, metrics["waited"], cpu_seconds(self._cache.pid))

    def _prompt(self) -> list[int]:
        generator = random.Random(next(self._seeds))
        return generator.choices(range(self._model.vocabulary), k=self._model.prompt_tokens)


@contextmanager
def opened(model: Model, folder: Path, *, disk: bool) -> Iterator[Side]:
    """Start a cache process and an engine."""
    model.make(folder / "model")
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": HOST_BYTES}]
    if disk:
        tiers.append({"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": DISK_BYTES})
    cache = CacheProcess(folder, tiers=tiers, prefetch={}, **model.settings)
    cache.start()
    try:
        started = Engines(folder).engine(
            folder / "model", cache.connector, connector_type=TIMED, **model.arguments
        )
        with started as engine:
            yield Side(model, engine, cache)
    finally:
        cache.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, with that of threads that have ended."""
    clock = ~pid << 3 | 2  # clock_getcpuclockid(3), which Python lacks: CPUCLOCK_SCHED of a process.
    return time.clock_gettime(clock)


def report(name: str, model: Model, results: dict[str, Result]) -> None:
    speeds: list[Sequence[object]] = []
    costs: list[Sequence[object]] = []
    for condition, result in results.items():
        for what, pairs in (("first token", result.first_token), (f"{AT_ONCE} at once", result.at_once)):
            off = statistics.median(without.seconds for _, without in pairs) * 1e3
            speeds.append((condition, what, off, confidence(pairs, median), confidence(pairs, of_sums)))
            requests = len(pairs) * (1 if pairs is result.first_token else AT_ONCE)
            added = [sum(values) / requests * 1e3 for values in zip(*map(difference, pairs), strict=True)]
            costs.append((condition, what, *added[1:], confidence(pairs, by_what_is_added)))
    title = f"{name}: {model.prompt_tokens:,} tokens, {len(result.first_token)} pairs"
    columns = ("", "", "without, ms", "median (95 %)", "of sums (95 %)")
    show(f"{title}: speed relative to that without the cache", columns, speeds)
    added_columns = ("hooks, ms", "their CPU", "their waits", "cache process, CPU", "speed (95 %)")
    show(f"{title}: what a request adds", ("", "", *added_columns), costs)


def difference(pair: tuple[Sample, Sample]) -> Sample:
    return pair[0].minus(pair[1])


def median(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    return statistics.median(off.seconds / on.seconds for on, off in pairs)


def of_sums(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    return sum(off.seconds for _, off in pairs) / sum(on.seconds for on, _ in pairs)


def by_what_is_added(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    """Return the speed if the cache process takes its CPU time from all cores alike."""
    off = sum(off.seconds for _, off in pairs)
    added = sum(more.hooks + more.cache_cpu / CORES for more in map(difference, pairs))
    return off / (off + added)


if __name__ == "__main__":
    main()
