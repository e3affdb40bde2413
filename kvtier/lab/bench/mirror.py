"""The memory of the other process of a transport benchmark, and processes that map it for a limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.lab.bench.sides import STAMP_BYTES, BenchFailed, Chunk
from kvtier.memory.arena import Arena, ArenaMap, address_of
from kvtier.memory.keys import ChunkKey
from kvtier.testing.transport_sides import OtherProcess


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


class Helper(OtherProcess):
    """The other process of a benchmark, or one for its limit. Calls raise :class:`BenchFailed`."""

    def call(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """See :meth:`OtherProcess.call`."""
        try:
            return super().call(name, **arguments)
        except (AssertionError, ConnectionError) as error:
            raise BenchFailed(str(error)) from error
