"""Models by their names on a hub, as most users serve them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.hub import Hub
from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPT = prompt(LENGTH)
TEXT = bytes(PROMPT).decode()
NAME, OTHER_TOKENIZER = "kvtier/tiny", "kvtier/reversed"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    models.write_tokenizer(tmp_path / "reversed", reverse=True)
    with Hub() as hub:
        hub.push(OTHER_TOKENIZER, tmp_path / "reversed")
        yield hub


def with_tokenizer(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    models.write_tokenizer(folder)
    return folder


@pytest.fixture
def cache(make_cache: MakeCache, controller: ControllerProcess) -> CacheProcess:
    return make_cache(controller={"url": controller.url, "instance_id": "instance"}).start()


def test_commits_of_a_model_by_its_name(
    llama: Path,
    hub: Hub,
    cache: CacheProcess,
    controller: ControllerProcess,
    start: StartEngine,
    oracle: Oracle,
    tmp_path: Path,
) -> None:
    """Weights are those of a commit: a newer one of the same branch has no hits, a pinned old one does."""
    client = {"hub": hub.variables(tmp_path / "home"), "skip_tokenizer_init": False}
    commit = hub.push(NAME, with_tokenizer(llama, tmp_path / "first"))
    expected = oracle(llama, PROMPT)
    with start(NAME, cache, served_model_name=["tiny", "small"], **client) as engine:
        cold = engine.generate(TEXT)
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        assert (cold, engine.generate(TEXT)) == (
            Answer(expected, 0, "length"),
            Answer(expected, WHOLE_CHUNKS, "length"),
        )
        # The cache process tokenizes with what the engine has downloaded: it has no access to the hub.
        controller.wait_until_held(PROMPT, instance={"ram": WHOLE_CHUNKS, "ssd": WHOLE_CHUNKS})
        found = controller.post("/lookup", prompt=TEXT, model="tiny")
        assert found["instances"] == {"instance": {"ram": WHOLE_CHUNKS, "ssd": WHOLE_CHUNKS}}

    models.make_llama(tmp_path / "weights", seed=8)
    newer = hub.push(NAME, with_tokenizer(tmp_path / "weights", tmp_path / "second"))
    assert newer != commit
    with start(NAME, cache, **client) as engine:
        cold = engine.generate(TEXT)
        assert cold.cached == 0
        assert cold.tokens != expected
        cache.wait_until_stored(2 * WHOLE_CHUNKS)
        engine.reset_prefix_cache()
        assert engine.generate(TEXT) == Answer(cold.tokens, WHOLE_CHUNKS, "length")

    client |= {"tokenizer": OTHER_TOKENIZER, "tokenizer_revision": "main"}
    with start(NAME, cache, revision=commit, **client) as engine:
        assert engine.generate(PROMPT) == Answer(expected, WHOLE_CHUNKS, "length")
        other = [255 - token for token in PROMPT]
        assert engine.generate(TEXT).tokens == engine.generate(other).tokens
        assert engine.generate(other).cached >= WHOLE_CHUNKS
