"""A cache process on a machine with saturated cores: no promotion from disk times out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello, Role
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from tests.rigs.bridges import confirm, is_serving, reserve
from tests.rigs.loads import MIB, saturated
from tests.rigs.waiting import wait_until

CHUNK_TOKENS, CHUNKS = 256, 64
PAYLOAD_BYTES = 4 * MIB - 4096
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(CHUNK_TOKENS, (PAYLOAD_BYTES,)),))
NAMESPACE = bytes(32)
ROOT = root_key(NAMESPACE)
KEYS = chunk_keys(ROOT, list(range(CHUNK_TOKENS * CHUNKS)), CHUNK_TOKENS)


@contextmanager
def cache_process(folder: Path) -> Iterator[Path]:
    """Run `kvtier serve` on the chunks in ``folder``, with default deadlines. Yields its socket."""
    socket = folder / "socket"
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "512MiB"},
        {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": "1GiB"},
    ]
    environment = {
        **os.environ,
        "KVTIER_TIERS": json.dumps(tiers),
        "KVTIER_SOCKET": str(socket),
        "KVTIER_PREFETCH": '{"policy": "wait"}',
    }
    process = subprocess.Popen([sys.executable, "-m", "kvtier", "serve"], env=environment)
    try:
        wait_until(lambda: is_serving(socket))
        yield socket
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def hello(role: Role) -> Hello:
    return Hello(protocol.VERSION, "engine", role, 0, LAYOUT, NAMESPACE)


def store(socket: Path) -> None:
    """Store the chunks on disk, each filled with its key."""
    scheduler, worker = SchedulerBridge(hello("scheduler"), socket), WorkerBridge(hello("worker"), socket)
    worker.connect()
    scheduler.connect()
    assert worker.arena is not None
    reserved = reserve(scheduler, ROOT, KEYS, CHUNK_TOKENS)
    assert all(reserved.leases)
    for key, offset in zip(KEYS, reserved.offsets, strict=True):
        worker.arena.view(offset + HEADER_BYTES, PAYLOAD_BYTES)[:] = key * (PAYLOAD_BYTES // len(key))
    worker.commit(reserved.leases)
    wait_until(lambda: status(socket)["counts"].get("put_ok", 0) == CHUNKS)
    scheduler.close()
    worker.close()


@pytest.mark.slow
def test_first_load_from_disk_with_saturated_cores(tmp_path: Path) -> None:
    with cache_process(tmp_path) as socket:
        store(socket)
    with saturated(), cache_process(tmp_path) as socket:
        scheduler, worker = SchedulerBridge(hello("scheduler"), socket), WorkerBridge(hello("worker"), socket)
        worker.connect()
        scheduler.connect()
        assert worker.arena is not None
        ticket = scheduler.look_up(Query(KEYS, CHUNK_TOKENS * CHUNKS))
        assert ticket is not None

        def is_final() -> bool:
            lookup = scheduler.found(ticket)
            assert lookup is not None
            return lookup.final

        wait_until(is_final)
        lookup = scheduler.found(ticket)
        assert lookup is not None
        assert len(lookup.leases) == CHUNKS, "some promotions timed out"
        assert confirm(worker, lookup.leases)
        for key, offset in zip(KEYS, lookup.offsets, strict=True):
            payload = worker.arena.view(offset + HEADER_BYTES, PAYLOAD_BYTES)
            assert payload == key * (PAYLOAD_BYTES // len(key))
            payload.release()
        scheduler.close()
        worker.close()
