"""A real server with data parallelism: its engines share what is stored."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import pytest

from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import start_vllm
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

READY_SECONDS = 300.0
PROMPTS = [models.prompt(length, start=1000 * at) for at, length in enumerate([900, 300])]


def test_replicas_of_one_server_share_chunks(tmp_path: Path, cache: CacheProcess) -> None:
    """Data parallelism: what one replica has computed, the other one loads."""
    model, port = models.make_llama(tmp_path / "model"), free_port()
    with tempfile.TemporaryDirectory(prefix="kvt-") as scratch:
        server = start_vllm(
            str(model),
            port=port,
            config=cache.config,
            log=tmp_path / "server.log",
            max_tokens=2048,
            arguments=[
                *("--data-parallel-size", "2", "--distributed-executor-backend", "mp"),
                *("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--skip-tokenizer-init"),
            ],
            scratch=Path(scratch),
            variables={**VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        try:
            with Client(port, str(model)) as client:
                server.wait_until(client.healthy, READY_SECONDS)
            for tokens in PROMPTS:
                first, second = (complete(port, str(model), tokens, replica) for replica in range(2))
                assert first == (second[0], 0)
                assert second[1] == len(tokens) // CHUNK * CHUNK
                cache.wait_until_idle()
        finally:
            server.kill()


def complete(port: int, model: str, tokens: list[int], replica: int) -> tuple[list[int], int]:
    """Return the tokens that a replica generates, and how many of the prompt it found in a cache."""
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        "detokenize": False,
    }
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        json=body,
        headers={"X-data-parallel-rank": str(replica)},
        timeout=READY_SECONDS,
    ).raise_for_status()
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["token_ids"], details.get("cached_tokens", 0)
