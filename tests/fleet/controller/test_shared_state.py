"""The state that controllers share, in a real Redis or Valkey: one leads, and only that one writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.errors import ControllerError
from kvtier.fleet.controller import shared_state
from kvtier.fleet.controller.shared_state import LEASE, PREFIX, SharedState
from kvtier.fleet.controller.state import EVENTS, OPERATIONS, PINS
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.running import running
from tests.rigs.servers.valkey import ValkeyServer
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

EVENT = ("9f86d081884c7d65", 1000.5, b"an event")
PINS_OF_A = [("a", b"l" * 32, b"k" * 64, until, 1000.0) for until in (None, 2000.0)]


@pytest.fixture(scope="module", params=[RedisServer, ValkeyServer], ids=["Redis", "Valkey"])
def module_server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(request.param, tmp_path_factory) as server:
        yield server


@pytest.fixture
def server(module_server: RedisServer) -> Iterator[RedisServer]:
    yield module_server
    module_server.resume()
    module_server.command("FLUSHALL")


def opened(server: RedisServer) -> Any:
    return SharedState.open(server.tier()["url"], server.password)


@asynccontextmanager
async def leader(server: RedisServer, url: str = "http://one") -> AsyncIterator[SharedState]:
    """Lead until the end of the block, or until the lease is lost."""
    async with opened(server) as state, state.leading(await state.acquire(url)):
        yield state


async def test_next_leader_finds_what_the_last_one_has_written(server: RedisServer) -> None:
    async with leader(server) as state:
        assert state.rows(EVENTS) == []
        state.put(EVENTS, EVENT)
        state.put(EVENTS, ("other", 1.0, b"another event"))
        state.put(OPERATIONS, (EVENT[0], b"its operation"))
        state.put(PINS, PINS_OF_A[0])
        state.put(PINS, PINS_OF_A[1])
        state.put(PINS, ("b", *PINS_OF_A[0][1:]))
        state.delete(EVENTS, [("other",)])
        state.delete(PINS, [("b", b"l" * 32), ("c", b"l" * 32)])
    async with leader(server) as state:
        assert [tuple(row) for row in state.rows(EVENTS)] == [EVENT]
        assert [tuple(row) for row in state.rows(OPERATIONS)] == [(EVENT[0], b"its operation")]
        assert [tuple(row) for row in state.rows(PINS)] == [PINS_OF_A[1]]


async def test_what_is_saved_survives_a_kill(server: RedisServer) -> None:
    async with leader(server) as state:
        for number in range(3000):
            state.put(EVENTS, (f"{number:016x}", 1.0, b"x" * 1000))
        await state.saved()
        assert server.command("HLEN", PREFIX + "events") == 3000


async def test_one_leads_at_a_time_and_is_known_to_all(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "TURN_SECONDS", 0.02)
    terms: list[int] = []

    async def take_turn() -> None:
        async with opened(server) as state:
            terms.append(await state.acquire("http://two"))

    async with anyio.create_task_group() as tasks, opened(server) as third:
        async with leader(server) as first:
            tasks.start_soon(take_turn)
            with anyio.move_on_after(0.3):
                await third.acquire("http://three")
            assert third.lease is not None
            assert first.lease is not None
            assert third.lease == first.lease._replace(mine=False)
            assert third.lease.url == "http://one"
            assert not terms
        await until(lambda: terms)
    assert terms[0] > third.lease.term


async def test_lease_of_a_leader_that_was_killed_expires(server: RedisServer) -> None:
    async with opened(server) as killed:
        await killed.acquire("http://one")
        # It neither renews nor releases it.
        async with opened(server) as other:
            assert await other.acquire("http://two")
            assert int(server.command("PTTL", LEASE)) <= 1000 * shared_state.LEASE_SECONDS


async def test_leader_that_has_lost_its_lease_writes_nothing_and_ends(server: RedisServer) -> None:
    ended = False
    async with leader(server) as state:
        server.command("DEL", LEASE)
        async with opened(server) as other, other.leading(await other.acquire("http://two")):
            state.put(EVENTS, EVENT)
            await anyio.sleep_forever()
        ended = True
    assert not ended
    assert server.command("HLEN", PREFIX + "events") == 0


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_leader_without_an_answer_ends_before_another_one_can_lead(how: str, tmp_path: Path) -> None:
    reached = False
    with RedisServer(tmp_path) as server:
        async with leader(server) as state:
            await anyio.to_thread.run_sync(server.pause if how == "paused" else server.kill)
            state.put(EVENTS, EVENT)
            with pytest.raises(ControllerError, match="does not answer"):
                await state.saved()
            await anyio.sleep(shared_state.LEASE_SECONDS)
            reached = True
        assert not reached
        assert state.lease is None
        state.put(EVENTS, EVENT)
        assert state.rows(EVENTS) == []
        if how == "paused":
            server.resume()
        else:
            await anyio.to_thread.run_sync(server.start)
        async with leader(server):
            assert server.command("HLEN", PREFIX + "events") == 0


async def test_samples_are_found_by_time_and_series_and_expire(server: RedisServer) -> None:
    names = ("fleet:", "instance:a", "instance:ab", "model:m")
    now = 4_000_000_000
    times = [now, now + 10, now + 20]
    async with leader(server) as state:
        for at in (100, *times[:2]):
            state.add_samples(0, at, at - 3600, [(name, b"%d" % at) for name in names])
        await state.saved()
        assert await state.samples(0, [100], "fleet") == [], "it is old"
        of_fleet, of_all = [await state.samples(0, times, kind) for kind in ("fleet", "instance")]
        of_a = await state.samples(0, times, "instance", "a")
        assert of_fleet == [("fleet:", at, b"%d" % at) for at in times[:2]]
        assert of_a == [("instance:a", at, b"%d" % at) for at in times[:2]]
        assert [row[:2] for row in of_all] == [(name, at) for at in times[:2] for name in names[1:3]]
        assert await state.samples(1, times, "fleet") == []
        for kind in ("fleet", "instance", "model"):
            assert server.command("EXPIRETIME", f"{PREFIX}history:0:{now}:{kind}") == now + 3600
        assert sorted(row[0] for row in await state.samples(0, [now])) == sorted(names)


async def test_damaged_rows_are_skipped_with_a_warning(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Or one of them would keep every controller from leading."""
    async with leader(server) as state:
        state.put(EVENTS, EVENT)
    for key, rest in ((b"\xc1", b"\x90"), (b"\x07", b"\x90"), (b"\x91\xa1a", b"text")):
        server.command("HSET", PREFIX + "events", key, rest)
    async with leader(server) as state:
        assert [tuple(row) for row in state.rows(EVENTS)] == [EVENT]
    assert caplog.text.count("a damaged row is skipped") == 3


async def test_wrong_password_is_refused_at_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="the right password") as server:
        for password in (None, "a wrong password"):
            with pytest.raises(ControllerError, match="--state-password-file") as refused:
                async with SharedState.open(server.tier()["url"], password):
                    pass
            assert "a wrong password" not in str(refused.value)
        async with leader(server) as state:
            assert state.rows(EVENTS) == []


async def test_server_that_evicts_state_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
    with RedisServer(tmp_path, options=options) as server:
        async with opened(server):
            pass
    assert "evicts any key when its memory is full" in caplog.text
