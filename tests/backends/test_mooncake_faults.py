"""The Mooncake backend with servers that die, hang or speak another protocol, and invalid settings."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from kvtier.backends.base import Outcome
from kvtier.backends.mooncake import MooncakeBackend, MooncakeSettings
from kvtier.backends.mooncake.client import address_of
from kvtier.errors import TierError
from kvtier.memory.arena import Arena
from kvtier.testing.backend import blank, is_poisoned, make_key, noise, poison, same
from tests.rigs import chunks
from tests.rigs.chunks import FAILED, FULL, MISS, OK, filled
from tests.rigs.open_files import open_files
from tests.rigs.servers.mooncake import HOST, MooncakeServer
from tests.rigs.servers.running import running
from tests.rigs.tcp_server import serving

pytestmark = pytest.mark.anyio

MIB = 1 << 20
TIMEOUT_SECONDS = 60.0
KEYS = [make_key(number) for number in range(20)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    """A running pool, shared by the tests of this module."""
    with running(MooncakeServer, tmp_path_factory) as server:
        yield server


@pytest.fixture
def server(pool: MooncakeServer, tmp_path: Path) -> MooncakeServer:
    pool.prefix = f"{tmp_path.name}:"
    return pool


def opened(tier: dict[str, Any], **more: Any) -> AbstractAsyncContextManager[MooncakeBackend]:
    settings = MooncakeSettings(name="pool", **{"deadline": 1.5, **tier, **more})
    return chunks.opened(MooncakeBackend(settings))


def blanks(count: int, length: int) -> list[tuple[Any, memoryview]]:
    return [(key, blank(length)) for key in KEYS[:count]]


async def wait_until_writable(backend: MooncakeBackend) -> None:
    with anyio.fail_after(TIMEOUT_SECONDS):
        while list(await backend.put([(KEYS[-1], filled(MIB))])) != [OK]:
            await anyio.sleep(0.1)


# Servers that die or hang.


async def test_server_killed_during_calls_and_restarted_empty(server: MooncakeServer) -> None:
    items = [(key, filled(MIB, key)) for key in KEYS]
    rounds, dead = 0, False
    async with opened(server.tier()) as backend:

        async def work() -> None:
            nonlocal rounds
            views = blanks(len(KEYS), MIB)
            while True:
                put = list(await backend.put(items))
                got = list(await backend.get(views))
                rounds += 1
                assert set(put + got) <= {OK, MISS, FAILED}
                for (_, view), (_, value), outcome in zip(views, items, got, strict=True):
                    assert outcome is not OK or same(view, value)
                if dead and OK not in put + got:
                    return

        with anyio.fail_after(TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(work)
                while rounds < 3:
                    await anyio.sleep(0.01)
                await anyio.to_thread.run_sync(server.kill)
                dead = True
        with pytest.raises(ConnectionError, match="the pool does not answer"):
            await backend.contains(KEYS)
        await anyio.to_thread.run_sync(server.start)
        await wait_until_writable(backend)
        assert list(await backend.contains(KEYS)) == [False] * (len(KEYS) - 1) + [True]


async def test_paused_server_costs_the_deadline(server: MooncakeServer) -> None:
    async with opened(server.tier(), deadline=0.5) as backend:
        assert list(await backend.put([(KEYS[0], filled(MIB))])) == [OK]
        server.pause()
        try:
            with anyio.fail_after(TIMEOUT_SECONDS):
                assert list(await backend.get(blanks(3, MIB))) == [FAILED] * 3
                assert list(await backend.put([(KEYS[1], filled(MIB))])) == [FAILED]
                for call in (backend.contains, backend.delete):
                    with pytest.raises(ConnectionError, match="the pool does not answer"):
                        await call(KEYS[2:4])
                with pytest.raises(TierError, match="master"):
                    await backend.check()
        finally:
            server.resume()
        await wait_until_writable(backend)
        assert list(await backend.get(blanks(1, MIB))) == [OK]


async def test_late_reads_do_not_write_to_the_buffers(server: MooncakeServer) -> None:
    items = await anyio.to_thread.run_sync(lambda: [(key, filled(8 * MIB, key)) for key in KEYS[:6]])
    async with opened(server.tier()) as backend:
        assert list(await backend.put(items)) == [OK] * 6
        for seconds in (0.0, 0.01):
            views = await anyio.to_thread.run_sync(blanks, 6, 8 * MIB)
            timer = threading.Timer(seconds, server.pause_client)
            timer.start()
            try:
                with anyio.fail_after(TIMEOUT_SECONDS):
                    outcomes = await backend.get(views)
                assert set(outcomes) <= {OK, FAILED}
                timer.join()
                await anyio.to_thread.run_sync(lambda views=views: [poison(view) for _, view in views])
            finally:
                server.resume()
            await wait_until_writable(backend)
            for _, view in views:
                assert await anyio.to_thread.run_sync(is_poisoned, view)


async def test_calls_fail_if_all_threads_are_blocked(server: MooncakeServer) -> None:
    async with opened(server.tier(), concurrency=1) as backend:
        assert list(await backend.put([(KEYS[0], filled(MIB))])) == [OK]
        server.pause()
        outcomes: list[Outcome] = []

        async def get() -> None:
            outcomes.extend(await backend.get(blanks(1, MIB)))

        try:
            with anyio.fail_after(TIMEOUT_SECONDS):
                async with anyio.create_task_group() as group:
                    for _ in range(20):
                        group.start_soon(get)
        finally:
            server.resume()
        assert outcomes == [FAILED] * 20
        await wait_until_writable(backend)


# Full pools.


async def test_full_pool_refuses_chunks_until_others_are_deleted(server: MooncakeServer) -> None:
    async with opened(server.tier(), deadline=5) as backend:
        huge = memoryview(mmap.mmap(-1, 600 * MIB))
        assert list(await backend.put([(KEYS[0], huge), (KEYS[1], filled(MIB))])) == [FULL, OK]
        # `contains` leases a value, so that it is not evicted. Before that, it may be.
        value = await anyio.to_thread.run_sync(filled, 64 * MIB)
        for key in KEYS[2:]:
            (outcome,) = await backend.put([(key, value)])
            (held,) = await backend.contains([key])
            assert outcome is OK or not held
            if outcome is not OK:
                break
        assert outcome is FULL
        await backend.delete(KEYS)
        assert list(await backend.put([(KEYS[2], value)])) == [OK]


# Several clients.


async def test_clients_share_values(server: MooncakeServer) -> None:
    key, first, second = KEYS[0], filled(MIB, b"1"), filled(2 * MIB, b"2")
    async with opened(server.tier()) as one, opened(server.tier()) as other:
        assert list(await one.put([(key, first)])) == [OK]
        view = blank(MIB)
        assert list(await other.get([(key, view)])) == [OK]
        assert same(view, first)
        # The lease of that read does not block the replacement.
        assert list(await other.put([(key, second)])) == [OK]
        assert list(await one.get([(key, view)])) == [MISS]
        view = blank(2 * MIB)
        assert list(await one.get([(key, view)])) == [OK]
        assert same(view, second)
        await one.delete([key])
        assert list(await other.contains([key])) == [False]


async def test_two_clients_store_the_same_chunks_concurrently(server: MooncakeServer) -> None:
    items = [(key, filled(MIB, key)) for key in KEYS]
    async with opened(server.tier()) as one, opened(server.tier()) as other:
        outcomes: list[Outcome] = []

        async def store(backend: MooncakeBackend) -> None:
            for _ in range(10):
                outcomes.extend(await backend.put(items))

        async with anyio.create_task_group() as group:
            group.start_soon(store, one)
            group.start_soon(store, other)
        assert set(outcomes) == {OK}
        views = blanks(len(KEYS), MIB)
        assert list(await one.get(views)) == [OK] * len(KEYS)
        for (_, view), (_, value) in zip(views, items, strict=True):
            assert same(view, value)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeServer]:
    """A pool without memory."""
    with MooncakeServer(tmp_path, segment=None) as server:
        yield server


async def test_backend_that_provides_memory_and_replicas(master: MooncakeServer) -> None:
    async with opened(master.tier()) as consumer:
        assert list(await consumer.put([(KEYS[0], filled(MIB))])) == [FULL]
        with pytest.raises(TierError, match=r"no free memory.*`segment_size`"):
            await consumer.check()
        async with opened(
            master.tier(), segment_size="32MiB", replicas=2, soft_pin=True, local_hostname=HOST
        ) as provider:
            value = filled(MIB)
            assert list(await provider.put([(KEYS[0], value)])) == [OK]
            view = blank(MIB)
            assert list(await consumer.get([(KEYS[0], view)])) == [OK]
            assert same(view, value)
            assert list(await consumer.put([(KEYS[1], value)])) == [OK]
            assert master.master in await consumer.check()
        assert list(await consumer.contains(KEYS[:2])) == [False, False]


# The arena.


def has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.exists() and any(devices.iterdir())


@pytest.mark.skipif(has_rdma(), reason="the pool of the tests uses TCP")
@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize("joined", [False, True], ids=["before it joins", "after"])
async def test_arena_is_registered_before_or_after_joining(
    server: MooncakeServer, joined: bool, protocol: str
) -> None:
    """Without an RDMA device, the library falls back to TCP but still requires registered memory."""
    arena = Arena.create(16 * MIB)
    source, target = arena.allocate(4 * MIB), arena.allocate(4 * MIB)
    assert source is not None
    assert target is not None
    source.view[:] = noise(b"", 4 * MIB)
    async with opened(server.tier(), protocol=protocol) as backend:
        if joined:
            assert list(await backend.contains(KEYS[:1])) == [False]
        await backend.register(arena)
        unregistered = blank(MIB)
        assert list(await backend.put([(KEYS[0], source.view), (KEYS[1], unregistered)])) == [OK, OK]
        assert list(await backend.get([(KEYS[0], target.view), (KEYS[1], unregistered)])) == [OK, OK]
        assert same(source.view, target.view)
    for lease in (source, target):
        lease.release()
    arena.close()


FOREIGN_ENGINE = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
port, *addresses = map(int, sys.argv[1:])
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = mmap.mmap(-1, 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register_memory(start, 4096) == 0
for address in addresses:
    done = engine.transfer_sync_read(f"127.0.0.1:{port}", start, address, 64)
    print(memory[:5].decode() if done == 0 else "refused")
"""


