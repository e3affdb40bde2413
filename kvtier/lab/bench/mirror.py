"""The memory of the other process of a transport benchmark, and processes that map it for a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.lab.bench.sides import STAMP_BYTES, BenchFailed, Chunk
from kvtier.memory.arena import Arena, ArenaMap, address_of
from kvtier.memory.keys import ChunkKey


class Mirror:
    """The other process's arena. Each chunk has the same offset in it as in this process's arena."""

    def __init__(self, arena: Arena, path: Path, chunks: Sequence[Chunk]) -> None:
        """``path``: the other process's arena, as large as this one's."""
        self.capacity = arena.capacity
        self.path = path
        self.own_path = Path(f"/proc/{os.getpid()}/fd/{arena.fd}")
        self._start = address_of(arena.view(0, arena.capacity))
        self._chunks = {key: (self.offset(view), len(view)) for key, view in chunks}
        self._map = ArenaMap(os.open(path, os.O_RDWR), arena.capacity)

    def offset(self, view: memoryview) -> int:
        """Return the offset of a view of this process's arena, in both arenas."""
        return address_of(view) - self._start

    def clear(self, keys: Sequence[ChunkKey]) -> None:
        """Clear the first and last bytes of chunks in the other arena: only a put restores them."""
        for key in keys:
            view = self._map.view(*self._chunks[key])
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = bytes(STAMP_BYTES)

    def close(self) -> None:
        """Unmap the other process's arena."""
        self._map.close()


class Helper:
    """A process that runs a module and answers each line of JSON with one. Methods block."""

    def __init__(self, module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        # In a session of its own: Ctrl-C ends this process first, which then kills it.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.number = self._process.pid
        self.started = self._reply()
        """The first line, which it writes when it is ready."""

    def do(self, **command: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Send a command, and return the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _reply(self) -> Any:  # noqa: ANN401 - what JSON can hold
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"a helper process exited with status {self._process.wait()}")
        return json.loads(line)
