"""``kvtier bench --model``: what models store, without loading them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.forks import forks_with_vllm
from tests.rigs.vllm import instruction_set, models

KIB = 1024
STATE_BYTES = 1_920 + 8_192 * (4 if instruction_set.has("avx512_bf16") else 2)
"""Of a Mamba layer. vLLM keeps its recurrent part as float32 on processors with AVX-512 BF16
(``vllm/platforms/cpu.py``)."""


def describe(model: Path, log: Path) -> None:
    """Main function of the process: a process can describe one model only."""
    from kvtier.cli import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    main(["bench", "--model", str(model), "--output", f"{log}.json"])


def bench(model: Path, log: Path) -> tuple[int | None, str]:
    process = forks_with_vllm().Process(target=describe, args=(model, log))
    process.start()
    process.join()
    return process.exitcode, log.read_text()


@pytest.mark.parametrize(
    ("make", "layers", "chunk", "state"),
    [
        (models.make_llama, {"FullAttention": 4}, 256 * 4 * 2 * 64 * 2 * 2, 0),
        (models.make_granite, {"Mamba": 3, "FullAttention": 1}, 256 * 2 * 32 * 2 * 2, 3 * STATE_BYTES),
        (models.make_hybrid, {"SlidingWindow": 2, "FullAttention": 2}, (256 + 128) * 2 * KIB // 2, 0),
    ],
    ids=["llama", "states", "window"],
)
def test_sizes(
    make: Callable[[Path], Path], layers: dict[str, int], chunk: int, state: int, tmp_path: Path
) -> None:
    """In bfloat16, which vLLM chooses. Of a window of 128 tokens, so many of each chunk are stored."""
    code, output = bench(make(tmp_path / "model"), tmp_path / "log")
    assert code == 0, output
    found: dict[str, Any] = json.loads((tmp_path / "log.json").read_text())
    assert (found["layers"], found["chunk"], found["state"]) == (layers, chunk, state)
    stored = 4 * chunk + 2 * state
    assert found["prompts"]["1024"] == {"stored": stored, "per_token": stored / 1024}


def test_unknown_model(tmp_path: Path) -> None:
    code, output = bench(tmp_path / "nothing", tmp_path / "log")
    assert code == 1
    assert "vLLM cannot describe" in output
