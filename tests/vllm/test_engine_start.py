"""A wrong configuration stops vLLM at start-up with one message that names the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engines
from tests.vllm.conftest import MakeCache


def test_chunk_size_not_a_multiple_of_the_block_size(
    llama: Path, make_cache: MakeCache, engines: Engines
) -> None:
    cache = make_cache(chunk_tokens=100).start()
    with (
        pytest.raises(RuntimeError, match=r"chunk_tokens is 100.*block size 32: use `auto`, 96 or"),
        engines.engine(llama, cache.connector),
    ):
        pass


def test_unknown_setting(llama: Path, engines: Engines) -> None:
    with pytest.raises(RuntimeError, match=r"chunk_toks"), engines.engine(llama, {"chunk_toks": 256}):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            models.make_mamba,
            "vLLM does not support prefix caching for this model",
            marks=pytest.mark.slow,  # tests/integrations/test_layout.py has this error without an engine.
        ),
        (models.make_deepseek, r"cannot continue MLA .* on this CPU.*: a load would give wrong tokens"),
    ],
    ids=["attention-free", "mla"],
)
def test_model_that_cannot_continue_after_cached_tokens(
    make: Callable[[Path], Path], message: str, make_cache: MakeCache, engines: Engines, tmp_path: Path
) -> None:
    """vLLM disables prefix caching for these: MLA on a CPU answers wrongly after any load."""
    cache = make_cache(chunk_tokens="auto").start()
    model = make(tmp_path / "model")
    with pytest.raises(RuntimeError) as refused, engines.engine(model, cache.connector):
        pass
    if not re.search(message, str(refused.value)):
        # vLLM has no kernels for this model on some processors: it does not start without kvtier, either.
        with pytest.raises(RuntimeError), engines.engine(model, None, enable_prefix_caching=False):
            pass
        pytest.skip("vLLM cannot run this model on this processor")