def listening_ports() -> set[int]:
    """Return the IPv4 TCP ports on which this process listens. Blocks: a host may have many sockets."""
    own = {file.partition(" ")[2] for file in open_files()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {int(row[1].partition(":")[2], 16) for row in listening}


async def test_other_processes_cannot_read_the_arena(server: MooncakeServer) -> None:
    arena = Arena.create(MIB)
    lease, known = arena.allocate(MIB), blank(MIB)
    assert lease is not None
    lease.view[:5] = known[:5] = b"money"
    before = await anyio.to_thread.run_sync(
        listening_ports
    )  # The library may not have closed earlier listeners yet.
    async with opened(server.tier()) as backend:
        await backend.register(arena)
        assert list(await backend.put([(KEYS[0], lease.view)])) == [OK]
        # Check that the foreign engine works: it can read registered memory.
        assert backend._client._joined().register_buffer(address_of(known), MIB) == 0
        addresses = [str(address_of(view)) for view in (known, lease.view)]
        (port,) = await anyio.to_thread.run_sync(listening_ports) - before
        result = await anyio.run_process([sys.executable, "-c", FOREIGN_ENGINE, str(port), *addresses])
        assert result.stdout.split() == [b"money", b"refused"]
    lease.release()
    arena.close()


# Leaks.


async def test_close_leaks_no_descriptors_or_threads(server: MooncakeServer) -> None:
    def held() -> tuple[int, ...]:
        return tuple(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))

    async def use() -> None:
        async with opened(server.tier()) as backend:
            assert list(await backend.put([(KEYS[0], filled(MIB))])) == [OK]

    await use()  # The library keeps some resources after first use.
    before = held()
    for _ in range(2):
        await use()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(map(int.__gt__, held(), before)) and time.monotonic() < deadline:
        await anyio.sleep(0.05)
    assert not any(map(int.__gt__, held(), before))


