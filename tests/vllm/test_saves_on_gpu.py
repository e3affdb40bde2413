"""Saves on a GPU, with vLLM's scheduler and the stand-in for CUDA: what the engine's stream waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CacheProcess
from tests.rigs.vllm import models
from tests.vllm.shapes import Shape
from tests.vllm.test_shapes import Engine

LENGTHS = (400, 300, 129, 90, 260)
PROMPTS = [models.prompt(length, start=1000 * at) for at, length in enumerate(LENGTHS)]


class OnGPU(Engine):
    """An engine whose KV cache is on the stand-in."""

    preemptions = 0

    def run(self, prompts: list[list[int]], new: int = 20, aborted: int = 0) -> list[int]:
        self._connection.send({"call": "generate", "prompts": prompts, "new": new, "aborted": aborted})
        answer = self._answer()
        assert answer["wrong"] == 0
        self.preemptions = answer["preemptions"]
        hits: list[int] = answer["hits"]
        return hits

    def report(self, *, waits_for_all: bool = False) -> dict[str, Any]:
        """Close, and return what has happened. ``waits_for_all``: whether kernels may wait for any save."""
        self._connection.send({"call": "close"})
        [report] = self._answer()
        assert report["violations"] == []
        assert report["calls"] == [], "nothing stops the host"
        assert waits_for_all or report["needless"] == []
        assert report["kernels"]
        assert report["saves"]
        found: dict[str, Any] = report
        return found


@pytest.fixture
def open_on_gpu(tmp_path: Path, cache: CacheProcess) -> Any:
    """``open_on_gpu(shape)``: start an engine."""
    model = models.make_llama(tmp_path / "model")
    engines = []

    def start(**shape: Any) -> OnGPU:
        connector = {**cache.connector, "partial_chunks": True}
        log = tmp_path / f"{len(engines)}.log"
        engines.append(OnGPU(log, model, Shape(cuda=True, layers=2, **shape), [connector]))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


Open = Callable[..., OnGPU]


def test_no_kernel_waits_for_a_save(open_on_gpu: Open, cache: CacheProcess) -> None:
    """While vLLM has other blocks to give, also after requests have finished or were aborted."""
    engine = open_on_gpu(blocks=1000)
    engine.run(PROMPTS)
    engine.run([tokens + models.prompt(100, start=9000) for tokens in PROMPTS], aborted=2)
    cache.wait_until_idle()
    engine.reset()
    assert sum(engine.run(PROMPTS)) > 0
    report = engine.report()
    assert report["waits"] == 0
    assert report["saves"] > len(PROMPTS)


@pytest.mark.parametrize(("windows", "blocks"), [(True, 1000), (False, 56)], ids=["windows", "preemptions"])
def test_kernels_wait_only_for_saves_of_the_blocks_that_they_write(
    open_on_gpu: Open, cache: CacheProcess, windows: bool, blocks: int
) -> None:
    """Blocks that vLLM gives to others at once: the stand-in finds each that is written during its copy."""
    engine = open_on_gpu(windows=windows, blocks=blocks)
    hits = 0
    for start in range(2):
        prompts = [models.prompt(length, start=777 * start + 1000 * at) for at, length in enumerate(LENGTHS)]
        engine.run(prompts, 40, aborted=start)
        cache.wait_until_idle()
        engine.reset()
        hits += sum(engine.run(prompts[:3]))
        engine.reset()
    assert hits > 0
    assert windows or engine.preemptions > 0
    report = engine.report()
    assert report["waits"] < report["saves"]


def test_blocks_that_a_step_changes_before_its_hooks(open_on_gpu: Open, cache: CacheProcess) -> None:
    """Model Runner V2 zeroes new blocks before it calls the connector, which cannot protect them any more."""
    engine = open_on_gpu(zeroes=True, blocks=64)
    for start in range(2):
        engine.run([[start, *tokens] for tokens in PROMPTS], 40, aborted=start)
        cache.wait_until_idle()
        engine.reset()
    engine.report(waits_for_all=True)
