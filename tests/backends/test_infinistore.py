"""InfiniStore with a real server over TCP: the contract, and a server that dies or hangs."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from anyio import to_thread
from pydantic import ValidationError

from kvtier.backends.base import Backend
from kvtier.backends.infinistore import InfiniStoreBackend, InfiniStoreSettings
from kvtier.backends.infinistore import backend as infinistore
from kvtier.backends.infinistore.protocol import Drain, InfiniStoreConnection
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.errors import TierError
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import BackendConformance, blank, make_key, noise, same
from kvtier.testing.servers import free_port
from tests.rigs import chunks as rig
from tests.rigs.chunks import FAILED, FULL, MISS, OK, blanks, chunks
from tests.rigs.composed_backends import EncodedSuite, EncryptedSuite, SealedSuite
from tests.rigs.open_files import open_files
from tests.rigs.servers.infinistore import HOST, InfiniStoreServer
from tests.rigs.servers.running import running
from tests.rigs.tcp_server import serving

pytestmark = pytest.mark.anyio
DEADLINE_SECONDS = 2.0
"""Deadline of tests with a paused server."""
LONG_DEADLINE_SECONDS = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfiniStoreServer]:
    with running(InfiniStoreServer, tmp_path_factory) as server:
        yield server


@pytest.fixture
def server(shared: InfiniStoreServer) -> InfiniStoreServer:
    """A freshly started server."""
    shared.kill()
    shared.start()
    return shared


def backend_on(server: InfiniStoreServer, **more: Any) -> InfiniStoreBackend:
    return InfiniStoreBackend(InfiniStoreSettings(name="pool", **{**server.tier(), **more}))


def opened(server: InfiniStoreServer, **more: Any) -> AbstractAsyncContextManager[InfiniStoreBackend]:
    return rig.opened(backend_on(server, **{"deadline": LONG_DEADLINE_SECONDS, **more}))


class TestInfiniStore(BackendConformance):
    persistent = True
    server: ClassVar[InfiniStoreServer]
    tests: ClassVar[int] = 0

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, shared: InfiniStoreServer) -> None:
        cls.server = shared

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        """Use a new prefix for each test. Values of other tests stay in the pool."""
        type(self).tests += 1

    def make_backend(self, path: Path) -> Backend:
        return backend_on(self.server, prefix=self.prefix)

    @property
    def prefix(self) -> str:
        return f"{type(self).__name__}{self.tests}:"

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key, prefix=self.prefix)


class TestSealedInfiniStore(SealedSuite, TestInfiniStore): ...


class TestEncodedInfiniStore(EncodedSuite, TestInfiniStore): ...


@pytest.mark.slow
class TestEncryptedInfiniStore(EncryptedSuite, TestInfiniStore): ...


@pytest.mark.skipif(not Path("/dev/infiniband").exists(), reason="no RDMA device")
async def test_arena_chunks_use_rdma(server: InfiniStoreServer) -> None:
    arena = Arena.create(8 * MIB)
    async with opened(server, connection="rdma") as backend:
        await backend.register(arena)
        views = [arena.view(start, MIB) for start in (0, 2 * MIB)]
        views[0][:] = noise(b"rdma", MIB)
        assert list(await backend.put([(make_key(1), views[0])])) == [OK]
        outcomes = await backend.get([(make_key(1), views[1]), (make_key(2), arena.view(4 * MIB, MIB))])
        assert list(outcomes) == [OK, MISS]
        assert same(views[0], views[1])
        del views
    arena.close()


async def test_other_memory_uses_tcp(server: InfiniStoreServer) -> None:
    """Before an arena is registered, all memory uses TCP."""
    arena = Arena.create(MIB)
    async with opened(server, connection="rdma") as backend:
        assert list(await backend.put(chunks([1]))) == [OK]
        await backend.register(arena)
        assert list(await backend.put(chunks([2]))) == [OK]
        assert list(await backend.get(blanks([1, 2, 3]))) == [OK, OK, MISS]
    arena.close()


async def test_server_matches_the_prefix(server: InfiniStoreServer) -> None:
    async with opened(server) as backend:
        items = chunks(range(6))
        keys = [key for key, _ in items]
        assert await backend.held_prefix(keys) == 0
        assert list(await backend.put(items[:4])) == [OK] * 4
        assert await backend.held_prefix(keys) == 4
        assert await backend.held_prefix(keys[:3]) == 3
        assert await backend.held_prefix([]) == 0


async def test_replacing_a_chunk_frees_the_old_value(server: InfiniStoreServer) -> None:
    """200 replacements of 8 MiB exceed the pool of 1 GiB, so old values must be freed."""
    async with opened(server, deadline=5.0) as backend:
        (item,) = await to_thread.run_sync(chunks, [1], 8 * MIB)
        for _ in range(200):
            assert list(await backend.put([item])) == [OK]
        await backend.delete([item[0]])
        assert list(await backend.contains([item[0]])) == [False]


async def test_value_larger_than_the_pool_is_full(
    server: InfiniStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, deadline=5.0) as backend:
        (small,) = chunks([1])
        assert list(await backend.put([(make_key(2), blank(16)), small])) == [OK, OK]
        giant = memoryview(mmap.mmap(-1, 1100 * MIB))  # Uses no memory: its pages are never written.
        assert list(await backend.put([(make_key(3), giant), small])) == [FULL, OK]
        assert "the server is full" in caplog.text


async def test_killed_server_fails_fast_and_is_used_after_restart(
    server: InfiniStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server) as backend:
        items = chunks(range(8))
        keys = [key for key, _ in items]
        assert list(await backend.put(items)) == [OK] * 8
        await to_thread.run_sync(server.kill)
        began = time.monotonic()
        assert list(await backend.get(blanks(range(8)))) == [FAILED] * 8
        assert list(await backend.put(items)) == [FAILED] * 8
        for call in (backend.contains, backend.held_prefix, backend.delete):
            with pytest.raises(OSError, match=r"refused|reset|closed"):
                await call(keys)
        assert time.monotonic() - began < LONG_DEADLINE_SECONDS / 2, "calls waited for the deadline"
        with pytest.raises(TierError, match="check that the server is running"):
            await backend.check()
        assert caplog.text.count("WARNING") == 1
        await to_thread.run_sync(server.start)
        assert list(await backend.get(blanks(range(8)))) == [MISS] * 8
        assert list(await backend.put(items)) == [OK] * 8
        assert list(await backend.contains(keys)) == [True] * 8
        assert "InfiniStore at" in await backend.check()


@pytest.mark.parametrize(
    "method",
    [
        "get",
        "contains",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("put", "held_prefix", "delete")),
    ],
)
async def test_paused_server_fails_by_the_deadline(server: InfiniStoreServer, method: str) -> None:
    async with opened(server, deadline=DEADLINE_SECONDS) as backend:
        items = chunks(range(8), MIB)
        keys = [key for key, _ in items]
        assert list(await backend.put(items)) == [OK] * 8
        server.pause()
        try:
            if method in ("put", "get"):
                batch = items if method == "put" else blanks(range(8), MIB)
                assert list(await getattr(backend, method)(batch)) == [FAILED] * 8
            else:
                with pytest.raises(TimeoutError):
                    await getattr(backend, method)(keys)
        finally:
            server.resume()
        views = blanks(range(8), MIB)
        with anyio.fail_after(30):
            assert list(await backend.put(items)) == [OK] * 8
            assert list(await backend.get(views)) == [OK] * 8
        assert all(same(view, item[1]) for (_, view), item in zip(views, items, strict=True))


async def test_reading_during_a_write_does_not_crash_the_server(server: InfiniStoreServer) -> None:
    """The server (0.2.35) crashes if a client reads a value that is still being written."""
    async with opened(server, deadline=20.0) as backend, opened(server, deadline=20.0) as other:
        (item,) = await to_thread.run_sync(chunks, [1], 64 * MIB)
        views = await to_thread.run_sync(blanks, [1], 64 * MIB)
        outcomes = set()
        written = False

        async def read() -> None:
            while not written:
                outcomes.update(await other.get(views))
                outcomes.update([OK] if (await other.contains([item[0]]))[0] else [MISS])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for _ in range(6):
                assert list(await backend.put([item])) == [OK]
            written = True
        assert outcomes <= {OK, MISS}
        assert list(await other.get(views)) == [OK]


@pytest.mark.loop_may_block("frees half a gigabyte")
async def test_values_of_cancelled_puts_are_removed(server: InfiniStoreServer) -> None:
    """A cancelled write still completes and frees the value that it replaces; otherwise the pool fills up."""
    async with opened(server) as backend:
        items = await to_thread.run_sync(chunks, range(10), 48 * MIB)
        for _ in range(40):  # Twice the capacity of the pool.
            with anyio.move_on_after(0.01):
                await backend.put(items[:1])
    async with opened(server, deadline=20.0) as backend:
        assert list(await backend.put(items)) == [OK] * 10


async def test_writes_cut_off_by_the_deadline_do_not_crash_the_server(server: InfiniStoreServer) -> None:
    """The server (0.2.35) crashes if a partly written value is deleted."""
    value = memoryview(bytearray(32 * MIB))
    items = [(make_key(number), value) for number in range(4)]
    async with opened(server, deadline=DEADLINE_SECONDS) as backend:
        server.pause()
        try:
            assert list(await backend.put(items)) == [FAILED] * 4
        finally:
            server.resume()
        small = chunks([9])
        with anyio.fail_after(LONG_DEADLINE_SECONDS):
            while list(await backend.put(small)) != [OK]:
                pass
        assert list(await backend.get(blanks([9]))) == [OK]
        await backend.delete([key for key, _ in items])
        assert list(await backend.contains([small[0][0]])) == [True]


def test_drain_reads_an_abandoned_value_to_its_end(server: InfiniStoreServer) -> None:
    """The server (0.2.35) crashes if a connection is closed while it is sending."""
    before = len(open_files())
    drain = Drain()
    with server.connected() as connection:
        connection.put(b"long", bytes(64 * MIB))
        for _ in range(5):
            reader = InfiniStoreConnection(socket.AF_INET, drain)
            reader.deadline = Deadline(LONG_DEADLINE_SECONDS)
            reader.connect((HOST, server.port))
            assert not reader.get(b"long", memoryview(bytearray(1)))
            assert not reader.in_sync
            reader.close()
        drain.close(LONG_DEADLINE_SECONDS)
        assert list(connection.exist([b"long", b"short"])) == [True, False]
    assert len(open_files()) == before


async def test_connections_to_a_paused_server_are_closed_after_a_while(
    server: InfiniStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinistore, "CLOSE_SECONDS", 0.0)
    before = len(open_files())
    async with opened(server, deadline=DEADLINE_SECONDS) as backend:
        assert list(await backend.put(chunks([1]))) == [OK]
        server.pause()
        assert list(await backend.get(blanks([1]))) == [FAILED]
    await anyio.to_thread.run_sync(server.kill)
    assert len(open_files()) == before


async def test_prefix_ends_at_the_first_missing_chunk(server: InfiniStoreServer) -> None:
    """A full server evicts the first chunk first, which its binary search does not detect."""
    keys = [key for key, _ in chunks(range(200), 10)]
    async with opened(server) as backend:
        assert set(await backend.put(chunks(range(200), 10))) == {OK}
        assert await backend.held_prefix(keys) == 200
        for hole in (150, 70, 1, 0):
            await backend.delete([keys[hole]])
            assert await backend.held_prefix(keys) == hole
        assert list(await backend.contains(keys)).count(True) == 196


async def test_evicted_chunk_is_not_reported_after_a_miss(server: InfiniStoreServer) -> None:
    value = memoryview(bytearray(16 * MIB))
    keys = [make_key(number) for number in range(80)]
    async with opened(server, deadline=LONG_DEADLINE_SECONDS) as backend:
        # Alone: values of one batch are written concurrently, and evicted in the order of their completion.
        assert list(await backend.put([(keys[0], value)])) == [OK]
        assert set(await backend.put([(key, value) for key in keys[1:]])) == {OK}
        outcomes = list(await backend.get([(key, value) for key in keys]))
        assert list(await backend.contains(keys)) == [outcome is OK for outcome in outcomes]
        assert outcomes[0] is MISS
        assert outcomes[-1] is OK


async def test_replaced_chunk_is_evicted_last(server: InfiniStoreServer) -> None:
    """The server (0.2.35) evicts a value together with the one that it overwrote."""
    (replaced,) = chunks([99])
    value = memoryview(bytearray(16 * MIB))
    async with opened(server, deadline=LONG_DEADLINE_SECONDS) as backend:
        assert list(await backend.put([replaced])) == [OK]
        assert list(await backend.put([(make_key(0), value)])) == [OK]
        assert set(await backend.put([(make_key(number), value) for number in range(1, 50)])) == {OK}
        assert list(await backend.put([replaced])) == [OK]
        # The server evicts the oldest values until it is 80 % full.
        assert set(await backend.put([(make_key(number), value) for number in range(50, 70)])) == {OK}
        assert list(await backend.contains([make_key(0), replaced[0]])) == [False, True]


@pytest.mark.parametrize("pieces", [9, 18])
async def test_consecutive_values_of_critical_sizes(server: InfiniStoreServer, pieces: int) -> None:
    """The server (0.2.35) misreads a request that directly follows a value of this many pieces."""
    value = memoryview(bytearray(pieces * 256 * 1024))
    items = [(make_key(number), value) for number in range(20)]
    async with opened(server, connections=1) as backend:
        assert set(await backend.put(items)) == {OK}
        for _ in range(5):
            assert set(await backend.get(items)) == {OK}


async def test_leaves_no_connections_or_threads(server: InfiniStoreServer) -> None:
    before = len(open_files())
    threads = threading.active_count()
    for _ in range(5):
        async with opened(server, connections=2) as backend:
            assert list(await backend.put(chunks(range(20)))) == [OK] * 20
            assert list(await backend.get(blanks(range(20)))) == [OK] * 20
    assert len(open_files()) == before
    assert threading.active_count() <= threads + 8, "more than the idle threads that anyio keeps for a while"


async def test_check_rejects_a_server_of_another_protocol(caplog: pytest.LogCaptureFixture) -> None:
    def reply(connection: socket.socket) -> None:
        if connection.recv(1 << 16):  # All of it, or close() would reset the connection. Some stay unused.
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with serving(reply) as port:
        settings = InfiniStoreSettings(
            name="pool", type="infinistore", url=f"infinistore://{HOST}:{port}", deadline=1.0
        )
        async with rig.opened(InfiniStoreBackend(settings)) as backend:
            assert list(await backend.get(blanks([1]))) == [FAILED]
            with pytest.raises(TierError, match="does not answer like an InfiniStore"):
                await backend.check()
    assert "status" in caplog.text


async def test_rdma_without_the_library_fails_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "infinistore", None)
    url = f"infinistore://127.0.0.1:{free_port()}"
    backend = InfiniStoreBackend(
        InfiniStoreSettings(name="pool", type="infinistore", url=url, connection="rdma")
    )
    with pytest.raises(TierError, match=r"tier 'pool': .* pip install 'kvtier\[infinistore\]'"):
        await backend.open()


def test_url_may_name_the_device() -> None:
    written = {"name": "pool", "type": "infinistore", "url": "infinistore://h:12345/?device=mlx5_1"}
    settings = InfiniStoreSettings.model_validate(written)
    assert (settings.url, settings.host, settings.port) == ("infinistore://h:12345", "h", 12345)
    assert settings.device == "mlx5_1"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"url": "redis://h:1"}, "is not a valid InfiniStore URL"),
        ({"url": "infinistore://h"}, "is not a valid InfiniStore URL"),
        ({"url": "infinistore://h:99999"}, "is not a valid InfiniStore URL"),
        ({"url": "infinistore://h:1/x"}, "only .device=NAME"),
        ({"url": "infinistore://h:1?device=a", "device": "b"}, "only .device=NAME"),
        ({"url": "infinistore://h:1?dev=a"}, "only .device=NAME"),
        ({"url": "infinistore://h:1", "gid_index": 3}, "set connection: rdma"),
        ({"url": "infinistore://h:1", "link_type": "RoCE"}, "IB"),
    ],
    ids=str,
)
def test_invalid_settings(written: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        InfiniStoreSettings.model_validate({"name": "pool", "type": "infinistore", **written})
