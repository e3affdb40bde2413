"""``kvtier clear-weights`` of a real cache process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.memory.layout import namespace
from tests.rigs.bridges import CHUNK_TOKENS, LAYOUT, hello, is_serving, reserve
from tests.rigs.waiting import wait_until

from .conftest import Kvtier, fork

CHUNKS = 3
WEIGHTS = ("step-1", "step-2")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


def store(socket: Path) -> None:
    """Store some chunks of each set of weights, and disconnect."""
    scheduler, worker = SchedulerBridge(hello("scheduler"), socket), WorkerBridge(hello("worker"), socket)
    worker.connect()
    scheduler.connect()
    for each in WEIGHTS:
        space = namespace("llama", LAYOUT, each)
        scheduler.use_weights(protocol.Weights(space, each))
        root = root_key(space)
        keys = chunk_keys(root, list(range(CHUNKS * CHUNK_TOKENS)), CHUNK_TOKENS)
        slots = reserve(scheduler, root, keys)
        worker.commit([slot.lease for slot in slots if slot is not None])
    wait_until(lambda: worker.confirm([]) is not None)
    scheduler.close()
    worker.close()


def chunks(kvtier: Kvtier, socket: Path) -> list[int]:
    report = json.loads(kvtier("status", "--socket", socket, "--json").output)
    return [tier["chunks"] for tier in report["tiers"]]


def test_weights_are_cleared_in_one_tier_and_in_all(kvtier: Kvtier, socket: Path, tmp_path: Path) -> None:
    settings = {
        "socket": str(socket),
        "chunk_tokens": CHUNK_TOKENS,
        "tiers": [
            {"name": "ram", "type": "cpu", "capacity": "8MiB"},
            {"name": "ssd", "type": "disk", "capacity": "16MiB", "path": str(tmp_path / "ssd")},
        ],
    }
    config = tmp_path / "kvtier.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    process = fork("serve", "--config", config)
    try:
        wait_until(lambda: is_serving(socket))
        store(socket)
        wait_until(lambda: chunks(kvtier, socket) == [2 * CHUNKS, 2 * CHUNKS])
        result = kvtier("clear-weights", "step-1", "--tier", "ssd", "--config", config)
        assert (result.status, result.errors) == (0, "")
        assert f"Removed {CHUNKS} chunks" in result.output
        assert "of weights 'step-1'" in result.output
        assert chunks(kvtier, socket) == [2 * CHUNKS, CHUNKS]
        cleared = json.loads(kvtier("clear-weights", "step-1", "--socket", socket, "--json").output)
        assert cleared["chunks"] == CHUNKS
        assert chunks(kvtier, socket) == [CHUNKS, CHUNKS]
        refused = kvtier("clear-weights", "step-2", "--tier", "disk", "--socket", socket)
        assert refused.status == 1
        assert "unknown tier 'disk': use one of ram, ssd" in refused.errors
        assert chunks(kvtier, socket) == [CHUNKS, CHUNKS]
    finally:
        process.kill()
        process.communicate()


def test_no_cache_process(kvtier: Kvtier, socket: Path) -> None:
    result = kvtier("clear-weights", "step-1", "--socket", socket)
    assert (result.status, result.output) == (1, "")
    assert "start one with `kvtier serve`" in result.errors
