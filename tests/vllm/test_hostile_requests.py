"""Requests with hints, salts and prompts of any form, through vLLM's HTTP API."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import start_vllm
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import START_SECONDS, CacheProcess
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm.engine import ARGUMENTS
from tests.rigs.vllm.models import prompt, write_tokenizer
from tests.vllm.conftest import MakeCache, Oracle
from tests.vllm.test_neighbors import kvtier

REQUESTS, AT_ONCE = 320, 4
ODD = [
    *("null", "true", "NaN", "Infinity", "-1e999", "9" * 400, "-1", "1.5", "[]", "{}", '""', "[1,[2]]"),
    *("[" * 1000 + "]" * 1000, '{"a":' * 1000 + "1" + "}" * 1000, '"\\ud800"', '"' + "x" * 100_000 + '"'),
    *('"127.0.0.1:1"', '"127.0.0.1:2"', '"127.0.0.1:99999"', '"off"', '"write"'),
]
"""Values as JSON, of which some cannot be written with :mod:`json`."""
HINTS: dict[str, Any] = {
    "kv_transfer": {"to": "127.0.0.1:1"},
    "expect": {"tokens": 256, "seconds": 0.01},
    "cache": {"tenant": "a", "priority": 1, "retention": 1, "resume": 1, "recompute": 1, "mode": "both"},
}
GOOD = prompt(1000)
PROMPTS = ["[]", "[-1]", "[1000000000]", '"text"', '""', "[[1,2],[3]]", "null", "[1.5]"]


def hostile(random: Random, value: Any) -> str:
    """Return JSON like ``value``, of which parts are missing, odd or more."""
    if random.random() < 0.2:
        return random.choice(ODD)
    if not isinstance(value, dict):
        return json.dumps(value)
    parts = {name: hostile(random, each) for name, each in value.items() if random.random() < 0.8}
    if random.random() < 0.1:
        parts["unknown"] = random.choice(ODD)
    return "{" + ",".join(f"{json.dumps(name)}:{each}" for name, each in parts.items()) + "}"


def body(random: Random, model: str) -> bytes:
    tokens = prompt(random.randint(1, 600), start=random.randint(0, 5000))
    asked = json.dumps(tokens) if random.random() < 0.9 else random.choice(PROMPTS)
    salt = random.choice(ODD) if random.random() < 0.15 else '"tenant"'
    params = hostile(random, {"kvtier": HINTS, "other": 1})
    return (
        f'{{"model":{json.dumps(model)},"max_tokens":2,"temperature":0,"prompt":{asked},'
        f'"cache_salt":{salt},"kv_transfer_params":{params}}}'
    ).encode()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2])
def test_no_request_ends_the_engine(
    llama: Path, make_cache: MakeCache, oracle: Oracle, tmp_path: Path, count: int
) -> None:
    """With one kvtier, and with two in a ``MultiConnector``."""
    caches = [make_cache().start() for _ in range(count)]
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    write_tokenizer(model)
    children = [kvtier(cache.connector) for cache in caches]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    transfer = children[0] if count == 1 else multi
    port = free_port()
    server = start_vllm(
        str(model),
        port=port,
        config=None,
        log=tmp_path / "vllm.log",
        max_tokens=ARGUMENTS["max_model_len"],
        arguments=[
            *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ],
        connector=False,
        variables=VLLM_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    try:
        with Client(port, str(model)) as client, httpx.Client(base_url=client.url, timeout=120) as http:
            server.wait_until(client.healthy, START_SECONDS)

            def send(seed: int) -> int:
                return http.post(
                    "/v1/completions",
                    content=body(Random(seed), str(model)),
                    headers={"content-type": "application/json"},
                ).status_code

            with ThreadPoolExecutor(AT_ONCE) as pool:
                answers = Counter(pool.map(send, range(REQUESTS)))
            assert client.healthy()
            assert answers[200] > REQUESTS / 4
            check_good_requests(client, http, model, caches, oracle(llama, GOOD, 16))
    finally:
        server.kill()


def check_good_requests(
    client: Client, http: httpx.Client, model: Path, caches: Sequence[CacheProcess], expected: list[int]
) -> None:
    """Ask twice for :data:`GOOD`: it is computed and stored, and then loaded."""
    request: dict[str, Any] = {"model": str(model), "prompt": GOOD, "max_tokens": 16, "temperature": 0}
    request |= {"ignore_eos": True, "return_token_ids": True, "kv_transfer_params": {"kvtier": {}}}
    for _ in range(2):
        assert client.reset_prefix_cache()
        answer = http.post("/v1/completions", json=request).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert set(answer["kv_transfer_params"]) == {"kvtier"}
        for cache in caches:
            cache.wait_until_stored(len(GOOD))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > len(GOOD) // 2
