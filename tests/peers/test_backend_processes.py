"""Peers that are processes of their own: killed, stopped, resumed and restarted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import to_thread

from kvtier.backends.base import GetItem, Outcome
from kvtier.peers.backend import PeersBackend
from kvtier.settings import TierSettings
from kvtier.settings_peer import PeerSettings
from kvtier.testing.backend import blank, is_stained, make_key, same, stain

from .scripted import OpenDoor, until
from .test_backend import connected, keys_of
from .test_client import sockets
from .wire import WireProcess, WireTransport, value

pytestmark = pytest.mark.anyio

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED
SMALL, BIG = 20_000, 8 << 20
SECRET = "what nobody asks for here"


@asynccontextmanager
async def reading_from(
    *processes: WireProcess, deadline: float = 20.0, patience: float = 5.0
) -> AsyncIterator[PeersBackend]:
    """Afterwards nothing of the backend is left."""
    before = sockets()
    transport = WireTransport()
    backend = PeersBackend(
        TierSettings(name="peers", type="peers", write="never", deadline=deadline),
        PeerSettings(
            others=[process.address for process in processes],
            secret=SECRET,
            transport="wire",
            patience=patience,
        ),
        OpenDoor(),  # type: ignore[arg-type]
        transport,
        "the one that reads",
    )
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
        await transport.close()
    await until(lambda: sockets() == before)


@asynccontextmanager
async def started(*processes: WireProcess) -> AsyncIterator[None]:
    try:
        for process in processes:
            await process.start()
        yield
    finally:
        for process in processes:
            await process.kill()


# In threads, since all that a loop does for these bytes would block it.


async def blanks(numbers: Sequence[int], length: int) -> list[GetItem]:
    return await to_thread.run_sync(lambda: [(make_key(number), blank(length)) for number in numbers])


async def assert_right(items: Sequence[GetItem], numbers: Sequence[int]) -> None:
    def check() -> None:
        for number, (_, view) in zip(numbers, items, strict=True):
            assert same(view, value(number, len(view)))

    await to_thread.run_sync(check)


async def stained_anew(items: Sequence[GetItem]) -> None:
    await to_thread.run_sync(lambda: [stain(view) for _, view in items])


async def assert_stained(items: Sequence[GetItem]) -> None:
    """Nothing was written since."""
    assert await to_thread.run_sync(lambda: all(is_stained(view) for _, view in items))


async def nothing_granted(process: WireProcess) -> None:
    with anyio.fail_after(30):
        while await process.open_chunks():
            await anyio.sleep(0.05)


async def test_a_peer_killed_in_mid_read_is_routed_around() -> None:
    first, second = WireProcess(range(8), BIG), WireProcess(range(8), BIG)
    async with started(first, second), reading_from(first, second) as backend:
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(8))) == 8
        items = await blanks(range(8), BIG)
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            # Bytes have begun to come.
            await until(lambda: any(not is_stained(view[:4096]) for _, view in items))
            await first.kill()
        assert answers == [OK] * 8
        await assert_right(items, range(len(items)))
        # And from the one that is left, all of it.
        again = await blanks(range(8), BIG)
        assert await backend.get(again) == [OK] * 8
        await assert_right(again, range(len(again)))
        await nothing_granted(second)


async def test_the_only_peer_killed_in_mid_read_fails_soon(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    process = WireProcess(range(16), BIG)
    async with started(process), reading_from(process, deadline=60.0) as backend:
        await connected(backend)
        items = await blanks(range(16), BIG)
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            await until(lambda: any(not is_stained(view[:4096]) for _, view in items))
            await process.kill()
            with anyio.fail_after(10):
                await until(lambda: len(answers) == 16)
        assert FAILED in answers
        done = [number for number in range(16) if answers[number] is OK]
        await assert_right([items[number] for number in done], done)
        with anyio.fail_after(1):
            assert await backend.get(await blanks([1], BIG)) == [MISS], "at once"
        assert len(caplog.records) == 1, [record.getMessage() for record in caplog.records]
        # On the same port, under another instance's name.
        name = backend.status()[0]["instance"]
        await process.start()
        await connected(backend)
        assert backend.status()[0]["instance"] != name
        assert await backend.get(items[:2]) == [OK, OK]
        await assert_right(items[:2], range(2))


async def test_a_peer_killed_in_mid_look_up_is_a_miss() -> None:
    process = WireProcess(range(4))
    async with started(process), reading_from(process, patience=30.0) as backend:
        await connected(backend)
        process.signal(signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            answers: list[int] = []

            async def look_up() -> None:
                answers.append(await backend.held_prefix(keys_of(range(4))))

            tasks.start_soon(look_up)
            await anyio.sleep(0.1)
            assert not answers
            await process.kill()
            with anyio.fail_after(10):
                await until(lambda: answers)
        assert answers == [0]


async def test_a_stopped_peer_costs_patience_and_is_found_again() -> None:
    process = WireProcess(range(4))
    async with started(process), reading_from(process, patience=0.1, deadline=2.0) as backend:
        await connected(backend)
        await until(lambda: backend.status()[0]["round_trip_seconds"])
        process.signal(signal.SIGSTOP)
        for _ in range(5):
            with anyio.fail_after(2):
                assert await backend.held_prefix(keys_of(range(4))) == 0
        await until(lambda: backend.status()[0]["state"] != "connected")
        assert await backend.get(await blanks(range(4), SMALL)) == [MISS] * 4
        process.signal(signal.SIGCONT)
        await connected(backend)
        with anyio.fail_after(20):
            while await backend.held_prefix(keys_of(range(4))) < 4:
                await anyio.sleep(0.05)
        items = await blanks(range(4), SMALL)
        assert await backend.get(items) == [OK] * 4
        await assert_right(items, range(len(items)))


async def test_a_peer_stopped_in_mid_read_is_given_up_and_touches_nothing_later() -> None:
    process = WireProcess(range(16), BIG)
    async with started(process), reading_from(process, deadline=2.0) as backend:
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(16))) == 16
        items = await blanks(range(16), BIG)
        async with anyio.create_task_group() as tasks:
            answers: list[Outcome] = []

            async def get() -> None:
                answers.extend(await backend.get(items))

            tasks.start_soon(get)
            await until(lambda: any(not is_stained(view[:4096]) for _, view in items))
            process.signal(signal.SIGSTOP)
            with anyio.fail_after(10):
                await until(lambda: len(answers) == 16)
        assert FAILED in answers
        await stained_anew(items)
        process.signal(signal.SIGCONT)
        await connected(backend)
        again = await blanks(range(2), BIG)
        with anyio.fail_after(20):
            while await backend.get(again) != [OK, OK]:
                await anyio.sleep(0.05)
        await assert_right(again, range(len(again)))
        await assert_stained(items)
        await nothing_granted(process)


async def test_a_lease_that_ran_out_is_asked_for_again() -> None:
    process = WireProcess(range(4), lease=0.4)
    async with started(process), reading_from(process) as backend:
        await connected(backend)
        assert await backend.held_prefix(keys_of(range(4))) == 4
        await until(lambda: not backend.status()[0]["promises"])
        items = await blanks(range(4), SMALL)
        assert await backend.get(items) == [OK] * 4
        await assert_right(items, range(len(items)))
        await nothing_granted(process)


async def test_many_at_once_with_a_quarter_cancelled() -> None:
    process = WireProcess(range(64), 1 << 20, lease=2.0)
    async with started(process), reading_from(process) as backend:
        await connected(backend)
        batches = [await blanks([number], 1 << 20) for number in range(64)]
        gets = [asyncio.ensure_future(backend.get(batch)) for batch in batches]
        await until(lambda: any(get.done() for get in gets))
        cancelled = [get for index, get in enumerate(gets) if index % 4 == 0 and get.cancel()]
        await asyncio.wait(gets)
        assert cancelled, "all were through before"
        for number, (batch, get) in enumerate(zip(batches, gets, strict=True)):
            if get.cancelled():
                await stained_anew(batch)
            else:
                assert get.result() == [OK]
                await assert_right(batch, [number])
        await nothing_granted(process)
        for batch, get in zip(batches, gets, strict=True):
            if get.cancelled():
                await assert_stained(batch)


async def test_three_peers_share_and_one_may_go() -> None:
    processes = [WireProcess(range(60), 1 << 20) for _ in range(3)]
    async with started(*processes), reading_from(*processes) as backend:
        await connected(backend)
        for round_ in range(2):
            for start in range(0, 60, 6):
                items = await blanks(range(start, start + 6), 1 << 20)
                assert await backend.get(items) == [OK] * 6
                await assert_right(items, range(start, start + 6))
            counts = [status["read_bytes"] for status in backend.status()]
            assert round_ or min(counts) > 6 << 20, counts
            await processes[0].kill()
            await connected(backend, 2)
