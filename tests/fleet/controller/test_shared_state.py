"""The state that controllers share, in a real Redis or Valkey: one leads, and only that one writes."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvtier.errors import ControllerError
from kvtier.fleet.controller import shared_state
from kvtier.fleet.controller.shared_state import LEASE, PREFIX, SharedState
from kvtier.fleet.controller.state import EVENTS, OPERATIONS, PINS
from tests.rigs.clock import Clock
from tests.rigs.running_controller import TIMEOUT_SECONDS
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


async def wait_for_the_end() -> None:
    """Wait until a leader ends the block around this."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        await anyio.sleep_forever()


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
    assert state.rows(PINS) == [], "it does not lead any more"


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


async def test_leader_ends_at_once_when_another_one_has_the_lease(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "LEASE_SECONDS", 3600.0)
    async with leader(server):
        server.command("HSET", LEASE, "term", "7")
        await wait_for_the_end()


async def test_leader_ends_with_its_lease_while_a_call_hangs(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "LEASE_SECONDS", 0.5)
    async with leader(server) as state:
        execute = state._server.eval

        async def hang(script: str, *arguments: Any) -> Any:
            if script == shared_state._WRITE:
                await anyio.sleep_forever()
            return await execute(script, *arguments)

        monkeypatch.setattr(state._server, "eval", hang)
        await wait_for_the_end()


async def test_end_of_a_lost_term_leaves_the_next_one_alone(server: RedisServer) -> None:
    async with opened(server) as state:
        async with state.leading(await state.acquire("http://one")):
            server.command("HSET", LEASE, "term", "7")
            state.put(EVENTS, EVENT)
        assert server.command("EXISTS", LEASE) == 1
        server.command("DEL", LEASE)
        async with state.leading(await state.acquire("http://one")):
            state.put(PINS, PINS_OF_A[0])
        assert server.command("HLEN", PREFIX + "pins") == 1
        assert server.command("HLEN", PREFIX + "events") == 0, "it is of the term that was lost"


async def test_one_failed_call_does_not_end_a_term(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = False
    async with leader(server) as state:
        execute, errors = state._server.eval, [ConnectionError("reset")]

        async def fail_once(*arguments: Any) -> Any:
            if errors:
                raise errors.pop()
            return await execute(*arguments)

        monkeypatch.setattr(state._server, "eval", fail_once)
        state.put(EVENTS, EVENT)
        await state.saved()
        goes_on = True
    assert goes_on
    assert server.command("HLEN", PREFIX + "events") == 1


async def test_each_write_renews_the_lease(server: RedisServer) -> None:
    async with leader(server) as state:
        server.command("PEXPIRE", LEASE, "3600000")
        state.put(EVENTS, EVENT)
        await state.saved()
        assert 0 < int(server.command("PTTL", LEASE)) <= 1000 * shared_state.LEASE_SECONDS


async def test_lease_is_counted_from_before_it_is_renewed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another one could lead while a leader whose answers are slow still does."""
    async with leader(server) as state:
        execute, asked = state._server.eval, list[float]()

        async def answer_late(*arguments: Any) -> Any:
            asked.append(time.monotonic())
            answer = await execute(*arguments)
            await anyio.sleep(0.1)
            return answer

        monkeypatch.setattr(state._server, "eval", answer_late)
        state.put(EVENTS, EVENT)
        await state.saved()
        assert state._until <= asked[-1] + shared_state.LEASE_SECONDS


async def test_leader_with_too_much_to_write_gives_up_its_lease(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "BATCH_BYTES", 1000)
    monkeypatch.setattr(shared_state, "MAX_UNSAVED_BYTES", 5000)
    async with leader(server) as state:
        for number in range(100):
            state.put(EVENTS, (f"{number:016x}", 1.0, b"x" * 100))
        await wait_for_the_end()


async def test_one_that_cannot_load_the_state_does_not_lead(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server) as state:

        async def fail(_: str) -> None:
            raise ConnectionError("reset")

        term = await state.acquire("http://one")
        monkeypatch.setattr(state._server, "hgetall", fail)
        with pytest.raises(ControllerError, match="does not answer: reset"):
            async with state.leading(term):
                pass
        assert server.command("EXISTS", LEASE) == 0


async def test_time_of_the_unready_begins_when_the_lease_is_free(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would not leave a lease to others that has been another one's for long."""
    clock, turns = Clock(), itertools.count()
    monkeypatch.setattr(shared_state, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(shared_state, "time", SimpleNamespace(monotonic=clock))
    server.command("HSET", LEASE, "term", "7", "url", "http://one")
    async with opened(server) as state, anyio.create_task_group() as tasks:
        turn = 0

        def is_ready() -> bool:
            nonlocal turn
            turn = next(turns)
            return False

        tasks.start_soon(state.acquire, "http://two", is_ready)
        await until(lambda: state.lease)
        clock.now += 3600
        seen = turn
        await until(lambda: turn > seen + 1)
        server.command("DEL", LEASE)
        await until(lambda: state.lease is None or state.lease.mine)
        assert state.lease is None
        clock.now += shared_state.UNREADY_SECONDS + 1
        await until(lambda: state.lease is not None and state.lease.mine)


async def test_late_repetition_of_a_call_undoes_no_later_one(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a timeout: what the server had not read yet is repeated over another connection."""
    calls: list[Any] = []
    async with leader(server) as state:
        execute = state._server.eval

        async def note(*arguments: Any) -> Any:
            calls.append(arguments)
            return await execute(*arguments)

        monkeypatch.setattr(state._server, "eval", note)
        state.put(EVENTS, ("an event", 1.0, b"first"))
        await state.saved()
        repeated = list(calls)
        state.put(EVENTS, ("an event", 1.0, b"second"))
        await state.saved()
        for call in repeated:
            await execute(*call)
        state.put(OPERATIONS, ("an event", b"its operation"))
        await state.saved()
    async with leader(server) as state:
        assert [tuple(row) for row in state.rows(EVENTS)] == [("an event", 1.0, b"second")]
        assert len(state.rows(OPERATIONS)) == 1


async def test_who_waits_at_the_end_of_a_term_is_told_that_it_is_saved(server: RedisServer) -> None:
    """An operation that its client takes for refused must not be executed by the next leader."""
    async with opened(server) as state, anyio.create_task_group() as tasks:
        async with state.leading(await state.acquire("http://one")):
            for number in range(20):
                state.put(EVENTS, (f"{number:016x}", 1.0, b"x" * (1 << 18)))
            tasks.start_soon(state.saved)
            await anyio.lowlevel.checkpoint()
        assert server.command("HLEN", PREFIX + "events") == 20


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
        unsaved = len(state._unsaved)
        state.put(EVENTS, EVENT)
        assert len(state._unsaved) == unsaved
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


async def test_history_is_refused_while_the_server_does_not_answer(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with opened(server) as state:
            server.kill()
            with pytest.raises(ControllerError, match="so there is no history"):
                await state.samples(0, [1000], "fleet")


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
