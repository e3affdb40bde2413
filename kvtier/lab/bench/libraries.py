"""Limits of InfiniStore and Mooncake: their own client libraries, used as in their examples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvtier.lab.bench.sides import Chunk, InThreads, Side, expect
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.keys import ChunkKey

TITLE = "client library"


class InfiniStoreLibrary(InThreads):
    """``tcp_write_cache`` and ``tcp_read_cache``, which copy: the library has no other calls for TCP.

    ``tcp_read_cache`` has no destination argument, so ``get`` leaves the data in the library's own buffer.
    """

    title = TITLE
    fills = False

    def __init__(self, address: tuple[str, int], connections: int) -> None:
        super().__init__([_infinistore(address) for _ in range(connections)])

    def put_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """See :meth:`InThreads.put_one`."""
        connection.tcp_write_cache(name_of(key), address_of(view), len(view))

    def get_one(self, connection: Any, key: ChunkKey, view: memoryview) -> None:  # noqa: ANN401
        """See :meth:`InThreads.get_one`."""
        array = connection.tcp_read_cache(name_of(key))
        expect(0, array.nbytes == len(view), array.nbytes)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        self._connections[0].delete_keys([name_of(key) for key in keys])


class MooncakeLibrary(Side):
    """``batch_put_from`` and ``batch_get_into``: one call per batch, with the arena registered."""

    title = TITLE

    def __init__(self, master: str, arena: Arena) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
        expect(0, code == 0, code)
        self._start = address_of(arena.view(0, arena.capacity))
        code = self._store.register_buffer(self._start, arena.capacity)
        expect(0, code == 0, code)

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        spans = _spans(chunks)
        started = time.perf_counter()
        codes = self._store.batch_put_from(*spans)
        return expect(time.perf_counter() - started, set(codes) == {0}, codes)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        spans = _spans(chunks)
        started = time.perf_counter()
        codes = self._store.batch_get_into(*spans)
        return expect(time.perf_counter() - started, list(codes) == spans[2], codes)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        self._store.batch_remove([name_of(key) for key in keys], True)

    async def close(self) -> None:
        """See :meth:`Side.close`."""
        self._store.unregister_buffer(self._start)
        self._store.close()


def _infinistore(address: tuple[str, int]) -> Any:  # noqa: ANN401
    import infinistore

    host, port = address
    settings = infinistore.ClientConfig(
        host_addr=host, service_port=port, connection_type=infinistore.TYPE_TCP, log_level="warning"
    )
    connection = infinistore.InfinityConnection(settings)
    connection.connect()
    return connection


def name_of(key: ChunkKey) -> str:
    """Return the name of a chunk."""
    return f"library:{key.hex()}"


def _spans(chunks: Sequence[Chunk]) -> tuple[list[str], list[int], list[int]]:
    return (
        [name_of(key) for key, _ in chunks],
        [address_of(view) for _, view in chunks],
        [len(view) for _, view in chunks],
    )
