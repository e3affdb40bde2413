"""Dynamo's KV indexer receives the events of an engine, and finds what the tiers hold.

Needs ``pip install ai-dynamo-runtime`` (75 MB, so no dependency group has it).
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS
from tests.rigs.vllm.engine import ARGUMENTS
from tests.rigs.vllm.models import prompt
from tests.rigs.waiting import wait_until
from tests.vllm.conftest import MakeCache, StartEngine

pytestmark = pytest.mark.skipif(find_spec("dynamo") is None, reason="pip install ai-dynamo-runtime")

PROMPTS = [prompt(4 * CHUNK, start=start) for start in range(0, 10_000, 1000)]


class Indexer:
    """``python -m dynamo.indexer`` with one engine."""

    def __init__(self, events: str, log: Path) -> None:
        self._port = free_port()
        options = {"block-size": ARGUMENTS["block_size"], "port": self._port, "workers": f"1={events}"}
        command = [sys.executable, "-m", "dynamo.indexer"]
        command += [f"--{name}={value}" for name, value in options.items()]
        self._log = log.open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def query(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return how many leading tokens of a prompt the engine holds, by medium."""
        body = json.dumps({"token_ids": list(tokens), "model_name": "default"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/query", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def ready(self) -> bool:
        try:
            self.query([0])
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def test_dynamo_finds_what_the_tiers_hold(
    llama: Path, make_cache: MakeCache, start: StartEngine, tmp_path: Path
) -> None:
    cache = make_cache(ram={"capacity": 6 * MIB}, ssd={"write": "through"}).start()
    port = free_port()
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    with start(
        llama, cache, kv_events_config=config, kv_cache_memory_bytes=8 * MIB, max_model_len=1024
    ) as engine:
        indexer = Indexer(f"tcp://127.0.0.1:{port}", tmp_path / "indexer.log")
        try:
            wait_until(indexer.ready)
            for tokens in PROMPTS:
                engine.generate(tokens)

            def found(tokens: Sequence[int]) -> dict[str, int]:
                """Return the matched tokens by medium, after a step: events are published after each."""
                engine.generate(prompt(20))
                matched: dict[str, int] = indexer.query(tokens)["instances"].get("1", {})
                return {medium: matched.get(medium, 0) for medium in ("gpu", "cpu", "disk")}

            whole = len(PROMPTS[0])
            wait_until(lambda: all(found(tokens)["disk"] == whole for tokens in PROMPTS))
            assert found(PROMPTS[0]) == {"gpu": 0, "cpu": 0, "disk": whole}
            assert found(PROMPTS[-1]) == {"gpu": whole, "cpu": whole, "disk": whole}
            engine.reset_prefix_cache()
            wait_until(lambda: found(PROMPTS[-1]) == {"gpu": 0, "cpu": whole, "disk": whole})
            engine.reset_prefix_cache(external=True)
            wait_until(lambda: not any(sum(found(tokens).values()) for tokens in PROMPTS))
        finally:
            indexer.close()
