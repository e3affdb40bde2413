"""Real engines that cannot share chunks, and a model whose template inserts the date: said at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fleet.member.test_chat_template import LLAMA
from tests.rigs.cache_process import CacheProcess
from tests.rigs.vllm import models
from tests.rigs.waiting import wait_until
from tests.vllm.conftest import MakeCache, StartEngine


def findings(cache: CacheProcess) -> list[dict[str, str]]:
    report: dict[str, Any] = cache.status()
    return list(report["findings"])


def test_two_engines_with_different_dtypes(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    with start(llama, cache) as first:
        assert findings(cache) == []
        with start(llama, cache, dtype="bfloat16") as second:
            (found,) = findings(cache)
            assert "--dtype torch.bfloat16 instead of torch.float32" in found["found"]
            assert "config.json" not in found["found"]
            assert found["remedy"] == "start all of them with the same --dtype"
            assert "share no chunk" in cache.log.read_text()
            assert first.pid != second.pid
        cache.wait_until_idle()


def test_engines_with_other_weights_and_block_size(
    llama: Path, cache: CacheProcess, start: StartEngine, tmp_path: Path
) -> None:
    other = models.make_llama(tmp_path / "llama", seed=8)
    named = {"served_model_name": "llama"}
    with start(llama, cache, **named), start(other, cache, block_size=64, **named):
        (found,) = findings(cache)
        assert "--block-size 64 instead of 32" in found["found"] or "32 instead of 64" in found["found"]
        assert "files or --revision files " in found["found"]
        assert found["remedy"] == "start all of them with the same --block-size, files or --revision"


def test_template_with_a_date_and_a_model_longer_than_memory(
    make_cache: MakeCache, start: StartEngine, tmp_path: Path
) -> None:
    model = models.make_llama(tmp_path / "model")
    models.write_tokenizer(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": LLAMA}))
    cache = make_cache(tiers=[{"name": "ram", "type": "cpu", "capacity": "8MiB"}]).start()
    with start(model, cache, skip_tokenizer_init=False) as engine:
        template, memory = findings(cache)
        assert "inserts what changes every day" in template["found"]
        assert "date_string" in template["remedy"]
        assert "a prompt of 4096 tokens takes 16" in memory["found"]
        assert "all of tier ram has 8MiB" in memory["found"]

        def is_logged() -> bool:
            engine.generate("What is the date?", 1)  # vLLM receives messages of the cache process in steps.
            return "inserts what changes every day" in engine.log.read_text()

        wait_until(is_logged)
