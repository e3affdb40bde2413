"""The limits that tiers are compared with: minimal code that moves the same bytes over the same medium.

Memory: a single-threaded copy. Disk: whole files with O_DIRECT, one system call each. Redis: plain sockets
(:mod:`kvtier.lab.bench.raw_resp`). InfiniStore, Mooncake and object stores: the client libraries, as in their
examples.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvtier.backends.base import Backend
from kvtier.backends.disk.backend import DiskSettings
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.backends.redis.settings import RedisSettings
from kvtier.backends.s3.settings import S3Settings
from kvtier.lab.bench.raw_resp import LogIn, RawRESP
from kvtier.lab.bench.sides import Chunk, InThreads, Side, expect, filled
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings

RAW_FOLDER = "raw"
TITLE = "client library"


def limit_of(tier: TierSettings, backend: Backend, arena: Arena, length: int) -> Side | None:
    """Return the limit, with room for ``length`` bytes at once; ``None`` if it is unknown.

    Third-party backends have no limit, nor do pools over TLS, through sentinels, as a cluster, or over RDMA,
    which the limits do not support. Blocks. Raises ``OSError``, :class:`kvtier.errors.KVTierError`, and the
    client library's errors.
    """
    if backend.capabilities().arena is not None:
        return Memcpy(filled(length))
    if isinstance(tier, DiskSettings):
        return _raw_files(tier)
    if isinstance(tier, RedisSettings):
        return _raw_resp(tier)
    if isinstance(tier, InfiniStoreSettings) and tier.connection == "tcp":
        return InfiniStoreLibrary((tier.host, tier.port), tier.connections)
    if isinstance(tier, MooncakeSettings) and tier.protocol == "tcp":
        return MooncakeLibrary(tier.master, arena)
    if isinstance(tier, S3Settings):
        return ObstoreLibrary(tier)
    return None


def _raw_files(tier: DiskSettings) -> Side | None:
    folder = tier.path / RAW_FOLDER
    folder.mkdir(mode=0o700, parents=True)
    return RawFiles(folder, tier.concurrency) if _has_direct(folder) else None


def _has_direct(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        with _opened(probe, os.O_WRONLY | os.O_CREAT):
            return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _raw_resp(tier: RedisSettings) -> Side | None:
    place = tier.pool_url
    if place.kind != "single" or place.tls:
        return None
    (endpoint,) = place.endpoints
    address = endpoint.host if endpoint.port is None else (endpoint.host, endpoint.port)
    password = tier.password.get_secret_value() if tier.password is not None else None
    log_in = LogIn(tier.user, password, place.database)
    return RawRESP(address, tier.connections, log_in, timeout=tier.deadline)


class Memcpy(Side):
    """``memmove`` into memory that is already faulted in, and back."""

    title = "memcpy"

    def __init__(self, memory: memoryview) -> None:
        """``memory``: room for all chunks."""
        self._memory = memory
        self._offsets: dict[ChunkKey, int] = {}

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        address = address_of(self._memory)
        pairs = []
        for key, view in chunks:
            offset = self._offsets.setdefault(key, len(self._offsets) * len(view))
            pairs.append((address + offset, address_of(view), len(view)))
        return _copy(pairs)

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        address = address_of(self._memory)
        return _copy([(address_of(view), address + self._offsets[key], len(view)) for key, view in chunks])

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._offsets.pop(key, None)


def _copy(pairs: Sequence[tuple[int, int, int]]) -> float:
    started = time.perf_counter()
    for target, source, length in pairs:
        ctypes.memmove(target, source, length)
    return time.perf_counter() - started


class RawFiles(InThreads):
    """One file per chunk in an existing folder, written and read with O_DIRECT by ``threads`` threads."""

    title = "raw O_DIRECT"

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__([None] * threads)
        self._folder = folder

    def put_one(self, connection: None, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.put_one`."""
        with _opened(self._path(key), os.O_WRONLY | os.O_CREAT) as descriptor:
            moved = os.pwrite(descriptor, view, 0)
        expect(0, moved == len(view), f"short write of {moved} bytes: is the disk full?")

    def get_one(self, connection: None, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.get_one`."""
        with _opened(self._path(key), os.O_RDONLY) as descriptor:
            moved = os.preadv(descriptor, [view], 0)
        expect(0, moved == len(view), f"short read of {moved} bytes")

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / key.hex()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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


class ObstoreLibrary(InThreads):
    """``put`` and ``get`` of obstore, one call per chunk in as many threads as the tier has requests.

    ``get`` leaves the data in the library's own buffer.
    """

    title = TITLE
    fills = False

    def __init__(self, tier: S3Settings) -> None:
        from kvtier.backends.s3.store import make_store

        super().__init__([None] * tier.requests)
        self._store = make_store(tier, timedelta(seconds=tier.deadline))

    def put_one(self, connection: None, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.put_one`."""
        self._store.put(name_of(key), view)

    def get_one(self, connection: None, key: ChunkKey, view: memoryview) -> None:
        """See :meth:`InThreads.get_one`."""
        found = self._store.get(name_of(key)).bytes()
        expect(0, len(found) == len(view), len(found))

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        for key in keys:
            self._store.delete(name_of(key))


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
