"""``kvtier status``, ``tenants`` and ``clear-weights`` of a real cache process with an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.cli import cache_process as commands
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.memory.layout import namespace
from kvtier.testing.servers import free_port
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, LAYOUT, hello, reserve
from tests.rigs.bridges import store as store_chunks
from tests.rigs.waiting import wait_until

from .conftest import Kvtier, cache_process

RAM = {"name": "ram", "type": "cpu", "capacity": "8MiB"}
WEIGHTS = ("step-1", "step-2")


def disk(folder: Path) -> dict[str, str]:
    return {"name": "ssd", "type": "disk", "capacity": "16MiB", "path": str(folder / "ssd")}


def test_status_has_tables_and_json(kvtier: Kvtier, tmp_path: Path) -> None:
    peer, controller, pool = (f"127.0.0.1:{free_port()}" for _ in range(3))
    redis = {"name": "pool", "type": "redis", "url": f"redis://{pool}", "write": "never"}
    peers = {"listen": "127.0.0.1:0", "secret": "sixteen or more characters", "others": [peer]}
    url = f"http://{controller}"
    with cache_process(
        tmp_path, tiers=[RAM, disk(tmp_path), redis], peer=peers, controller={"url": url}
    ) as running:
        scheduler, worker = store_chunks(running.socket, KEYS[:4])
        wait_until(
            lambda: not json.loads(kvtier("status", "-c", running.config, "--json").output)["pending_bytes"]
        )
        report = json.loads(kvtier("status", "--socket", running.socket, "--json").output)
        result = kvtier("status", "--config", running.config)
        scheduler.close()
        worker.close()
    assert report["pid"] == running.pid
    assert [tier["chunks"] for tier in report["tiers"]] == [4, 4, 0, 0]
    assert result.status == 0
    lines = [line.split() for line in result.output.splitlines()]
    headline = f"Process {running.pid}, instance {report['instance']}, on {running.socket}: 0B to be"
    assert headline in result.output
    assert "being fetched, 0 pinned." in result.output
    assert ["ram", "cpu", "1.02MiB", "8MiB", "4", "adaptive:", "lru"] in lines
    assert ["ssd", "disk", "1.02MiB", "16MiB", "4", "adaptive:", "lru"] in lines
    assert ["pool", "redis", "0B", "-", "0", "-", *f"{pool} failed: Connection refused".split()] in lines
    assert ["engine", "-", "0", "0", "0"] in lines
    assert f"{peer}  -         not connected" in result.output
    assert f"{url}  not connected" in result.output
    assert "connections from peers  0" in result.output


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({}, ""),
        (
            {"put_failed": 3, "put_full": 4},
            "7 writes of chunks to lower tiers failed, 4 of them without room.",
        ),
        ({"not_admitted": 2}, "2 chunks were dropped, because no lower tier admits them."),
    ],
)
def test_status_counts_chunks_that_were_not_written(counts: dict[str, int], shown: str) -> None:
    report = {
        **dict.fromkeys(("pid", "instance", "pending_bytes", "flights", "pinned_chunks"), 0),
        "placement": dict.fromkeys(("cpus", "memory_policy", "memory_nodes"), ""),
        "counts": counts,
    }
    _, end = commands._headline(report, Path("socket")).split("NUMA nodes .")
    assert end.strip() == shown


@pytest.mark.parametrize("tenants", [{"team-a": {"share": 0.25, "max": 0.5}, "other": {"max": 0.75}}, {}])
def test_tenants_have_a_table_and_json(
    kvtier: Kvtier, tmp_path: Path, tenants: dict[str, dict[str, float]]
) -> None:
    with cache_process(tmp_path, tiers=[{**RAM, "low_watermark": 0.5}], tenants=tenants) as running:
        scheduler, worker = store_chunks(running.socket, KEYS[:4])
        rows = json.loads(kvtier("tenants", "--config", running.config, "--json").output)
        result = kvtier("tenants", "--socket", running.socket)
        scheduler.close()
        worker.close()
    assert result.status == 0
    if not tenants:
        assert rows == []
        assert result.output == "No tenants are configured: see the setting `tenants`.\n"
        return
    assert [(row["tier"], row["tenant"], row["chunks"]) for row in rows] == [
        ("ram", "other", 4),
        ("ram", "team-a", 0),
    ]
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0] == ["tier", "tenant", "used", "share", "max", "chunks", "hits", "evictions"]
    assert ["ram", "other", "1.02MiB", "0B", "3MiB", "4", "0", "0"] in lines
    assert ["ram", "team-a", "0B", "1MiB", "2MiB", "0", "0", "0"] in lines


def store_of_each_weights(socket: Path) -> None:
    """Store three chunks of each set of weights, and disconnect."""
    scheduler, worker = SchedulerBridge(hello("scheduler"), socket), WorkerBridge(hello("worker"), socket)
    worker.connect()
    scheduler.connect()
    for each in WEIGHTS:
        space = namespace("llama", LAYOUT, each)
        scheduler.use_weights(protocol.Weights(space, each))
        root = root_key(space)
        keys = chunk_keys(root, list(range(3 * CHUNK_TOKENS)), CHUNK_TOKENS)
        worker.commit(reserve(scheduler, root, keys).granted)
    wait_until(lambda: worker.confirm([]) is not None)
    scheduler.close()
    worker.close()


def test_weights_are_cleared_in_one_tier_and_in_all(kvtier: Kvtier, tmp_path: Path) -> None:
    with cache_process(tmp_path, tiers=[RAM, disk(tmp_path)]) as running:
        socket = running.socket

        def chunks() -> list[int]:
            report = json.loads(kvtier("status", "--socket", socket, "--json").output)
            return [tier["chunks"] for tier in report["tiers"]]

        store_of_each_weights(socket)
        wait_until(lambda: chunks() == [6, 6])
        result = kvtier("clear-weights", "step-1", "--tier", "ssd", "--config", running.config)
        assert (result.status, result.errors) == (0, "")
        assert "Removed 3 chunks" in result.output
        assert "of weights 'step-1'" in result.output
        assert chunks() == [6, 3]
        cleared = json.loads(kvtier("clear-weights", "step-1", "--socket", socket, "--json").output)
        assert cleared["chunks"] == 3
        assert chunks() == [3, 3]
        refused = kvtier("clear-weights", "step-2", "--tier", "disk", "--socket", socket)
        assert refused.status == 1
        assert "unknown tier 'disk': use one of ram, ssd" in refused.errors
        assert chunks() == [3, 3]


@pytest.mark.parametrize("command", [["status"], ["tenants"], ["clear-weights", "step-1"], ["whatif"]])
def test_command_without_a_cache_process_says_how_to_start_one(
    kvtier: Kvtier, tmp_path: Path, command: list[str]
) -> None:
    socket = tmp_path / "kv.sock"
    result = kvtier(*command, "--socket", socket)
    assert (result.status, result.output) == (1, "")
    assert f"the cache process does not answer on {socket}" in result.errors
    assert "start one with `kvtier serve`" in result.errors


def test_address_of_a_cache_process_that_an_engine_starts(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert f"does not answer on {tmp_path}/kvtier-" in kvtier("status").errors
