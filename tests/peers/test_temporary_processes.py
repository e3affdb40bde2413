"""Fetches from instances that the settings do not name, by command or through a directory."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from kvtier import Settings
from kvtier.cache import TieredCache
from kvtier.errors import PeerError
from kvtier.instance import PEERS, Instance
from kvtier.memory.header import HEADER_BYTES, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.peers.grants import GrantBook
from kvtier.pipeline.move import ChunkProvider, Gathering
from kvtier.pipeline.query import Expected, Query
from kvtier.plugins import Plugins
from kvtier.rpc.authentication import Credentials
from kvtier.settings import TierSettings
from kvtier.testing.backend import make_key, same
from tests.rigs.children import children
from tests.rigs.instance_process import SECRET, InstanceProcess, payload_of
from tests.rigs.open_files import sockets
from tests.rigs.waiting import until

from .test_backend import keys_of
from .test_backend_processes import started, until_nothing_granted
from .test_directory import ScriptedDirectory
from .test_temporary import temporary_addresses

pytestmark = pytest.mark.anyio

PLUGINS = Plugins.load(())
"""Loaded at import time, because importing the plugins blocks."""
SMALL, BIG = 20_000, 4 << 20
NAMESPACE = bytes(32)


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return _installed(request.param)


@pytest.fixture(params=["tcp", "nixl"])
def any_kind(request: pytest.FixtureRequest) -> str:
    return _installed(request.param)


def _installed(kind: str) -> str:
    if kind == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed: pip install kvtier[nixl]")
    return kind


def open_resources() -> tuple[int, int]:
    """Count the sockets and child processes of this process."""
    return sockets(), len(children(os.getpid()))


async def until_released(before: tuple[int, int]) -> None:
    await until(lambda: all(now <= then for now, then in zip(open_resources(), before, strict=True)))


@dataclass
class Reader:
    """A cache with a peers backend, as in an instance with a controller."""

    cache: TieredCache
    backend: PeersBackend

    def gathering(self, numbers: Sequence[int], tier: str, payload: int) -> Gathering:
        expected = Expected(NAMESPACE, [object_bytes(payload)] * len(numbers))
        return self.cache.gather(keys_of(numbers), expected, tier)

    async def fetch(self, process: InstanceProcess, gathering: Gathering) -> None:
        pool = self.cache.tiers[-1]
        async with self.backend.temporary_peer(process.address) as peer:
            await gathering.run(ChunkProvider(pool, peer.lease, process.address))

    async def assert_intact(self, keys: Sequence[ChunkKey], payload: int) -> None:
        """Assert that memory holds these chunks, byte for byte."""
        found = [self.cache.look_up(Query([key], local=True)) for key in keys]
        for lookup in found:
            await lookup.settle(20.0)
            assert lookup.ready == 1

        def check() -> None:
            for chunk in (chunk for lookup in found for chunk in lookup.chunks):
                assert same(
                    chunk.lease.view[HEADER_BYTES : HEADER_BYTES + payload], payload_of(chunk.key, payload)
                )

        await to_thread.run_sync(check)
        for lookup in found:
            lookup.release()


@asynccontextmanager
async def reader(kind: str, *, folder: Path | None = None, idle: float = 60.0) -> AsyncIterator[Reader]:
    """Open a reader. Check on exit that no lease, socket or process is leaked."""
    before = open_resources()
    tiers = [{"name": "ram", "type": "cpu", "capacity": 256 << 20}]
    if folder is not None:
        tiers.append(
            {"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": str(folder), "write": "never"}
        )
    settings = Settings(
        tiers=tiers, peer={"secret": SECRET, "transport": {"type": kind, "deadline": 60}, "timeout": 20.0}
    )
    transport_settings = PLUGINS.transport_settings(settings)
    transport = PLUGINS.transport(kind)(transport_settings)
    tier = TierSettings(name=PEERS, type=PEERS, write="never", deadline=60.0, concurrency=16)
    credentials = Credentials.from_settings(settings.peer)
    backend = PeersBackend(tier, settings.peer, credentials, transport, "the one that reads", idle=idle)
    async with TieredCache.open(settings, plugins=PLUGINS, pools=[(tier, backend)]) as cache:
        await transport.open(
            cache.arena, GrantBook(cache.arena, settings.peer, one_sided=transport.one_sided)
        )
        backend.connect()
        try:
            yield Reader(cache, backend)
            catalog = cache.catalog
            await until(lambda: cache.arena.leases == catalog.count(0))
            assert not backend._bound
            if not backend._directory:
                assert not catalog.count(len(tiers)), "temporary entries remain in the catalog"
        finally:
            await backend.close()
            await transport.close()
    await until_released(before)


async def test_fetch_from_unconfigured_instance(any_kind: str, tmp_path: Path) -> None:
    process = InstanceProcess(range(30), transport=any_kind)
    async with started(process), reader(any_kind, folder=tmp_path, idle=0.5) as here:
        idle_resources = open_resources()
        first, second = here.gathering(range(10), "ram", SMALL), here.gathering(range(10, 30), "ssd", SMALL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.fetch, process, first)
            tasks.start_soon(here.fetch, process, second)
        assert (first.reason, second.reason) == (None, None)
        catalog = here.cache.catalog
        assert all(catalog.tiers(make_key(number)) == [0] for number in range(10))
        assert all(catalog.tiers(make_key(number)) == [1] for number in range(10, 30))
        await here.assert_intact(keys_of(range(30)), SMALL)
        await until_nothing_granted(process)
        await until(lambda: not temporary_addresses(here.backend))
        await until_released(idle_resources)


async def test_incomplete_holder_provides_what_it_holds(kind: str, tmp_path: Path) -> None:
    """Also from disk, and beyond what its memory can lease at once."""
    held = [*range(20), *range(25, 40)]
    process = InstanceProcess(held, 1 << 20, folder=str(tmp_path), share=0.5, transport=kind)
    async with started(process), reader(kind) as here:
        gathering = here.gathering(range(40), "ram", 1 << 20)
        await here.fetch(process, gathering)
        assert gathering.held() == keys_of(range(20))
        assert gathering.reason is not None
        assert process.address in gathering.reason
        gathering = here.gathering(held, "ram", 1 << 20)
        await here.fetch(process, gathering)
        assert gathering.reason is None
        await here.assert_intact(keys_of(held), 1 << 20)


async def test_instance_killed_during_fetch(kind: str) -> None:
    process = InstanceProcess(range(40), BIG, transport=kind)
    async with started(process), reader(kind) as here:
        gathering = here.gathering(range(40), "ram", BIG)
        errors: list[PeerError] = []

        async def fetch() -> None:
            try:
                await here.fetch(process, gathering)
            except PeerError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await until(lambda: gathering.held())
            await process.kill()
        arrived = gathering.held()
        assert 0 < len(arrived) < 40
        assert errors
        assert process.address in str(errors[0])
        await here.assert_intact(arrived, BIG)
        await until(lambda: not temporary_addresses(here.backend))
        await process.start()
        again = here.gathering(range(40), "ram", BIG)
        await here.fetch(process, again)
        assert again.reason is None
        await here.assert_intact(keys_of(range(40)), BIG)


async def test_fetch_cancelled_while_instance_is_stopped(kind: str) -> None:
    process = InstanceProcess(range(40), BIG, transport=kind)
    async with started(process), reader(kind) as here:
        gathering = here.gathering(range(40), "ram", BIG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.fetch, process, gathering)
            await until(lambda: gathering.held())
            process.signal(signal.SIGSTOP)
            tasks.cancel_scope.cancel()
        arrived = gathering.held()
        process.signal(signal.SIGCONT)
        await here.assert_intact(arrived, BIG)
        # Over the lost connection or a new one: the fetch must succeed in the end.
        with anyio.fail_after(60):
            while (again := here.gathering(range(40), "ram", BIG)).held() != keys_of(range(40)):
                try:
                    await here.fetch(process, again)
                except PeerError:
                    await anyio.sleep(0.05)
        await here.assert_intact(keys_of(range(40)), BIG)


async def test_lookup_finds_holders_of_the_directory(kind: str) -> None:
    first, second = InstanceProcess(range(20), transport=kind), InstanceProcess(range(15, 35), transport=kind)
    async with started(first, second), reader(kind) as here:
        directory = ScriptedDirectory((first.address, 20), (second.address, 1))
        here.backend.set_directory(directory)
        keys = keys_of(range(40))
        found = here.cache.look_up(Query(keys), Expected(NAMESPACE, [object_bytes(SMALL)] * 40))
        directory.named = [(first.address, 20), (second.address, 20)]
        await found.settle(60.0)
        assert found.ready == 35
        found.release()
        await here.assert_intact(keys[:35], SMALL)
        assert set(temporary_addresses(here.backend)) == {first.address, second.address}
        await until_nothing_granted(first)
        await until_nothing_granted(second)
        await first.kill()
        await here.cache.clear(keys[:1])
        found = here.cache.look_up(Query(keys[:1]), Expected(NAMESPACE, [object_bytes(SMALL)]))
        await found.settle(60.0)
        assert not found.ready
        found.release()


async def test_instance_with_controller_opens_peers_if_credentials_exist() -> None:
    tiers = [{"name": "ram", "type": "cpu", "capacity": 1 << 20}]
    controller = {"url": "http://127.0.0.1:1"}
    async with Instance.open(Settings(tiers=tiers, controller=controller), plugins=PLUGINS) as instance:
        assert instance.peers is None
    settings = Settings(tiers=tiers, controller=controller, peer={"secret": SECRET})
    async with Instance.open(settings, plugins=PLUGINS) as instance:
        assert instance.peers is not None
        assert not instance.status()["peers"]
        assert [tier.name for tier in instance.cache.tiers] == ["ram", PEERS]
