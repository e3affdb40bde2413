"""Models with states: prompts of all lengths around boundaries, cold and warm, against vLLM without kvtier.

``PROMPTS=1000`` runs so many for each model instead of 70, ``FIRST=600`` those from number 600 on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine, Engines
from tests.vllm.conftest import StartEngine
from tests.vllm.test_states import BLOCK, MAMBA, cache

__all__ = ["cache"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FIRST, PROMPTS = int(os.environ.get("FIRST", "0")), int(os.environ.get("PROMPTS", "70"))
BATCH = 50
"""Prompts that fit into the tiers together."""
OFFSETS = range(-3, 4)
NEW = 4


def lengths(block: int) -> list[int]:
    """Return lengths around one to three blocks."""
    return [block * (1 + at // len(OFFSETS) % 3) + OFFSETS[at % len(OFFSETS)] for at in numbers()]


def numbers() -> range:
    return range(FIRST, FIRST + PROMPTS)


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Run prompts, each without the blocks of the others in vLLM's own cache."""
    found = []
    for prompt in prompts:
        found.append(engine.generate(prompt, NEW).tokens)
        engine.reset_prefix_cache()
    return found


@pytest.mark.parametrize(
    ("make", "block", "arguments"),
    [
        (models.make_granite, BLOCK, {}),
        (models.make_falcon, BLOCK, {}),
        (models.make_zamba, BLOCK, {}),
        (models.make_qwen3_next, 384, {"dtype": "bfloat16", "max_num_batched_tokens": 4096}),
    ],
    ids=["granite-4-h", "falcon-h1", "zamba2", "qwen3-next"],
)
def test_prompts_around_boundaries(
    make: Callable[[Path], Path],
    block: int,
    arguments: dict[str, Any],
    tmp_path: Path,
    cache: CacheProcess,
    start: StartEngine,
    engines: Engines,
) -> None:
    model = make(tmp_path / "model")
    prompts = [
        models.prompt(length, start=37 * at) for at, length in zip(numbers(), lengths(block), strict=True)
    ]
    with engines.engine(model, None, **MAMBA | arguments) as plain:
        expected = tokens_of(plain, prompts)
    hits = stored = 0
    with start(model, cache, **MAMBA | arguments) as engine:
        for first in range(0, len(prompts), BATCH):
            batch, answers = prompts[first : first + BATCH], expected[first : first + BATCH]
            assert tokens_of(engine, batch) == answers
            cache.wait_until_idle()
            for prompt, answer in zip(batch, answers, strict=True):
                found = engine.generate(prompt, NEW)
                assert found.tokens == answer
                whole = (len(prompt) - 1) // engine.block_tokens * engine.block_tokens
                assert found.cached <= whole
                hits += found.cached
                stored += whole
            engine.reset_prefix_cache()
    print(f"{len(prompts)} prompts, {hits} of {stored} tokens hit")
    assert hits > 0.95 * stored  # A late answer of the cache process loses a state.
