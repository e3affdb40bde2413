"""What an engine reports: metrics, log and KV events."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.vllm.cache_process import CHUNK, CacheProcess
from tests.vllm.conftest import StartEngine
from tests.vllm.models import prompt

LENGTH = 1000
CHUNKS = LENGTH // CHUNK
TOKEN_BYTES = 4096
"""Bytes of KV per token of the small Llama in float32."""


def test_metrics_and_log(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        engine.generate(prompt(LENGTH))
        metrics = engine.metrics()
    log = engine.log.read_text()
    reported = {
        name: metrics[f"kvtier_{name}"]
        for name in (
            "hit_tokens_total{ram}",
            "loaded_tokens_total",
            "loaded_bytes_total",
            "stored_tokens_total",
            "stored_bytes_total",
        )
    }
    tokens = CHUNKS * CHUNK
    assert reported == {
        "hit_tokens_total{ram}": tokens,
        "loaded_tokens_total": tokens,
        "loaded_bytes_total": tokens * TOKEN_BYTES,
        "stored_tokens_total": tokens,
        "stored_bytes_total": tokens * TOKEN_BYTES,
    }
    assert metrics["kvtier_load_seconds_total"] > 0
    assert metrics["kvtier_store_seconds_total"] > 0
    assert re.search(rf"{tokens} of {LENGTH} tokens hit \(ram {tokens}\)", log)
    assert re.search(rf"stored {tokens} tokens for request \S+ in [\d.]+ ms \([\d.]+ GB/s\)", log)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber of vLLM's KV events."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"ipc://{tmp_path}/events")
        yield subscriber


def test_kv_events(
    llama: Path, cache: CacheProcess, start: StartEngine, events: zmq.Socket[bytes], tmp_path: Path
) -> None:
    stored: dict[str, dict[tuple[int, ...], bytes]] = {"CPU": {}, "STORAGE": {}}
    removed: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}

    def take(event: dict[str, Any]) -> None:
        match event:
            case {"type": "BlockStored", "block_hashes": [key], "token_ids": tokens, "medium": medium}:
                stored.get(medium, {})[tuple(tokens)] = key
            case {"type": "BlockRemoved", "block_hashes": keys, "medium": medium}:
                removed.get(medium, set()).update(keys)

    def step_until(condition: Callable[[], bool]) -> None:
        """Step until ``condition`` holds. Events are published after a step, and may come a step late."""
        while not condition():
            engine.generate(prompt(20))
            while events.poll(100):
                for event in msgspec.msgpack.decode(events.recv_multipart()[2])[1]:
                    take(event)

    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/events"}
    with start(llama, cache, kv_events_config=config) as engine:
        other_prompts = (prompt(64, start=start) for start in count(10 * LENGTH, 64))
        while not events.poll(100):  # Events published before the subscription is active are lost.
            engine.generate(next(other_prompts))
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
        step_until(lambda: all(len(chunks) == CHUNKS for chunks in stored.values()))
        expected = {tuple(prompt(CHUNK, start=CHUNK * index)) for index in range(CHUNKS)}
        assert set(stored["CPU"]) == set(stored["STORAGE"]) == expected
        engine.reset_prefix_cache(external=True)
        step_until(lambda: all(len(keys) == CHUNKS for keys in removed.values()))
    for medium, keys in removed.items():
        assert keys == set(stored[medium].values())
