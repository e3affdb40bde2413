"""InfiniStore on a real server over TCP: the contract, and what happens when it dies or stands still."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from anyio import to_thread
from pydantic import ValidationError

from kvtier.arena import Arena
from kvtier.backends.base import Backend
from kvtier.backends.infinistore import InfiniStoreBackend, InfiniStoreSettings
from kvtier.backends.infinistore.drain import Drain
from kvtier.backends.infinistore.protocol import InfiniStoreConnection
from kvtier.backends.sealed import SealedBackend
from kvtier.errors import TierError
from kvtier.keys import ChunkKey
from kvtier.sockets.connection import Deadline
from kvtier.testing.backend import BackendConformance, blank, make_key, noise, same
from kvtier.testing.servers.base import free_port
from kvtier.testing.servers.infinistore import HOST, InfiniStoreServer
from tests.open_files import open_files

from .chunks import FAILED, FULL, MISS, OK, blanks, chunks

pytestmark = pytest.mark.anyio
DEADLINE_SECONDS = 2.0
"""Of a server that stands still."""
PATIENCE = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfiniStoreServer]:
    if reason := InfiniStoreServer.missing():
        pytest.skip(reason)
    with InfiniStoreServer(tmp_path_factory.mktemp("i")) as server:
        yield server


@pytest.fixture
def server(running: InfiniStoreServer) -> InfiniStoreServer:
    """One that runs, whatever the test before has done to it."""
    running.kill()
    running.start()
    return running


def descriptors() -> int:
    return len(open_files())


def backend_on(server: InfiniStoreServer, **more: Any) -> InfiniStoreBackend:
    return InfiniStoreBackend(InfiniStoreSettings(name="pool", **{**server.tier(), **more}))


@asynccontextmanager
async def opened(server: InfiniStoreServer, **more: Any) -> AsyncIterator[InfiniStoreBackend]:
    backend = backend_on(server, **{"deadline": PATIENCE, **more})
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def blank_pages(length: int) -> memoryview:
    """Zeros that take no memory as long as they are only read."""
    return memoryview(mmap.mmap(-1, length))


class TestInfiniStore(BackendConformance):
    persistent = True
    server: ClassVar[InfiniStoreServer]
    tests: ClassVar[int] = 0

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, running: InfiniStoreServer) -> None:
        cls.server = running

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        """Nothing is ever deleted of what other tests have put, but nobody finds it."""
        type(self).tests += 1

    def make_backend(self, path: Path) -> Backend:
        return backend_on(self.server, prefix=self.prefix)

    @property
    def prefix(self) -> str:
        return f"{type(self).__name__}{self.tests}:"

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key, prefix=self.prefix)


class TestSealedInfiniStore(TestInfiniStore):
    chunk_objects = True

    def make_backend(self, path: Path) -> Backend:
        return SealedBackend(super().make_backend(path))


@pytest.mark.skipif(not Path("/dev/infiniband").exists(), reason="there is no RDMA device")
async def test_chunks_of_the_arena_go_over_rdma(server: InfiniStoreServer) -> None:
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


async def test_what_is_not_in_the_arena_goes_over_tcp(server: InfiniStoreServer) -> None:
    """So does everything before the arena is known."""
    arena = Arena.create(MIB)
    async with opened(server, connection="rdma") as backend:
        assert list(await backend.put(chunks([1]))) == [OK]
        await backend.register(arena)
        assert list(await backend.put(chunks([2]))) == [OK]
        assert list(await backend.get(blanks([1, 2, 3]))) == [OK, OK, MISS]
    arena.close()


async def test_a_prefix_is_matched_by_the_server(server: InfiniStoreServer) -> None:
    async with opened(server) as backend:
        items = chunks(range(6))
        keys = [key for key, _ in items]
        assert await backend.held_prefix(keys) == 0
        assert list(await backend.put(items[:4])) == [OK] * 4
        assert await backend.held_prefix(keys) == 4
        assert await backend.held_prefix(keys[:3]) == 3
        assert await backend.held_prefix([]) == 0


async def test_a_replaced_chunk_leaves_nothing_behind(server: InfiniStoreServer) -> None:
    """A gigabyte holds two hundred values of four megabytes: it would be full of former ones."""
    async with opened(server, deadline=5.0) as backend:
        (item,) = await to_thread.run_sync(chunks, [1], 8 * MIB)
        for _ in range(200):
            assert list(await backend.put([item])) == [OK]
        await backend.delete([item[0]])
        assert list(await backend.contains([item[0]])) == [False]


async def test_a_value_that_is_larger_than_the_pool_is_full(
    server: InfiniStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server, deadline=5.0) as backend:
        (small,) = chunks([1])
        assert list(await backend.put([(make_key(2), blank(16)), small])) == [OK, OK]
        giant = blank_pages(1100 * MIB)
        assert list(await backend.put([(make_key(3), giant), small])) == [FULL, OK]
        assert "no room" in caplog.text


async def test_a_server_that_was_killed_fails_at_once_and_is_used_again(
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
        for ask in (backend.contains, backend.held_prefix, backend.delete):
            with pytest.raises(OSError, match=r"refused|reset|closed"):
                await ask(keys)
        assert time.monotonic() - began < PATIENCE / 2, "it did not wait for the deadline"
        with pytest.raises(TierError, match="see `url`"):
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
async def test_a_server_that_stands_still_fails_by_the_deadline(
    server: InfiniStoreServer, method: str
) -> None:
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


async def test_a_reader_amid_a_write_does_not_end_the_server(server: InfiniStoreServer) -> None:
    """Where it ends itself when it is asked for a value that is still being written."""
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


@pytest.mark.loop_may_block("hands half a gigabyte back")
async def test_what_was_given_up_is_removed(server: InfiniStoreServer) -> None:
    """A write that is cancelled is finished, and what it replaces is removed: the pool would be full else."""
    async with opened(server) as backend:
        items = await to_thread.run_sync(chunks, range(10), 48 * MIB)
        for _ in range(40):  # Twice what there is room for.
            with anyio.move_on_after(0.01):
                await backend.put(items[:1])
    async with opened(server, deadline=20.0) as backend:
        assert list(await backend.put(items)) == [OK] * 10


async def test_values_cut_off_by_the_deadline_do_not_end_the_server(server: InfiniStoreServer) -> None:
    """Where it ends itself when a value that was not written to its end is deleted."""
    value = memoryview(bytearray(32 * MIB))
    items = [(make_key(number), value) for number in range(4)]
    async with opened(server, deadline=DEADLINE_SECONDS) as backend:
        server.pause()
        try:
            assert list(await backend.put(items)) == [FAILED] * 4
        finally:
            server.resume()
        small = chunks([9])
        with anyio.fail_after(PATIENCE):
            while list(await backend.put(small)) != [OK]:
                pass
        assert list(await backend.get(blanks([9]))) == [OK]
        await backend.delete([key for key, _ in items])
        assert list(await backend.contains([small[0][0]])) == [True]


def test_a_value_that_is_given_up_is_read_to_its_end(server: InfiniStoreServer) -> None:
    """Where the server ends itself when a connection is closed on which it is still sending."""
    before = descriptors()
    drain = Drain()
    with server.connected() as connection:
        connection.put(b"long", bytes(64 * MIB))
        for _ in range(5):
            reader = InfiniStoreConnection(socket.AF_INET, drain)
            reader.deadline = Deadline(PATIENCE)
            reader.connect((HOST, server.port))
            assert not reader.get(b"long", memoryview(bytearray(1)))
            assert not reader.in_step
            reader.close()
        drain.close(PATIENCE)
        assert list(connection.exist([b"long", b"short"])) == [True, False]
    assert descriptors() == before


async def test_a_drain_hangs_up_at_last_on_a_server_that_stands_still(server: InfiniStoreServer) -> None:
    before = descriptors()
    async with opened(server, deadline=DEADLINE_SECONDS) as backend:
        assert list(await backend.put(chunks([1]))) == [OK]
        server.pause()
        assert list(await backend.get(blanks([1]))) == [FAILED]
        drain = backend._drain
        await anyio.to_thread.run_sync(drain.close, 0.0)
    server.kill()
    assert descriptors() == before


async def test_a_hole_in_a_prefix_ends_it(server: InfiniStoreServer) -> None:
    """A server that is full evicts the first chunk first, and its binary search does not notice."""
    keys = [key for key, _ in chunks(range(200), 10)]
    async with opened(server) as backend:
        assert set(await backend.put(chunks(range(200), 10))) == {OK}
        assert await backend.held_prefix(keys) == 200
        for hole in (150, 70, 1, 0):
            await backend.delete([keys[hole]])
            assert await backend.held_prefix(keys) == hole
        assert list(await backend.contains(keys)).count(True) == 196


async def test_what_was_evicted_is_no_longer_held_once_it_missed(server: InfiniStoreServer) -> None:
    value = memoryview(bytearray(16 * MIB))
    keys = [make_key(number) for number in range(80)]
    async with opened(server, deadline=PATIENCE) as backend:
        assert set(await backend.put([(key, value) for key in keys])) == {OK}
        outcomes = list(await backend.get([(key, value) for key in keys]))
        assert list(await backend.contains(keys)) == [outcome is OK for outcome in outcomes]
        assert outcomes[0] is MISS
        assert outcomes[-1] is OK


async def test_what_was_replaced_is_evicted_last(server: InfiniStoreServer) -> None:
    """Where the server evicts a value with the one that it was written over."""
    (replaced,) = chunks([99])
    value = memoryview(bytearray(16 * MIB))
    async with opened(server, deadline=PATIENCE) as backend:
        assert list(await backend.put([replaced])) == [OK]
        assert set(await backend.put([(make_key(number), value) for number in range(50)])) == {OK}
        assert list(await backend.put([replaced])) == [OK]
        # Only the oldest go: the server stops at four fifths.
        assert set(await backend.put([(make_key(number), value) for number in range(50, 70)])) == {OK}
        assert list(await backend.contains([make_key(0), replaced[0]])) == [False, True]


@pytest.mark.parametrize("pieces", [9, 18])
async def test_values_one_after_the_other(server: InfiniStoreServer, pieces: int) -> None:
    """Where the server takes what comes too soon after a value of just so many pieces for another request."""
    value = memoryview(bytearray(pieces * 256 * 1024))
    items = [(make_key(number), value) for number in range(20)]
    async with opened(server, connections=1) as backend:
        assert set(await backend.put(items)) == {OK}
        for _ in range(5):
            assert set(await backend.get(items)) == {OK}


async def test_nothing_is_left_open(server: InfiniStoreServer) -> None:
    before = descriptors()
    threads = threading.active_count()
    for _ in range(5):
        async with opened(server, connections=2) as backend:
            assert list(await backend.put(chunks(range(20)))) == [OK] * 20
            assert list(await backend.get(blanks(range(20)))) == [OK] * 20
    assert descriptors() == before
    assert threading.active_count() <= threads + 8, "anyio keeps idle threads for a while"


async def test_a_stranger_is_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream):  # Not every connection is used.
                await stream.receive()
                await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        settings = InfiniStoreSettings(
            name="pool", type="infinistore", url=f"infinistore://127.0.0.1:{port}", deadline=1.0
        )
        backend = InfiniStoreBackend(settings)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            assert list(await backend.get(blanks([1]))) == [FAILED]
            with pytest.raises(TierError, match="does not answer as an InfiniStore"):
                await backend.check()
            tasks.cancel_scope.cancel()
        await backend.close()
    assert "status" in caplog.text


async def test_rdma_without_its_library_or_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "infinistore", None)
    url = f"infinistore://127.0.0.1:{free_port()}"
    backend = InfiniStoreBackend(
        InfiniStoreSettings(name="pool", type="infinistore", url=url, connection="rdma")
    )
    with pytest.raises(TierError, match=r"tier 'pool': .* pip install 'kvtier\[infinistore\]'"):
        await backend.open()


def test_the_device_may_stand_in_the_url() -> None:
    written = {"name": "pool", "type": "infinistore", "url": "infinistore://h:12345/?device=mlx5_1"}
    settings = InfiniStoreSettings.model_validate(written)
    assert (settings.url, settings.host, settings.port) == ("infinistore://h:12345", "h", 12345)
    assert settings.device == "mlx5_1"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"url": "redis://h:1"}, "is no host and port"),
        ({"url": "infinistore://h"}, "is no host and port"),
        ({"url": "infinistore://h:99999"}, "is no host and port"),
        ({"url": "infinistore://h:1/x"}, "only .device=NAME"),
        ({"url": "infinistore://h:1?device=a", "device": "b"}, "only .device=NAME"),
        ({"url": "infinistore://h:1?dev=a"}, "only .device=NAME"),
        ({"url": "infinistore://h:1", "gid_index": 3}, "write connection: rdma"),
        ({"url": "infinistore://h:1", "link_type": "RoCE"}, "IB"),
    ],
    ids=str,
)
def test_wrong_settings(written: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        InfiniStoreSettings.model_validate({"name": "pool", "type": "infinistore", **written})