# Invalid input.


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["no reply", "a web server"]
)
async def test_server_of_another_protocol_fails_every_call(reply: bytes) -> None:
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(reply)
        ended.wait()

    with serving(serve) as port:
        try:
            async with opened({"type": "mooncake", "master": f"{HOST}:{port}"}) as backend:
                with anyio.fail_after(TIMEOUT_SECONDS):
                    assert list(await backend.put([(KEYS[0], filled(MIB))])) == [FAILED]
                    with pytest.raises(TierError, match="rejects this client"):
                        await backend.check()
        finally:
            ended.set()


@pytest.mark.parametrize("master", ["127.0.0.1:1", "[::1]:1", "nowhere.invalid:1"])
async def test_unreachable_master_fails_every_call(master: str) -> None:
    async with opened({"type": "mooncake", "master": master}) as backend:
        for call in (backend.contains, backend.delete):
            with pytest.raises(ConnectionError, match="the pool does not answer"):
                await call(KEYS)
            assert not await call([])
        assert list(await backend.put([(KEYS[0], filled(MIB))])) == [FAILED]
        assert list(await backend.get(blanks(1, MIB))) == [FAILED]
        with pytest.raises(TierError) as caught:
            await backend.check()
        assert f"cannot reach the master at {master}" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"master": "mooncake"}, "use for example mooncake:50051"),
        ({"master": "mooncake:"}, "use for example"),
        ({"master": ":50051"}, "use for example"),
        ({"master": "mooncake:70000"}, "use for example"),
        ({"segment_size": "1MiB"}, "at least 16MiB"),
        ({"protocol": "udp"}, "tcp"),
        ({"replicas": 0}, "greater than or equal to 1"),
        ({"capacity": "1GiB"}, "capacity"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MooncakeSettings(**{"name": "pool", "type": "mooncake", "master": "mooncake:50051", **settings})


@pytest.mark.parametrize(
    ("broken", "message"), [("absent", "pip install 'kvtier\\[mooncake\\]'"), ("unloadable", "libibverbs1")]
)
async def test_missing_library_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    def load(name: str) -> Any:
        raise (
            ModuleNotFoundError(name) if broken == "absent" else ImportError("libibverbs.so.1: no such file")
        )

    monkeypatch.setattr("importlib.import_module", load)
    backend = MooncakeBackend(MooncakeSettings(name="pool", type="mooncake", master="mooncake:50051"))
    with pytest.raises(TierError, match=f"'pool'.*{message}"):
        await backend.open()


async def test_environment_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "77")
    async with opened({"type": "mooncake", "master": "mooncake:50051"}):
        assert os.environ["MC_LOG_LEVEL"] == "WARNING"
        assert os.environ["MC_RPC_TIMEOUT_MS"] == "77"
        assert os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] == "1350"
