"""Cache processes, started by hand and by an engine, serve metrics on `metrics.listen`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from kvtier.bridge.client import SchedulerBridge, status
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.testing.servers import free_port
from tests.observability.metrics.scraping import settings
from tests.rigs.bridges import CHUNK_TOKENS as BRIDGE_CHUNK_TOKENS
from tests.rigs.bridges import KEYS, LAYOUT, _close_bridges, hello, is_serving, start, store
from tests.rigs.scrape import Scrape
from tests.rigs.waiting import wait_until

Start = Callable[..., subprocess.Popen[str]]
__all__ = ["_close_bridges", "start"]  # Fixtures.


def listen_on(config: Path, address: str) -> None:
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "metrics": {"listen": address}}))


def served_at(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"metrics on (http://\S+)/metrics", line):
            return found[1]
    raise AssertionError("no metrics address in the log")


def scrape(address: str) -> Scrape:
    return Scrape(httpx.get(f"{address}/metrics", trust_env=False, verify=False).text)


def test_kvtier_serve_exports_metrics_from_start_to_end(tmp_path: Path, start: Start) -> None:
    listen_on(tmp_path / "config.yaml", "127.0.0.1:0")
    process = start()
    address = served_at(process)
    assert httpx.get(f"{address}/healthz", trust_env=False, verify=False).json()["status"] == "ok"
    assert scrape(address)("engines") == 0
    wait_until(lambda: is_serving(tmp_path / "socket"))
    scheduler, worker = store(tmp_path / "socket", KEYS)
    wait_until(lambda: scrape(address)("pending_bytes") == 0)
    values = scrape(address)
    assert values("engines") == 1
    assert values("stored_chunks_total") == len(KEYS)
    assert values("tier_chunks", tier="ssd") == len(KEYS)
    written = values("transferred_bytes_total", source="ram", target="ssd", event="store")
    assert written > len(KEYS) * LAYOUT.payload_bytes(BRIDGE_CHUNK_TOKENS)
    for bridge in (scheduler, worker):
        bridge.close()
    wait_until(lambda: scrape(address)("engines") == 0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        scrape(address)


def test_unfinished_scrape_does_not_block_shutdown(tmp_path: Path, start: Start) -> None:
    listen_on(tmp_path / "config.yaml", "127.0.0.1:0")
    process = start()
    host, _, port = served_at(process).removeprefix("http://").partition(":")
    with (
        socket.create_connection((host, int(port))) as idle,
        socket.create_connection((host, int(port))) as incomplete,
    ):
        incomplete.sendall(b"GET /metr")
        wait_until(lambda: is_serving(tmp_path / "socket"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert idle.recv(1) == b""


def test_address_in_use_prevents_the_start(tmp_path: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listen_on(tmp_path / "config.yaml", address)
        _, errors = (process := start()).communicate(timeout=60)
    assert process.returncode == 1
    message = (
        f"cannot listen on {address}: Address already in use: set another address or port in metrics.listen"
    )
    assert message in " ".join(errors.split())
    assert "Traceback" not in errors
    assert not (tmp_path / "socket").exists()


def test_process_started_by_an_engine_exports_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    configured = settings(tmp_path, linger=0.3, metrics={"listen": address})
    path = default_address(configured)
    scheduler = SchedulerBridge(hello("scheduler"), path)
    process = CacheProcess(configured, path)
    process.start_and_wait(scheduler.connect)
    pid = status(path)["pid"]
    try:
        assert scrape(f"http://{address}")("engines") == 1
        scheduler.close()
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert "Traceback" not in process.log.read_text()
    finally:
        if is_serving(path):
            os.kill(pid, signal.SIGKILL)
