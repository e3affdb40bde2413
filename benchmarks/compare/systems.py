"""The systems of ``engines.py`` and ``benchmarks.serving``: vLLM, and the process that keeps its KV cache.

All with their default settings, but for the capacity of memory and a folder on disk. LMCache runs as its
server process and its connector, the only way in a vLLM for CPUs. vLLM's own offloading
(``offload_spec.py``) has no other process and no disk.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cache_process import CacheProcess
from benchmarks.peer import VERSION, python
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.model import LAYERS, make_model
from kvtier.lab.demo.server import DemoFailed, Server, start_vllm
from kvtier.lab.demo.work import GENERATED_MODEL_ARGUMENTS
from kvtier.testing.servers import free_port

MAX_TOKENS = 1536
READY_SECONDS = 300
HOST_BYTES, DISK_BYTES = 1 << 30, 8 << 30
"""More than twice what one turn stores. Not more, because four servers share the memory of one machine."""


@dataclass
class Parts:
    """What a connector needs: arguments and environment of vLLM, and how its cache process is started."""

    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    start: Callable[[], Server | CacheProcess] | None = None
    persistent: bool = False
    """Whether the cache outlives its process."""
    log: Path | None = None
    """Of its process."""
    metrics: str = ""
    """The URL of the metrics of its process."""
    left: Path | None = None
    """A file that vLLM leaves behind."""


class System:
    """A vLLM server with a connector."""

    def __init__(
        self,
        name: str,
        folder: Path,
        parts: Parts | None = None,
        *,
        engines: int = 1,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """``parts``: by default those of :data:`SYSTEMS`. ``engines``: replicas, with one cache process."""
        self.name = name
        self.parts = parts or SYSTEMS[name](folder)
        self.log = folder / "vllm.log"
        """Of the first vLLM."""
        self._folder, self._max_tokens = folder, max_tokens
        self._ports = [free_port() for _ in range(engines)]
        self.clients = [Client(port, str(folder.parent / "model")) for port in self._ports]
        """One for each replica."""
        self.client = self.clients[0]
        self._engines: list[Server] = []
        self._cache: Server | CacheProcess | None = None

    def start(self) -> None:
        """Start what does not run. Raises :class:`DemoFailed`."""
        if self._cache is None and self.parts.start is not None:
            self._cache = self.parts.start()
        for number, (port, client) in enumerate(zip(self._ports, self.clients, strict=True)):
            engine = start_vllm(
                str(self._folder.parent / "model"),
                port=port,
                config=None,
                log=self._folder / f"vllm-{number}.log" if number else self.log,
                max_tokens=self._max_tokens,
                arguments=[*GENERATED_MODEL_ARGUMENTS, "--dtype", "float32", *self.parts.arguments],
                connector=False,
                scratch=self._folder,
                name=f"vLLM with {self.name}",
                variables=self.parts.variables,
            )
            self._engines.append(engine)
            engine.wait_until(client.healthy, READY_SECONDS)

    def restart(self, *, cache: bool) -> None:
        """Restart vLLM, and the cache process as well if ``cache``, as after an upgrade."""
        while self._engines:
            self._engines.pop().stop()
        if cache and self._cache is not None:
            self._cache.stop()
            self._cache = None
        self.start()

    def kill_cache(self) -> None:
        """Kill the cache process, if there is one."""
        if self._cache is not None:
            self._cache.kill()

    def close(self) -> None:
        for process in (*self._engines, self._cache):
            if process is not None:
                # A killed vLLM or LMCache leaves shared memory behind.
                process.stop()
                process.kill()
        if self.parts.left is not None:
            self.parts.left.unlink(missing_ok=True)


@contextmanager
def running(
    names: Sequence[str],
    parts: Callable[[str, Path], Parts] = lambda name, folder: SYSTEMS[name](folder),
    *,
    layers: int = LAYERS,
    make: Callable[[Path], None] | None = None,
    engines: int = 1,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[list[System]]:
    """Start systems one after another, without those that cannot start. They idle in between.

    ``parts``: of a system, with a folder for its files. ``make``: writes the model, by default one of random
    weights with ``layers``. ``engines``: replicas of each, which share the cores.
    """
    # By default, the second of two servers is bound to other cores than the first.
    threads = max(1, (os.cpu_count() or 1) // engines)
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(threads))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (make or partial(make_model, layers=layers))(folder / "model")
        systems = []
        for name in names:
            (folder / name).mkdir()
            system = System(
                name, folder / name, parts(name, folder / name), engines=engines, max_tokens=max_tokens
            )
            stack.callback(system.close)
            try:
                system.start()
            except DemoFailed as error:
                print(f"{name}: skipped: {error}", file=sys.stderr, flush=True)
            else:
                print(f"{name}: ready", file=sys.stderr, flush=True)
                systems.append(system)
        yield systems


def plain(_folder: Path, **_storage: object) -> Parts:
    return Parts()


def kvtier(
    folder: Path,
    *,
    memory: int = HOST_BYTES,
    disk: str = "ssd",
    serve: bool = False,
    settings: dict[str, Any] | None = None,
) -> Parts:
    """Use the cache process that vLLM starts, or with ``serve`` one that runs ``kvtier serve``.

    ``disk``: as for :func:`lmcache`.
    """
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": memory}]
    if disk:
        tiers.append({"name": "ssd", "type": "disk", "path": str(folder / disk), "capacity": DISK_BYTES})
    settings = settings or {"tiers": tiers}
    cache = CacheProcess(folder, settings, serve=serve)

    def start() -> CacheProcess:
        cache.start()
        return cache

    connector = connector_arguments(
        "KVTierConnector", kv_connector_module_path="kvtier.integrations.vllm.connector"
    )
    return Parts(connector, cache.variables, start, persistent=True, log=folder / "cache.log")


def lmcache(
    folder: Path,
    *,
    memory: float = HOST_BYTES,
    disk: str = "l2",
    adapter: dict[str, Any] | None = None,
    quiet: bool = True,
) -> Parts:
    """Run LMCache's server in its own environment, for its connector in vLLM's environment.

    ``disk``: a path below ``folder``, or empty for memory only; ``adapter``: instead, what LMCache calls its
    L2 adapter. ``quiet``: log warnings only, not INFO as by default.
    """
    port, http, prometheus = free_port(), free_port(), free_port()
    if disk and adapter is None:
        (folder / disk).mkdir(exist_ok=True)
        adapter = {"type": "fs", "base_path": str(folder / disk)}
    files = ["--l2-adapter", json.dumps(adapter)] if adapter else []
    log = folder / "lmcache.log"
    command = [
        *(str(python().with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--shm-name", f"kvtier-bench-{os.getpid()}", "--l1-size-gb", f"{memory / (1 << 30):g}"),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *files,
        *("--http-port", str(http), "--prometheus-port", str(prometheus)),
    ]
    settings = {"LMCACHE_TRACK_USAGE": "false", **({"LMCACHE_LOG_LEVEL": "WARNING"} if quiet else {})}

    def start() -> Server:
        server = Server("LMCache", command, {**os.environ, **settings}, log)
        server.wait_until(lambda: is_listening(port), READY_SECONDS)
        return server

    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    variables = {"PYTHONPATH": os.pathsep.join([*sys.path[:1], str(lmcache_for_vllm())]), **settings}
    connector = connector_arguments("LMCacheMPConnector", kv_connector_extra_config=extra)
    metrics = f"http://127.0.0.1:{prometheus}/metrics"
    return Parts(connector, variables, start, persistent=True, log=log, metrics=metrics)


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def offload(folder: Path, *, memory: int = HOST_BYTES, disk: str = "") -> Parts:
    """Use vLLM's own connector with an offloading spec for CPUs. ``disk``: as for :func:`lmcache`."""
    extra: dict[str, Any] = {
        "spec_name": "CopyingOffloadingSpec",
        "spec_module_path": "benchmarks.compare.offload_spec",
        "cpu_bytes_to_use": memory,
    }
    if disk:
        extra["spec_name"] = "CopyingTieringSpec"
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder / disk)}]
    root = str(Path(__file__).parents[2])
    name = f"kvtier-bench-{os.getpid()}-{folder.name}"
    connector = connector_arguments("OffloadingConnector", engine_id=name, kv_connector_extra_config=extra)
    return Parts(connector, {"PYTHONPATH": root}, left=Path(f"/dev/shm/vllm_offload_{name}.mmap"))


SYSTEMS: dict[str, Callable[..., Parts]] = {
    "plain": plain,
    "kvtier": kvtier,
    "kvtier-serve": partial(kvtier, serve=True),
    "lmcache": lmcache,
    "offload": offload,
}


def connector_arguments(connector: str, **settings: Any) -> list[str]:  # noqa: ANN401 - JSON values
    config = {"kv_connector": connector, "kv_role": "kv_both", **settings}
    return ["--kv-transfer-config", json.dumps(config)]


def lmcache_for_vllm() -> Path:
    """Return the folder with packages of LMCache's connector that vLLM lacks. Installs them if missing."""
    folder = python().parents[1].with_name(f"lmcache-{VERSION}-beside-vllm")
    done = folder / "installed"
    if not done.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"lmcache=={VERSION}", "aiofile", "caio", "sortedcontainers"], check=True)
        done.touch()
    return folder
