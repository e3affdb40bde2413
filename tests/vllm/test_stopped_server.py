"""The cache process that a real server starts: it is not bound as the engine, and serves the next server."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.bridge.client import status
from kvtier.concurrency.placement import Placement
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import Server, start_vllm
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import models
from tests.vllm.test_replicas import READY_SECONDS, complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 900
AS_BY_DEFAULT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
"""The engine is a process of its own, which vLLM binds to CPUs and to a NUMA node."""


def test_next_server_finds_the_memory_warm(tmp_path: Path) -> None:
    """vLLM binds the engine's thread and memory, and kills all of its descendants when it is stopped."""
    model = models.make_llama(tmp_path / "model")
    config = tmp_path / "kvtier.yaml"
    tiers = [{"name": "ram", "type": "cpu", "capacity": "64MiB"}]
    settings = {"chunk_tokens": CHUNK, "partial_chunks": False, "linger": "10m", "tiers": tiers}
    config.write_text(json.dumps(settings))
    found, pids = [], []
    with tempfile.TemporaryDirectory(prefix="kvt-") as runtime:
        try:
            for run in range(2):
                with serving(model, config, runtime, tmp_path / f"{run}.log") as (server, port):
                    found.append(complete(port, str(model), models.prompt(LENGTH), 0))
                    pids.append(status(socket_in(runtime))["pid"])
                    expect_placement_of_server(pids[-1])
                    server.stop()
        finally:
            for pid in set(pids):
                os.kill(pid, signal.SIGTERM)
    (cold, computed), (warm, hit) = found
    assert (computed, hit) == (0, LENGTH // CHUNK * CHUNK)
    assert cold == warm
    assert len(set(pids)) == 1


def expect_placement_of_server(pid: int) -> None:
    """Expect that a process has the CPUs and the memory policy of this one, not those of an engine."""
    process = Path(f"/proc/{pid}")
    affinities = [os.sched_getaffinity(int(task.name)) for task in (process / "task").iterdir()]
    assert all(cpus == set(Placement.current().cpus) for cpus in affinities)
    assert " bind:" not in (process / "numa_maps").read_text()


@contextmanager
def serving(model: Path, config: Path, runtime: str, log: Path) -> Iterator[tuple[Server, int]]:
    """Run a server whose cache process has its socket below ``runtime``."""
    port = free_port()
    server = start_vllm(
        str(model),
        port=port,
        config=config,
        log=log,
        max_tokens=2048,
        arguments=["--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--skip-tokenizer-init"],
        scratch=Path(runtime),
        variables={**VLLM_ENVIRONMENT, **AS_BY_DEFAULT, "XDG_RUNTIME_DIR": runtime},
    )
    try:
        with Client(port, str(model)) as client:
            server.wait_until(client.healthy, READY_SECONDS)
        yield server, port
    finally:
        server.kill()


def socket_in(runtime: str) -> Path:
    (path,) = Path(runtime).glob("kvtier-*/*.sock")
    return path
