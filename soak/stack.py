"""The processes of a phase: two instances with a disk each, Redis, a controller, and relays between peers."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.testing.relay import Relay
from kvtier.testing.servers import free_port
from soak import adapters
from soak.disks import Disk, small_disk
from soak.schedule import HOSTS
from tests.rigs.cache_process import MIB, CacheProcess
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.servers.redis import RedisServer

CHUNK_TOKENS = 128
RAM_BYTES = 24 * MIB
DISK_BYTES = 40 * MIB
DISK_SPACE_MIB = 80
REDIS_MEMORY = "96mb"
CONNECTOR = {"kv_connector": "TimedConnector", "kv_connector_module_path": "soak.connector"}
ENGINE: dict[str, Any] = {
    "kv_cache_memory_bytes": 32 * MIB,
    "max_num_batched_tokens": 1024,
    **adapters.ENGINE,
}
"""KV cache for 8192 tokens: less than the conversations need, so that kvtier loads them repeatedly."""
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "kv_load_failure_policy": "recompute",
}
MULTI_ENGINE: dict[str, Any] = {**ENGINE, "max_num_batched_tokens": 256}
"""Prompts take several steps, and so does what is computed again after a failed load."""
FAILING = {
    "kv_connector": "FailingConnector",
    "kv_connector_module_path": "soak.failing",
    "kv_role": "kv_both",
}
SECOND = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm.connector",
    "kv_role": "kv_both",
}
"""A second kvtier, whose cache process is started by vLLM and ends with its engine."""
SECOND_LINGER = "2s"
MARK = "SOAK_RUN"
"""The environment variable that identifies the processes of a run."""

FAKETIME = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib/faketime")


@dataclass
class Host:
    """One instance."""

    number: int
    folder: Path
    cache: CacheProcess
    disk: Disk
    link: Relay
    """The relay from this instance to the other."""
    clock: Path
    """The file with the offset of the cache process's wall clock, in libfaketime's format."""

    def engine(self) -> dict[str, Any]:
        """Return the arguments of its engine. The last one has two more connectors beside kvtier's."""
        if self.number < HOSTS - 1:
            return {"connector": self.cache.connector, "connector_type": CONNECTOR, **ENGINE}
        own = {
            "chunk_tokens": CHUNK_TOKENS,
            "linger": SECOND_LINGER,
            # The name makes its address that of no other run.
            "tiers": [{"name": self.folder.name, "type": "cpu", "capacity": RAM_BYTES}],
        }
        connectors = [
            FAILING,
            {**CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": self.cache.connector},
            {**SECOND, "kv_connector_extra_config": own},
        ]
        return {"connector": {"connectors": connectors}, "connector_type": MULTI, **MULTI_ENGINE}

    def set_clock(self, seconds: int) -> None:
        """Set the offset of the cache process's wall clock. It takes effect within 1 s."""
        self.clock.write_text(f"{seconds:+d}")

    def nixl_processes(self) -> list[int]:
        """Return the process ids of the NIXL processes."""
        pid = self.cache.pid
        below = [] if pid is None else children(pid)
        return [child for child in below if "nixl/worker.py" in command_line(child)]


@dataclass
class Stack:
    """All processes except the engines."""

    hosts: list[Host]
    redis: RedisServer
    controller: ControllerProcess
    unlisted: Relay
    """Where nothing of this run is, and nothing may connect to. Requests name it."""
    logs: Path

    def pids(self) -> dict[str, int | None]:
        """Return the ids of the processes that should be running; ``None`` if one is not."""
        return {
            **{f"cache-{host.number}": host.cache.pid for host in self.hosts},
            "redis": next(iter(self.redis.pids), None),
            "controller": self.controller.pid,
        }


def fake_time_library() -> Path | None:
    """Return libfaketime; ``None`` if it is not installed (Debian: ``apt-get install faketime``)."""
    found = (Path(folder) / "libfaketimeMT.so.1" for folder in FAKETIME)
    return next((library for library in found if library.exists()), None)


@contextmanager
def running(logs: Path, transport: str) -> Iterator[Stack]:
    """Run everything but the engines within the block. Logs remain in ``logs``."""
    logs.mkdir(parents=True)
    with ExitStack() as stack:
        redis = RedisServer(
            _folder(stack), maxmemory=REDIS_MEMORY, options=["--maxmemory-policy", "allkeys-lru"]
        )
        redis.log = logs / "redis.log"
        stack.enter_context(redis)
        controller = ControllerProcess(_folder(stack))
        controller.log = logs / "controller.log"
        stack.callback(controller.close)
        controller.start()
        ports = [free_port() for _ in range(HOSTS)]
        secret = secrets.token_hex(32)
        hosts = []
        for number in range(HOSTS):
            folder = _folder(stack)
            disk = stack.enter_context(small_disk(folder, DISK_SPACE_MIB))
            link = stack.enter_context(Relay.to(ports[1 - number]))
            peer = {
                "listen": f"127.0.0.1:{ports[number]}",
                "others": [f"127.0.0.1:{link.port}"],
                "secret": secret,
                "transport": {"type": transport},
            }
            cache = CacheProcess(
                folder,
                tiers=_tiers(disk, redis),
                partial_chunks=True,
                prefetch={"policy": "timeout", "deadline": "1s"},
                peer=peer,
                controller={"url": controller.url, "instance_id": f"instance-{number}"},
            )
            cache.log = logs / f"cache-{number}.log"
            hosts.append(Host(number, folder, cache, disk, link, folder / "clock"))
            hosts[-1].set_clock(0)
            cache.environment = _clock_variables(hosts[-1].clock)
            stack.callback(cache.kill)
            cache.start()
        unlisted = stack.enter_context(Relay.to(free_port()))
        yield Stack(hosts, redis, controller, unlisted, logs)


def _tiers(disk: Disk, redis: RedisServer) -> list[dict[str, Any]]:
    return [
        {"name": "ram", "type": "cpu", "capacity": RAM_BYTES},
        {
            "name": "ssd",
            "type": "disk",
            "path": str(disk.tier),
            "capacity": DISK_BYTES,
            "deadline": "2s",
        },
        {"name": "pool", **redis.tier(), "deadline": "1s"},
    ]


def _clock_variables(clock: Path) -> dict[str, str]:
    library = fake_time_library()
    if library is None:
        return {}
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        # Setting a system's clock changes neither the monotonic clock nor file times.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "FAKETIME_DISABLE_SHM": "1",
    }


def _folder(stack: ExitStack) -> Path:
    """Create a folder whose path is short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_model(folder: Path) -> Path:
    """Create the model for all engines, in a separate process, because it imports large libraries."""
    code = """if True:
        import pathlib, sys
        from tests.rigs.vllm.models import make_llama
        make_llama(pathlib.Path(sys.argv[1]))"""
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    return folder


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            direct = [int(child) for child in (task / "children").read_text().split()]
            found += direct
            for child in direct:
                found += children(child)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Return a process's command line; empty if it has exited or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """Return all other processes with ``MARK=mark`` in their environment."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found
