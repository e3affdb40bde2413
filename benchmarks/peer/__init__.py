"""LMCache beside kvtier: its own connectors, in an environment of their own, on the same server.

The first run makes the environment, 1.6 GB in ``$XDG_CACHE_HOME/kvtier``, where pip finds torch for
processors: LMCache itself without what it declares, since that is CUDA, and what its storage layer imports.
redis-py without hiredis, as LMCache declares it, which for values of this size is the faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvtier.bench.sides import Chunk, Side
from kvtier.keys import ChunkKey

VERSION = "0.5.6"
CONNECTORS = Path(__file__).with_name("connectors.py")
RESP_THREADS = 4
"""Its default is 8. On two cores 4 are as fast or faster, and as many as kvtier's connections."""
IMPORTED = (
    *(
        "aiofile",
        "blake3",
        "aiohttp",
        "cachetools",
        "cryptography",
        "httpx",
        "msgspec",
        "numba",
        "numpy<=2.2.6",
        "psutil",
    ),
    *("prometheus_client<=0.24.1", "py-cpuinfo", "pyyaml", "pyzmq", "redis", "requests", "sortedcontainers"),
    *("opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0", "opentelemetry-exporter-otlp<=1.40.0"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "torch==2.13.0", "transformers>=5.4"),
)
"""What LMCache's storage layer and its server import, of what it declares."""


class LMCache:
    """A process in which LMCache is at work, with memory for ``chunks`` chunks of one size."""

    def __init__(self, url: str, chunk_bytes: int, chunks: int) -> None:
        options = [
            *("--chunk-bytes", str(chunk_bytes), "--chunks", str(chunks)),
            *("--resp-threads", str(RESP_THREADS)),
        ]
        self._process = subprocess.Popen(
            [str(python()), str(CONNECTORS), url, *options],
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._answer()

    def ask(self, kind: str, call: str, count: int) -> float:
        """The seconds that one call took."""
        print(json.dumps([kind, call, count]), file=self._questions)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._questions.close()
        self._process.wait()
        self._answers.close()

    def _answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise SystemExit("LMCache has ended; what it said is above")
        answer: object = json.loads(line)
        return str(answer)


class LMCacheSide(Side):
    """One of its connectors. Chunks and keys are its own, as many and as long as those it is asked for."""

    fills = False

    def __init__(self, process: LMCache, kind: Literal["redis", "resp"]) -> None:
        self._process = process
        self._kind = kind

    async def put(self, chunks: Sequence[Chunk]) -> float:
        return self._process.ask(self._kind, "put", len(chunks))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        return self._process.ask(self._kind, "get", len(chunks))

    async def look_up(self, keys: Sequence[ChunkKey]) -> float:
        return self._process.ask(self._kind, "look_up", len(keys))

    async def hold(self, chunks: Sequence[Chunk]) -> None:
        """It does so when it looks up."""

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """It has no call for that: the server is emptied by others."""


def python() -> Path:
    """The interpreter that LMCache is installed for; installed now where it is not yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kvtier" / f"lmcache-{VERSION}"
    interpreter, done = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(IMPORTED)
    if not done.exists() or done.read_text() != wanted:
        print(f"installing LMCache {VERSION} into {folder}: some minutes, once", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *IMPORTED], check=True)
        subprocess.run([*install, "--no-deps", f"lmcache=={VERSION}"], check=True)
        done.write_text(wanted)
    return interpreter
