"""Measure what it costs to store the states of a hybrid model, and what that gains, in a real vLLM.

::

    python -m benchmarks.states                 # three minutes
    python -m benchmarks.states --prompts 20

Three engines with the same Granite-4-H model, which keeps a state at every block boundary: without kvtier,
with it, and with it but without its admission of states, so that every state is stored. Prompts go to the
engines in turn, each cold and, after vLLM has forgotten it, warm from memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import parse, show
from kvtier.units import format_size
from tests.rigs.cache_process import CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines

ARGUMENTS: dict[str, Any] = {
    "block_size": None,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": None,
}
ALL_STATES = {"kv_connector_module_path": "benchmarks.states_all", "kv_connector": "AllStates"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a hybrid model with and without stored states.")
    parser.add_argument("--prompts", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt, default: %(default)s")
    options = parse(parser, prompts=1, tokens=600)
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        run(Path(folder), options.prompts, options.tokens)


def run(folder: Path, prompts: int, tokens: int) -> None:
    """Measure, and print the table."""
    model = models.make_granite(folder / "model")
    engines = Engines(folder)
    with ExitStack() as stack:
        caches: dict[str, CacheProcess] = {}
        for name in ("with admission", "every state"):
            caches[name] = cache_of(folder / name.replace(" ", "-"))
            stack.callback(caches[name].kill)
        sides = {"without kvtier": stack.enter_context(engines.engine(model, None, **ARGUMENTS))}
        for name, cache in caches.items():
            kind = ALL_STATES if name == "every state" else None
            started = engines.engine(model, cache.connector, connector_type=kind, **ARGUMENTS)
            sides[name] = stack.enter_context(started)
        cold, warm = measure(sides, caches, prompts, tokens)
        rows = []
        for name in sides:
            stored = caches[name].status()["tiers"][0]["used_bytes"] // (prompts + 1) if name in caches else 0
            rows.append((name, milliseconds(cold[name]), milliseconds(warm[name]), format_size(stored)))
    show(
        f"time to first token of {tokens:,} tokens, {prompts} prompts in turn",
        ("engine", "cold, ms", "warm, ms", "stored per prompt"),
        rows,
    )


def measure(
    sides: dict[str, Engine], caches: dict[str, CacheProcess], prompts: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each prompt by engine: cold, and warm."""
    cold: dict[str, list[float]] = {name: [] for name in sides}
    warm: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, prompts):
        prompt = models.prompt(tokens, start=3000 * (number + 1))
        for name, engine in sides.items():
            first = timed(lambda engine=engine, prompt=prompt: engine.generate(prompt, 1))  # type: ignore[misc]
            if name in caches:
                caches[name].wait_until_idle()
            engine.reset_prefix_cache()
            second = timed(lambda engine=engine, prompt=prompt: engine.generate(prompt, 1))  # type: ignore[misc]
            engine.reset_prefix_cache()
            if number >= 0:
                cold[name].append(first)
                warm[name].append(second)
    return cold, warm


def cache_of(folder: Path) -> CacheProcess:
    folder.mkdir()
    cache = CacheProcess(folder, ram={"capacity": 1 << 30}, chunk_tokens="auto")
    cache.start()
    return cache


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def milliseconds(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
