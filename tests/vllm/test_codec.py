"""Real engines whose KV is stored by the codecs `lossless` and `dense`: the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.memory.header import IDENTITY, StoredHeader
from kvtier.tiers.lossless import DenseCodec, LosslessCodec
from kvtier.tiers.lossy import Int8Codec
from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.servers import RedisServer
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine, check_answers
from tests.vllm.test_states import MAMBA, QWEN

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(3)]
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama-float32": (models.make_llama, {}),
    "llama-bfloat16": (models.make_llama, {"dtype": "bfloat16"}),
    "llama-two-ranks": (models.make_llama, {"tensor_parallel_size": 2}),
    "granite-4-h": (models.make_granite, MAMBA),
    "qwen3-next": (models.make_qwen3_next, MAMBA | QWEN),
}
DEFAULT = {"llama-float32", "llama-bfloat16"}


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *[
            pytest.param(name, LosslessCodec, marks=() if name in DEFAULT else pytest.mark.slow)
            for name in MODELS
        ],
        ("llama-bfloat16", DenseCodec),
    ],
)
def test_from_disk_after_a_restart(
    name: str,
    codec: type[LosslessCodec],
    tmp_path: Path,
    make_cache: MakeCache,
    start: StartEngine,
    engines: Engines,
) -> None:
    make, arguments = MODELS[name]
    model = make(tmp_path / "model")
    with engines.engine(model, None, **arguments) as engine:
        expected = []
        for tokens in PROMPTS:
            engine.reset_prefix_cache()
            expected.append(engine.generate(tokens).tokens)
    cache = make_cache(ssd={"codec": "dense" if codec.dense else "lossless"}, chunk_tokens="auto").start()
    with start(model, cache, **arguments) as engine:
        assert [engine.generate(tokens).tokens for tokens in PROMPTS] == expected
        cache.wait_until_idle()
    cache.stop()
    files = list(cache.disk.rglob("*.kv"))
    headers = [StoredHeader.parse(file.read_bytes()) for file in files]
    assert codec.code in {header.codec for header in headers}
    ratio = sum(header.chunk.payload_bytes for header in headers) / sum(file.stat().st_size for file in files)
    assert ratio > (1.2 if arguments.get("dtype") == "bfloat16" else 1.0)
    cache.start()
    with start(model, cache, **arguments) as engine:
        answers = [engine.generate(tokens) for tokens in PROMPTS]
    assert [answer.tokens for answer in answers] == expected
    assert any(answer.cached for answer in answers)
    assert cache.status()["tiers"][1]["error"] is None


def test_a_disk_with_loss_serves_both_kinds_of_engines(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    """Those that accept loss, and those that do not, neither of which sees a chunk of the other."""
    cache = make_cache(ssd={"codec": "int8"}).start()
    cache.settings["accept_lossy"] = True
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
        cache.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
    cache.stop()
    assert _codecs(cache) == {Int8Codec.code}
    cache.start()
    cache.settings["accept_lossy"] = False
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
        both = 2 * len(PROMPTS) * WHOLE_CHUNKS // CHUNK
        cache.wait_until(lambda status: status["tiers"][1]["chunks"] == both)
    assert cache.log.read_text().count("loses precision") == 1
    cache.stop()
    assert _codecs(cache) == {Int8Codec.code, IDENTITY}
    cache.start()
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    cache.settings["accept_lossy"] = True
    with start(llama, cache) as engine:
        assert [engine.generate(tokens).cached for tokens in PROMPTS] == [WHOLE_CHUNKS] * len(PROMPTS)


def test_from_an_encrypted_disk(
    llama: Path, tmp_path: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"1 {'5a' * 32}")
    keys.chmod(0o600)
    cache = make_cache(ssd={"codec": "lossless", "encrypt": {"key_file": str(keys)}}).start()
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
        cache.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
    cache.stop()
    headers = [StoredHeader.parse(file.read_bytes()) for file in cache.disk.rglob("*.kv")]
    assert headers
    assert all(header.encryption is not None for header in headers)
    keys.write_text(f"2 {'a5' * 32}\n{keys.read_text()}")
    cache.start()
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
    cache.stop()
    keys.write_text(f"2 {'a5' * 32}")
    cache.start()
    with start(llama, cache) as engine:
        check_answers(engine, oracle, llama, PROMPTS, 0)
    assert "is encrypted with key 1, which the key file does not have" in cache.log.read_text()


def test_from_a_pool_that_another_host_has_filled(
    llama: Path, tmp_path: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    if reason := RedisServer.missing():
        pytest.skip(reason)
    with RedisServer(tmp_path) as server:
        pool = {**server.tier(), "codec": "lossless", "deadline": TIMEOUT_SECONDS, "queue": 64 * MIB}
        first, second = (make_cache(pool=pool).start() for _ in range(2))
        with start(llama, first) as engine:
            check_answers(engine, oracle, llama, PROMPTS, 0)
            first.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
        assert _used(second) == 0
        with start(llama, second) as engine:
            check_answers(engine, oracle, llama, PROMPTS, WHOLE_CHUNKS)
        assert second.status()["counts"]["found_pool"] == len(PROMPTS) * WHOLE_CHUNKS // CHUNK
        assert _used(first) < 0.95 * first.status()["tiers"][0]["used_bytes"]


def _used(cache: CacheProcess) -> int:
    used: int = cache.status()["tiers"][1]["used_bytes"]
    return used


def _codecs(cache: CacheProcess) -> set[int]:
    """Return the codecs of all chunks on the disk."""
    headers = [StoredHeader.parse(file.read_bytes()) for file in cache.disk.rglob("*.kv")]
    return {header.codec for header in headers}
