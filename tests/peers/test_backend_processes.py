"""Peers in separate processes, which are killed, stopped, resumed and restarted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from kvtier import native
from kvtier.backends.base import GetItem, Outcome
from kvtier.concurrency.tasks import DetachedTask
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.slices import Lease
from kvtier.peers.backend import PeersBackend
from kvtier.plugins import Plugins
from kvtier.rpc.authentication import Credentials
from kvtier.settings import TierSettings
from kvtier.testing.backend import blank, is_poisoned, make_key, poison, same
from kvtier.transports.base import Access, RemoteSpan
from tests.rigs.instance_process import InstanceProcess, payload_of, settings_of
from tests.rigs.open_files import sockets
from tests.rigs.waiting import until

from .test_backend import connected, keys_of

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED
SMALL, BIG = 20_000, 8 << 20
PLUGINS = Plugins.load(())
"""Loaded at import time, because importing the plugins blocks."""


def plain(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes; those that were verified as they arrived are OK."""
    return [OK if outcome is Outcome.VERIFIED else outcome for outcome in outcomes]


class NoGrants:
    """Grants nothing to other peers."""

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        return None

    def arrived(self, span: RemoteSpan, checksum: bytes) -> None:
        pass


@asynccontextmanager
async def reading_from(
    *processes: InstanceProcess, deadline: float = 60.0, **peer: Any
) -> AsyncIterator[PeersBackend]:
    """Open a backend as an instance does, but without tiers. Check on exit that no socket is leaked."""
    sockets_before = sockets()
    addresses = [process.address for process in processes]
    settings = settings_of(None, addresses, 1 << 20, **({"timeout": 20.0} | peer))
    transport_settings = PLUGINS.transport_settings(settings)
    transport = PLUGINS.transport(transport_settings.type)(transport_settings)
    backend = PeersBackend(
        TierSettings(name="peers", type="peers", write="never", deadline=deadline),
        settings.peer,
        Credentials.from_settings(settings.peer),
        transport,
        "the one that reads",
    )
    arena = Arena.create(1 << 20)
    try:
        await transport.open(arena, NoGrants())
        await backend.open()
        backend.connect()
        try:
            yield backend
        finally:
            await backend.close()
            await transport.close()
            await backend.close()
    finally:
        arena.close()
    await until(lambda: sockets() == sockets_before)


@asynccontextmanager
async def started(*processes: InstanceProcess) -> AsyncIterator[None]:
    try:
        for process in processes:
            await process.start()
        yield
    finally:
        for process in processes:
            await process.kill()


# In threads, because processing so many bytes would block the event loop.


async def blanks(numbers: Sequence[int], payload: int) -> list[GetItem]:
    length = object_bytes(payload)
    return await to_thread.run_sync(lambda: [(make_key(number), blank(length)) for number in numbers])


async def assert_intact(items: Sequence[GetItem], payload: int) -> None:
    def check() -> None:
        for key, view in items:
            ChunkHeader.verify(view, key)
            assert same(view[HEADER_BYTES : HEADER_BYTES + payload], payload_of(key, payload))

    await to_thread.run_sync(check)


async def stain_all(items: Sequence[GetItem]) -> None:
    await to_thread.run_sync(lambda: [poison(view) for _, view in items])


async def assert_stained(items: Sequence[GetItem]) -> None:
    """Assert that nothing was written since :func:`stain_all`."""
    assert await to_thread.run_sync(lambda: all(is_poisoned(view) for _, view in items))


async def begun(backend: PeersBackend, items: Sequence[GetItem]) -> DetachedTask[Sequence[Outcome]]:
    """Start a read, and wait until bytes of it have arrived."""
    getting = DetachedTask(backend.get(items))
    await until(lambda: any(not is_poisoned(view[:4096]) for _, view in items))
    return getting


async def until_nothing_granted(process: InstanceProcess) -> None:
    with anyio.fail_after(30):
        while (status := await process.status())["serving"]["grants"] or (
            status["arena"]["leases"] != len(process.numbers)  # A thread may still be reading the last chunk.
        ):
            await anyio.sleep(0.05)
    assert status["serving"]["granted_bytes"] == 0


async def test_chunks_are_read_intact_and_released() -> None:
    process = InstanceProcess(range(20))
    async with started(process), reading_from(process) as backend:
        await connected(backend)
        assert await backend.contains(keys_of(range(25))) == [True] * 20 + [False] * 5
        assert await backend.held_prefix(keys_of(range(25))) == 20
        items = await blanks(range(20), SMALL)
        verified = Outcome.VERIFIED if native.available() else OK
        assert await backend.get(items) == [verified] * 20, "native code hashes them as they arrive"
        await assert_intact(items, SMALL)
        await until_nothing_granted(process)


async def test_chunks_on_disk_are_promoted_before_read(tmp_path: Path) -> None:
    """More chunks than the peer's memory holds: some are ready, the others are promoted first."""
    process = InstanceProcess(range(30), 1 << 20, folder=str(tmp_path), share=0.9)
    async with started(process), reading_from(process) as backend:
        await connected(backend)
        for start in range(0, 30, 5):
            items = await blanks(range(start, start + 5), 1 << 20)
            assert plain(await backend.get(items)) == [OK] * 5
            await assert_intact(items, 1 << 20)
        status = await process.status()
        assert status["counts"]["get_ok"] > 0, "nothing was read from disk"
        assert status["serving"]["requests"]["Await"] > 0


