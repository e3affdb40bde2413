"""``kvtier tenants`` of a real cache process with an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rigs.bridges import KEYS, is_serving
from tests.rigs.bridges import store as store_chunks
from tests.rigs.waiting import wait_until

from .conftest import Kvtier, fork


@pytest.mark.parametrize("tenants", [{"team-a": {"share": 0.25, "max": 0.5}, "other": {"max": 0.75}}, {}])
def test_table_and_json(kvtier: Kvtier, tmp_path: Path, tenants: dict[str, dict[str, float]]) -> None:
    socket, config = tmp_path / "kv.sock", tmp_path / "kvtier.yaml"
    tier = {"name": "ram", "type": "cpu", "capacity": "8MiB", "low_watermark": 0.5}
    config.write_text(
        json.dumps({"socket": str(socket), "tiers": [tier], "tenants": tenants, "chunk_tokens": 64})
    )
    process = fork("serve", "--config", config)
    try:
        wait_until(lambda: is_serving(socket))
        scheduler, worker = store_chunks(socket, KEYS[:4])
        rows = json.loads(kvtier("tenants", "--config", config, "--json").output)
        result = kvtier("tenants", "--socket", socket)
        scheduler.close()
        worker.close()
    finally:
        process.kill()
        process.communicate()
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


def test_no_cache_process(kvtier: Kvtier, tmp_path: Path) -> None:
    result = kvtier("tenants", "--socket", tmp_path / "kv.sock")
    assert (result.status, result.output) == (1, "")
    assert "start one with `kvtier serve`" in result.errors
