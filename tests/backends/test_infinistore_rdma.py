"""InfiniStore's RDMA path without a device: a fake library transfers the bytes over TCP to a real server."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.backends.infinistore import InfiniStoreBackend, InfiniStoreSettings
from kvtier.memory.arena import Arena
from kvtier.testing.backend import make_key, noise, same
from tests.rigs import chunks
from tests.rigs.chunks import FAILED, FULL, MISS, OK
from tests.rigs.servers.infinistore import InfiniStoreServer
from tests.rigs.servers.running import running

pytestmark = pytest.mark.anyio
MIB = 1 << 20
KEYS = [make_key(number) for number in range(4)]


class KeyNotFound(Exception):
    pass


class Library:
    """A fake of the ``infinistore`` library. ``fault`` names how connections and transfers fail."""

    TYPE_RDMA = "RDMA"
    ClientConfig = SimpleNamespace
    InfiniStoreKeyNotFound = KeyNotFound

    def __init__(self, server: InfiniStoreServer) -> None:
        self.server = server
        self.fault: str | None = None
        self.connections: list[Connection] = []

    def InfinityConnection(self, config: SimpleNamespace) -> Connection:  # noqa: N802
        self.connections.append(Connection(self, config))
        return self.connections[-1]


class Connection:
    def __init__(self, library: Library, config: SimpleNamespace) -> None:
        self.library = library
        self.config = config
        self.conn: Any = self
        self.closed = False
        self.region = (0, 0)

    def connect(self) -> None:
        if self.library.fault == "no device":
            raise Exception("Failed to setup RDMA connection")  # noqa: TRY002 - as the library does

    def close(self) -> None:
        self.closed = True

    def register_mr(self, address: int, length: int) -> None:
        self.region = (address, length)

    async def rdma_write_cache_async(self, blocks: list[tuple[str, int]], length: int, base: int) -> None:
        await self._fail()
        with self.library.server.connected() as connection:
            for name, address in self._addresses(blocks, length, base):
                connection.put(name, ctypes.string_at(address, length))

    async def rdma_read_cache_async(self, blocks: list[tuple[str, int]], length: int, base: int) -> None:
        await self._fail()
        with self.library.server.connected() as connection:
            for name, address in self._addresses(blocks, length, base):
                view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
                if not connection.get(name, view):
                    raise KeyNotFound

    def _addresses(
        self, blocks: list[tuple[str, int]], length: int, base: int
    ) -> Iterator[tuple[bytes, int]]:
        start, size = self.region
        assert base == start
        for name, offset in blocks:
            assert 0 <= offset <= size - length
            yield name.encode(), base + offset

    async def _fail(self) -> None:
        if self.library.fault == "hang":
            await anyio.sleep_forever()
        elif self.library.fault is not None:
            raise Exception(f"Failed to write to infinistore, ret = {self.library.fault}")  # noqa: TRY002


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfiniStoreServer]:
    with running(InfiniStoreServer, tmp_path_factory) as server:
        yield server


@pytest.fixture
def library(server: InfiniStoreServer, monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(server)
    monkeypatch.setitem(sys.modules, "infinistore", library)  # type: ignore[arg-type]
    return library


@asynccontextmanager
async def opened(library: Library, arena: Arena, **more: Any) -> AsyncIterator[InfiniStoreBackend]:
    merged = {**library.server.tier(), "connection": "rdma", "deadline": 1.0, **more}
    async with chunks.opened(InfiniStoreBackend(InfiniStoreSettings(name="pool", **merged))) as backend:
        await backend.register(arena)
        yield backend


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(16 * MIB)
    yield arena
    arena.close()


async def test_chunks_of_different_lengths_are_one_batch(library: Library, arena: Arena) -> None:
    lengths = [MIB, 4096, MIB, 9000]
    puts = [
        (key, arena.view(n * MIB, length)) for n, (key, length) in enumerate(zip(KEYS, lengths, strict=True))
    ]
    for key, view in puts:
        view[:] = noise(key, len(view))
    gets = [(key, arena.view((8 + n) * MIB, len(view))) for n, (key, view) in enumerate(puts)]
    async with opened(
        library, arena, url=library.server.tier()["url"].replace("127.0.0.1", "localhost")
    ) as backend:
        assert list(await backend.put(puts[1:])) == [OK] * 3
        assert list(await backend.get(gets)) == [MISS, OK, OK, OK]
        for (_, view), (_, value) in zip(gets[1:], puts[1:], strict=True):
            assert same(view, value)
        assert await backend.held_prefix(KEYS) == 0
        assert "over rdma" in await backend.check()
        (connection,) = library.connections
        assert connection.config.host_addr == "127.0.0.1"
        await backend.delete(KEYS)
        assert list(await backend.get(gets)) == [MISS] * 4
    assert connection.closed


async def test_missing_value_does_not_affect_others(library: Library, arena: Arena) -> None:
    puts = [(key, arena.view(n * MIB, MIB)) for n, key in enumerate(KEYS)]
    async with opened(library, arena) as backend:
        assert list(await backend.put(puts)) == [OK] * 4
        with library.server.connected() as connection:
            base = f"kvtier:{KEYS[2].hex()}".encode()
            found = memoryview(bytearray(24))
            assert connection.get(base, found)
            connection.delete([base + b":" + bytes(found[:16])])
        assert list(await backend.get(puts)) == [OK, OK, MISS, OK]


async def test_unanswered_transfer_fails_and_closes_its_connection(library: Library, arena: Arena) -> None:
    items = [(KEYS[0], arena.view(0, MIB))]
    async with opened(library, arena) as backend:
        assert list(await backend.put(items)) == [OK]
        library.fault = "hang"
        with anyio.fail_after(60):
            assert list(await backend.get(items)) == [FAILED]
        (connection,) = library.connections
        assert connection.closed
        assert connection.conn is None, "the queue pair was not destroyed"
        library.fault = None
        assert list(await backend.get(items)) == [OK]
        assert len(library.connections) == 2


@pytest.mark.parametrize(("fault", "outcome"), [("507", FULL), ("503", FAILED)])
async def test_error_codes_become_outcomes(
    library: Library, arena: Arena, fault: str, outcome: object
) -> None:
    items = [(KEYS[0], arena.view(0, MIB))]
    async with opened(library, arena) as backend:
        library.fault = fault
        assert list(await backend.put(items)) == [outcome]
        library.fault = None
        assert list(await backend.put(items)) == [OK]


async def test_missing_device_is_reported_with_its_setting(library: Library, arena: Arena) -> None:
    async with opened(library, arena) as backend:
        library.fault = "no device"
        assert list(await backend.put([(KEYS[0], arena.view(0, MIB))])) == [FAILED]
        with pytest.raises(Exception, match="check `device`"):
            await backend.check()