async def test_read_from_killed_peer_is_rerouted() -> None:
    first, second = InstanceProcess(range(8), BIG), InstanceProcess(range(8), BIG)
    async with started(first, second), reading_from(first, second) as backend:
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(8))) == 8
        items = await blanks(range(8), BIG)
        getting = await begun(backend, items)
        await first.kill()
        assert plain(await getting.join()) == [OK] * 8
        await assert_intact(items, BIG)
        # The remaining peer serves all chunks.
        again = await blanks(range(8), BIG)
        assert plain(await backend.get(again)) == [OK] * 8
        await assert_intact(again, BIG)
        await until_nothing_granted(second)


async def test_read_from_only_peer_fails_fast_when_killed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    process = InstanceProcess(range(16), BIG)
    async with started(process), reading_from(process, deadline=60.0) as backend:
        await connected(backend)
        items = await blanks(range(16), BIG)
        getting = await begun(backend, items)
        await process.kill()
        with anyio.fail_after(30):
            outcomes = await getting.join()
        assert FAILED in outcomes
        done = [number for number in range(16) if outcomes[number] in (OK, Outcome.VERIFIED)]
        await assert_intact([items[number] for number in done], BIG)
        with anyio.fail_after(30):  # Half of the deadline.
            assert await backend.get(await blanks([1], BIG)) == [MISS], "without delay"
        await until(lambda: caplog.records)
        assert len(caplog.records) == 1, [record.getMessage() for record in caplog.records]
        # Same port, another instance name.
        name = backend.status()[0]["instance"]
        await process.start()
        await connected(backend)
        assert backend.status()[0]["instance"] != name
        assert plain(await backend.get(items[:2])) == [OK, OK]
        await assert_intact(items[:2], BIG)


async def test_peer_killed_during_lookup_is_a_miss() -> None:
    process = InstanceProcess(range(4))
    async with started(process), reading_from(process, timeout=60.0) as backend:
        await connected(backend)
        process.signal(signal.SIGSTOP)
        looking_up = DetachedTask(backend.held_prefix(keys_of(range(4))))
        assert not await looking_up.wait(0.1)
        await process.kill()
        with anyio.fail_after(30):
            assert await looking_up.join() == 0


async def test_stopped_peer_times_out_and_reconnects() -> None:
    process = InstanceProcess(range(4))
    async with started(process), reading_from(process, timeout=0.1, deadline=60.0) as backend:
        await connected(backend)
        await until(lambda: backend.status()[0]["round_trip_seconds"])
        process.signal(signal.SIGSTOP)
        for _ in range(5):
            with anyio.fail_after(30):
                assert await backend.held_prefix(keys_of(range(4))) == 0
        await until(lambda: backend.status()[0]["state"] != "connected")
        assert await backend.get(await blanks(range(4), SMALL)) == [MISS] * 4
        process.signal(signal.SIGCONT)
        await connected(backend)
        with anyio.fail_after(30):
            while await backend.held_prefix(keys_of(range(4))) < 4:
                await anyio.sleep(0.05)
        items = await blanks(range(4), SMALL)
        assert plain(await backend.get(items)) == [OK] * 4
        await assert_intact(items, SMALL)


async def stop_during_read(process: InstanceProcess, backend: PeersBackend) -> list[GetItem]:
    """Stop a peer during a read. Return the items, or none if the read completed before."""
    items = await blanks(range(16), BIG)
    getting = await begun(backend, items)
    process.signal(signal.SIGSTOP)
    with anyio.fail_after(30):
        return items if FAILED in await getting.join() else []


async def test_read_from_stopped_peer_fails_and_writes_nothing_later() -> None:
    process = InstanceProcess(range(16), BIG)
    async with started(process), reading_from(process, deadline=2.0) as backend:
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(16))) == 16
        while not (items := await stop_during_read(process, backend)):
            process.signal(signal.SIGCONT)
        await stain_all(items)
        process.signal(signal.SIGCONT)
        await connected(backend)
        again = await blanks(range(2), BIG)
        with anyio.fail_after(30):
            while plain(await backend.get(again)) != [OK, OK]:
                await anyio.sleep(0.05)
        await assert_intact(again, BIG)
        await assert_stained(items)
        await until_nothing_granted(process)


async def test_concurrent_gets_with_a_quarter_cancelled() -> None:
    process = InstanceProcess(range(64), 1 << 20, lease=2.0)
    async with started(process), reading_from(process) as backend:
        await connected(backend)
        batches = [await blanks([number], 1 << 20) for number in range(64)]
        gets = [asyncio.ensure_future(backend.get(batch)) for batch in batches]
        await until(lambda: any(get.done() for get in gets))
        cancelled = [get for index, get in enumerate(gets) if index % 4 == 0 and get.cancel()]
        await asyncio.wait(gets)
        assert cancelled, "all gets completed before"
        for batch, get in zip(batches, gets, strict=True):
            if get.cancelled():
                await stain_all(batch)
            else:
                assert plain(get.result()) == [OK]
                await assert_intact(batch, 1 << 20)
        await until_nothing_granted(process)
        for batch, get in zip(batches, gets, strict=True):
            if get.cancelled():
                await assert_stained(batch)


async def test_three_peers_share_load_and_one_may_exit() -> None:
    processes = [InstanceProcess(range(60), 1 << 20) for _ in range(3)]
    async with started(*processes), reading_from(*processes) as backend:
        await connected(backend)
        for client in backend.clients:
            client.throughput.round_trip = 1e-4  # Ignore the load of this machine.

        async def read_all() -> None:
            for start in range(0, 60, 6):
                items = await blanks(range(start, start + 6), 1 << 20)
                assert plain(await backend.get(items)) == [OK] * 6
                await assert_intact(items, 1 << 20)

        await read_all()
        # The share of each peer depends on its speed, and so on the load of the machine.
        with anyio.fail_after(60):
            while min(status["read_bytes"] for status in backend.status()) == 0:
                await read_all()
        await processes[0].kill()
        await connected(backend, 2)
        await read_all()
