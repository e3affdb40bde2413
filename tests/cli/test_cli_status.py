"""``kvtier status`` of a real cache process with an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.testing.servers import free_port
from tests.rigs.bridges import KEYS, is_serving
from tests.rigs.bridges import store as store_chunks
from tests.rigs.waiting import wait_until

from .conftest import Kvtier, fork

CHUNKS = 4


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


def test_tables_and_json(kvtier: Kvtier, socket: Path, tmp_path: Path) -> None:
    peer, controller, pool = (f"127.0.0.1:{free_port()}" for _ in range(3))
    settings = {
        "socket": str(socket),
        "chunk_tokens": 64,
        "tiers": [
            {"name": "ram", "type": "cpu", "capacity": "8MiB"},
            {"name": "ssd", "type": "disk", "capacity": "16MiB", "path": str(tmp_path / "ssd")},
            {"name": "pool", "type": "redis", "url": f"redis://{pool}", "write": "never"},
        ],
        "peer": {"listen": "127.0.0.1:0", "secret": "sixteen or more characters", "others": [peer]},
        "controller": {"url": f"http://{controller}"},
    }
    config = tmp_path / "kvtier.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    process = fork("serve", "--config", config)
    try:
        wait_until(lambda: is_serving(socket))
        scheduler, worker = store_chunks(socket, KEYS[:CHUNKS])
        wait_until(lambda: not json.loads(kvtier("status", "-c", config, "--json").output)["pending_bytes"])
        report = json.loads(kvtier("status", "--socket", socket, "--json").output)
        result = kvtier("status", "--config", config)
        scheduler.close()
        worker.close()
    finally:
        process.kill()
        process.communicate()
    assert report["pid"] == process.pid
    assert [tier["chunks"] for tier in report["tiers"]] == [CHUNKS, CHUNKS, 0, 0]
    assert result.status == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert f"Process {process.pid}, instance {report['instance']}, on {socket}: 0B to be" in result.output
    assert "being fetched, 0 pinned." in result.output
    assert ["ram", "cpu", "1.02MiB", "8MiB", str(CHUNKS), "adaptive:", "lru"] in lines
    assert ["ssd", "disk", "1.02MiB", "16MiB", str(CHUNKS), "adaptive:", "lru"] in lines
    assert ["pool", "redis", "0B", "-", "0", "-", *f"{pool} failed: Connection refused".split()] in lines
    assert ["engine", "-", str(0), str(0), str(0)] in lines
    assert f"{peer}  -         not connected" in result.output
    assert f"http://{controller}  not connected" in result.output
    assert "connections from peers  0" in result.output


def test_no_cache_process(kvtier: Kvtier, socket: Path) -> None:
    result = kvtier("status", "--socket", socket)
    assert (result.status, result.output) == (1, "")
    assert f"the cache process does not answer on {socket}" in result.errors
    assert "start one with `kvtier serve`" in result.errors


def test_address_of_a_cache_process_that_an_engine_starts(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert f"does not answer on {tmp_path}/kvtier-" in kvtier("status").errors
