"""LMCache's own connectors, in a separate environment, on the same server as kvtier.

The first run creates the environment: 1.6 GB in ``$XDG_CACHE_HOME/kvtier``, with torch for CPUs if pip finds
it. LMCache is installed without its declared dependencies, because these are for CUDA, but with the packages
that its storage layer imports. redis-py comes without hiredis, as LMCache declares it, which is faster for
values of this size.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.commands import CommandProcess
from benchmarks.pools_sides import PoolSide
from kvtier.lab.bench.sides import Chunk
from kvtier.memory.keys import ChunkKey

VERSION = "0.5.6"
CONNECTORS = Path(__file__).with_name("connectors.py")
RESP_THREADS = 4
"""LMCache's default is 8. On two cores, 4 are as fast or faster, and match kvtier's connections."""
IMPORTED = (
    *("aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "cryptography", "fastapi", "httpx"),
    *("msgspec", "numba", "numpy<=2.2.6", "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml"),
    *("pyzmq", "redis", "requests", "sortedcontainers", "uvicorn"),
    *("opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0", "opentelemetry-exporter-otlp<=1.40.0"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "torch==2.13.0", "transformers>=5.4"),
)
"""The declared dependencies that LMCache's storage layer and server import."""


def run_connectors(url: str, chunk_bytes: int, chunks: int) -> CommandProcess:
    """Run LMCache's connectors, with memory for ``chunks`` chunks of one size."""
    options = ["--chunk-bytes", chunk_bytes, "--chunks", chunks, "--resp-threads", RESP_THREADS]
    return run_script(CONNECTORS, url, *options)


def run_script(script: Path, *options: object) -> CommandProcess:
    """Run a script in LMCache's environment."""
    return CommandProcess("LMCache", [str(python()), str(script), *map(str, options)])


class LMCacheSide(PoolSide):
    """One of LMCache's connectors. Uses its own chunks and keys, of the same number and size."""

    fills = False

    def __init__(self, process: CommandProcess, kind: Literal["redis", "resp"]) -> None:
        self._process = process
        self._kind = kind

    async def put(self, chunks: Sequence[Chunk]) -> float:
        return self._process.ask(self._kind, "put", len(chunks))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        return self._process.ask(self._kind, "get", len(chunks))

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        return self._process.ask(self._kind, "look_up", len(keys))

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """Do nothing: a lookup stores its keys first."""

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: LMCache has no such call. Another side empties the server."""


def cache_folder() -> Path:
    """Return where benchmarks keep what takes minutes to make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def python() -> Path:
    """Return the interpreter of LMCache's environment. Installs LMCache if necessary."""
    folder = cache_folder() / f"lmcache-{VERSION}"
    interpreter, done = folder / "bin" / "python", folder / "installed"
    requirements = "\n".join(IMPORTED)
    if not done.exists() or done.read_text() != requirements:
        print(f"installing LMCache {VERSION} into {folder} (once, takes minutes)", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *IMPORTED], check=True)
        subprocess.run([*install, "--no-deps", f"lmcache=={VERSION}"], check=True)
        done.write_text(requirements)
    return interpreter
