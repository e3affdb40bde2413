"""A wrong configuration stops vLLM at start-up with one message that names the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import models
from tests.vllm.conftest import MakeCache
from tests.vllm.engine import Engines


def test_chunk_size_not_a_multiple_of_the_block_size(
    llama: Path, make_cache: MakeCache, engines: Engines
) -> None:
    cache = make_cache(chunk_tokens=100)
    cache.start()
    with (
        pytest.raises(RuntimeError, match=r"chunk_tokens is 100.*block size 32: set chunk_tokens to"),
        engines.engine(llama, cache.connector),
    ):
        pass


def test_unknown_setting(llama: Path, engines: Engines) -> None:
    with (
        pytest.raises(RuntimeError, match=r"chunk_toks"),
        engines.engine(llama, {"chunk_toks": 256}),
    ):
        pass


def test_mamba_model(make_cache: MakeCache, engines: Engines, tmp_path: Path) -> None:
    cache = make_cache()
    cache.start()
    with (
        pytest.raises(RuntimeError, match=r"Mamba"),
        engines.engine(models.make_mamba(tmp_path / "mamba"), cache.connector),
    ):
        pass
