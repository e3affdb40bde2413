"""Caches that fetch from instances which no settings name: for a command, or as a directory has said."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from kvtier import Settings
from kvtier.cache import TieredCache
from kvtier.errors import PeerError
from kvtier.header import HEADER_BYTES, object_bytes
from kvtier.instance import PEERS, Instance
from kvtier.keys import ChunkKey
from kvtier.peers.authentication import Credentials
from kvtier.peers.backend import PeersBackend
from kvtier.peers.grants import GrantBook
from kvtier.pipeline.discover import Expected
from kvtier.pipeline.gather import Gathering, Lender
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from kvtier.testing.backend import make_key, same

from .peer_process import SECRET, PeerProcess, payload_of
from .scripted import until
from .test_backend import keys_of
from .test_backend_processes import nothing_granted, started
from .test_borrowing import borrowed
from .test_client import sockets
from .test_directory import ScriptedDirectory

pytestmark = pytest.mark.anyio

PLUGINS = Plugins.load(())
"""Here, since importing what they stand on blocks."""
SMALL, BIG = 20_000, 4 << 20
NAMESPACE = bytes(32)


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return _installed(request.param)


@pytest.fixture(params=["tcp", "nixl"])
def either(request: pytest.FixtureRequest) -> str:
    return _installed(request.param)


def _installed(kind: str) -> str:
    if kind == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed: pip install kvtier[nixl]")
    return kind


def held_open() -> tuple[int, int]:
    """Sockets of this process, and the processes that it has begun."""
    children = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # A thread may end meanwhile.
            children += len((task / "children").read_text().split())
    return sockets(), children


async def comes_back_to(before: tuple[int, int]) -> None:
    await until(lambda: all(now <= then for now, then in zip(held_open(), before, strict=True)))


@dataclass
class Reader:
    """A cache with a way to peers, as an instance has it that has a controller."""

    cache: TieredCache
    backend: PeersBackend

    def gathering(self, numbers: Sequence[int], tier: str, payload: int) -> Gathering:
        expected = Expected(NAMESPACE, [object_bytes(payload)] * len(numbers))
        return self.cache.gather(keys_of(numbers), expected, tier)

    async def fetch(self, process: PeerProcess, gathering: Gathering) -> None:
        pool = self.cache.hierarchy.tiers[-1]
        async with self.backend.borrow(process.address) as peer:
            await gathering.run(Lender(pool, peer.promise, process.address))

    async def assert_right(self, keys: Sequence[ChunkKey], payload: int) -> None:
        """Whether memory holds these, byte for byte."""
        found = [self.cache.look_up([key], local=True) for key in keys]
        for one in found:
            await one.settle(20.0)
            assert one.ready == 1

        def check() -> None:
            for chunk in (chunk for one in found for chunk in one.chunks):
                assert same(
                    chunk.lease.view[HEADER_BYTES : HEADER_BYTES + payload], payload_of(chunk.key, payload)
                )

        await to_thread.run_sync(check)
        for one in found:
            one.release()


@asynccontextmanager
async def reader(kind: str, *, folder: Path | None = None, idle: float = 60.0) -> AsyncIterator[Reader]:
    """Afterwards nothing of it is left: no lease, no socket, no process."""
    before = held_open()
    tiers = [{"name": "ram", "type": "cpu", "capacity": 256 << 20}]
    if folder is not None:
        tiers.append(
            {"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": str(folder), "write": "never"}
        )
    settings = Settings(
        tiers=tiers, peer={"secret": SECRET, "transport": {"type": kind, "deadline": 60}, "patience": 20.0}
    )
    transport_settings = PLUGINS.transport_settings(settings)
    transport = PLUGINS.transport(kind)(transport_settings)
    tier = TierSettings(name=PEERS, type=PEERS, write="never", deadline=60.0, concurrency=16)
    credentials = Credentials.of(settings.peer)
    backend = PeersBackend(tier, settings.peer, credentials, transport, "the one that reads", idle=idle)
    async with TieredCache.open(settings, plugins=PLUGINS, pools=[(tier, backend)]) as cache:
        await transport.open(
            cache.arena, GrantBook(cache.arena, settings.peer, one_sided=transport.one_sided)
        )
        backend.connect()
        try:
            yield Reader(cache, backend)
            catalog = cache.hierarchy.catalog
            await until(lambda: cache.arena.leases == catalog.count(0))
            assert not backend._bound
            if not backend._directory:
                assert not catalog.count(len(tiers)), "what was known for now only"
        finally:
            await backend.disconnect()
            await transport.close()
    await comes_back_to(before)


async def test_a_command_fetches_from_an_instance_that_was_never_configured(
    either: str, tmp_path: Path
) -> None:
    process = PeerProcess(range(30), transport=either)
    async with started(process), reader(either, folder=tmp_path, idle=0.5) as here:
        alone = held_open()
        first, second = here.gathering(range(10), "ram", SMALL), here.gathering(range(10, 30), "ssd", SMALL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.fetch, process, first)
            tasks.start_soon(here.fetch, process, second)
        assert (first.reason, second.reason) == (None, None)
        catalog = here.cache.hierarchy.catalog
        assert all(catalog.tiers(make_key(number)) == [0] for number in range(10))
        assert all(catalog.tiers(make_key(number)) == [1] for number in range(10, 30))
        await here.assert_right(keys_of(range(30)), SMALL)
        await nothing_granted(process)
        await until(lambda: not borrowed(here.backend))
        await comes_back_to(alone)


async def test_an_instance_that_lacks_some_gives_what_it_has(kind: str, tmp_path: Path) -> None:
    """On disk, too, and beyond what its memory can promise at once."""
    held = [*range(20), *range(25, 40)]
    process = PeerProcess(held, 1 << 20, folder=str(tmp_path), share=0.5, transport=kind)
    async with started(process), reader(kind) as here:
        gathering = here.gathering(range(40), "ram", 1 << 20)
        await here.fetch(process, gathering)
        assert gathering.held() == keys_of(range(20))
        assert gathering.reason is not None
        assert process.address in gathering.reason
        gathering = here.gathering(held, "ram", 1 << 20)
        await here.fetch(process, gathering)
        assert gathering.reason is None
        await here.assert_right(keys_of(held), 1 << 20)


async def test_an_instance_that_is_killed_in_mid_fetch(kind: str) -> None:
    process = PeerProcess(range(40), BIG, transport=kind)
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
        await here.assert_right(arrived, BIG)
        await until(lambda: not borrowed(here.backend))
        await process.start()
        again = here.gathering(range(40), "ram", BIG)
        await here.fetch(process, again)
        assert again.reason is None
        await here.assert_right(keys_of(range(40)), BIG)


async def test_an_instance_that_stands_still_in_mid_fetch_and_a_fetch_that_is_given_up(kind: str) -> None:
    process = PeerProcess(range(40), BIG, transport=kind)
    async with started(process), reader(kind) as here:
        gathering = here.gathering(range(40), "ram", BIG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.fetch, process, gathering)
            await until(lambda: gathering.held())
            process.signal(signal.SIGSTOP)
            tasks.cancel_scope.cancel()
        arrived = gathering.held()
        process.signal(signal.SIGCONT)
        await here.assert_right(arrived, BIG)
        # The one that was lost, or the one that is asked again: either way it ends well.
        with anyio.fail_after(60):
            while (again := here.gathering(range(40), "ram", BIG)).held() != keys_of(range(40)):
                try:
                    await here.fetch(process, again)
                except PeerError:
                    await anyio.sleep(0.05)
        await here.assert_right(keys_of(range(40)), BIG)


async def test_a_look_up_finds_what_only_a_directory_knows_of(kind: str) -> None:
    one, other = PeerProcess(range(20), transport=kind), PeerProcess(range(15, 35), transport=kind)
    async with started(one, other), reader(kind) as here:
        directory = ScriptedDirectory((one.address, 20), (other.address, 1))
        here.backend.ask_directory(directory)
        keys = keys_of(range(40))
        found = here.cache.look_up(keys, Expected(NAMESPACE, [object_bytes(SMALL)] * 40))
        directory.named = [(one.address, 20), (other.address, 20)]
        await found.settle(60.0)
        assert found.ready == 35
        found.release()
        await here.assert_right(keys[:35], SMALL)
        assert set(borrowed(here.backend)) == {one.address, other.address}
        await nothing_granted(one)
        await nothing_granted(other)
        await one.kill()
        await here.cache.clear(keys[:1])
        found = here.cache.look_up(keys[:1], Expected(NAMESPACE, [object_bytes(SMALL)]))
        await found.settle(60.0)
        assert not found.ready
        found.release()


async def test_an_instance_with_a_controller_has_a_way_to_peers_where_it_can_prove_itself() -> None:
    tiers = [{"name": "ram", "type": "cpu", "capacity": 1 << 20}]
    controller = {"url": "http://127.0.0.1:1"}
    async with Instance.open(Settings(tiers=tiers, controller=controller), plugins=PLUGINS) as instance:
        assert instance.peers is None
    settings = Settings(tiers=tiers, controller=controller, peer={"secret": SECRET})
    async with Instance.open(settings, plugins=PLUGINS) as instance:
        assert instance.peers is not None
        assert not instance.status()["peers"]
        assert [tier.name for tier in instance.cache.hierarchy.tiers] == ["ram", PEERS]
