"""The circuit breaker: when it opens, when it closes, and what it remembers meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import anyio
import pytest

from kvtier.backends.base import StoredObject, SupportsPrefix
from kvtier.backends.guarded import BreakerState, GuardedBackend
from kvtier.keys import ChunkKey
from kvtier.testing.backend import make_key
from kvtier.testing.faults import Fault, FaultyBackend, SlowBackend
from tests.backends.chunks import FAILED, FULL, MISS, OK, blanks, chunks, disk, memory, opened

pytestmark = pytest.mark.anyio

CLOSED, OPEN, PROBING = BreakerState


class Guarded:
    """A breaker around a medium that can be made to fail and to hang, and the time by which it goes."""

    def __init__(self, failures: int = 3, cooldown: float = 1.0, max_cooldown: float = 5.0) -> None:
        self.now = 100.0
        self.faulty = FaultyBackend(memory())
        self.slow = SlowBackend(self.faulty)
        self.backend = GuardedBackend(
            self.slow, failures, cooldown, max_cooldown, name="doll", clock=lambda: self.now
        )

    async def get(self) -> list[str]:
        return [outcome.value for outcome in await self.backend.get(blanks([1]))]

    async def fail(self, times: int) -> None:
        self.faulty.fault = Fault.FAIL
        for _ in range(times):
            await self.backend.get(blanks([1]))

    @property
    def reached(self) -> int:
        return self.faulty.calls.total()


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    made = Guarded()
    async with opened(made.backend):
        await made.backend.put(chunks([1]))
        yield made


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.RAISE, Fault.SHORT])
@pytest.mark.parametrize("method", ["get", "put"])
async def test_it_opens_after_so_many_failures_in_a_row(guarded: Guarded, fault: Fault, method: str) -> None:
    backend = guarded.backend
    for _ in range(3):
        guarded.faulty.fault = fault
        for _ in range(2):
            await getattr(backend, method)(chunks([1]))
        assert backend.state is CLOSED
        guarded.faulty.fault = None
        await backend.get(blanks([1]))
    guarded.faulty.fault = fault
    for _ in range(3):
        assert backend.available
        assert list(await getattr(backend, method)(chunks([1, 2]))) == [FAILED, FAILED] or fault is Fault.FAIL
    assert backend.state is OPEN
    assert not backend.available


async def test_one_failed_key_makes_a_failed_batch(guarded: Guarded) -> None:
    guarded.faulty.fault, guarded.faulty.only = Fault.FAIL, frozenset({make_key(2)})
    for _ in range(3):
        assert list(await guarded.backend.get(blanks([1, 2]))) == [OK, FAILED]
    assert guarded.backend.state is OPEN


async def test_look_ups_that_raise_open_it(guarded: Guarded) -> None:
    guarded.faulty.fault = Fault.RAISE
    for _ in range(3):
        assert guarded.backend.state is CLOSED
        assert list(await guarded.backend.contains([make_key(1), make_key(2)])) == [False, False]
    assert guarded.backend.state is OPEN
    before = guarded.reached
    assert list(await guarded.backend.contains([make_key(1)])) == [False]
    assert guarded.reached == before
    guarded.faulty.fault = None
    guarded.now += 2
    assert list(await guarded.backend.contains([make_key(1), make_key(2)])) == [True, False]
    assert guarded.backend.state is CLOSED


class Prefixed(FaultyBackend, SupportsPrefix):
    """Tells how much of a prompt it holds, with the faults of its ``contains``."""

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        held = await self.contains(keys)
        return [*held, False].index(False)


async def test_prefixes_that_raise_open_it() -> None:
    now = 100.0
    faulty = Prefixed(memory())
    backend = GuardedBackend(faulty, failures=3, cooldown=1.0, clock=lambda: now)
    assert isinstance(backend, SupportsPrefix)
    keys = [make_key(number) for number in range(1, 4)]
    async with opened(backend):
        await backend.put(chunks([1, 2]))
        assert await backend.held_prefix(keys) == 2
        assert await backend.held_prefix(keys[2:]) == 0
        faulty.fault = Fault.RAISE
        for _ in range(3):
            assert backend.state is CLOSED
            assert await backend.held_prefix(keys) == 0
        assert backend.state is OPEN
        faulty.fault = None
        before = faulty.calls.total()
        assert await backend.held_prefix(keys) == 0
        assert faulty.calls.total() == before
        now += 2
        assert await backend.held_prefix(keys) == 2
        assert backend.state is CLOSED


async def test_misses_and_a_full_medium_are_no_failures(guarded: Guarded) -> None:
    guarded.faulty.fault = Fault.FULL
    for _ in range(10):
        assert list(await guarded.backend.put(chunks([2]))) == [FULL]
        assert list(await guarded.backend.get(blanks([3]))) == [MISS]
        assert list(await guarded.backend.contains([make_key(3)])) == [False]
        await guarded.backend.delete([make_key(3)])
    assert guarded.backend.state is CLOSED


async def test_open_it_answers_at_once_and_asks_nothing(guarded: Guarded) -> None:
    await guarded.fail(3)
    before = guarded.reached
    guarded.slow.hang()
    with anyio.fail_after(30):
        assert list(await guarded.backend.contains([make_key(1)])) == [False]
        assert list(await guarded.backend.get(blanks([1, 2]))) == [FAILED, FAILED]
        assert list(await guarded.backend.put(chunks([1]))) == [FAILED]
        await guarded.backend.delete([make_key(5)])
    assert guarded.reached == before


async def test_a_probe_that_succeeds_closes_it(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 0.99
    assert await guarded.get() == ["failed"]
    guarded.now += 0.02
    assert guarded.backend.available
    assert await guarded.get() == ["ok"]
    assert guarded.backend.state is CLOSED


async def test_probes_that_fail_double_the_time_to_the_next(guarded: Guarded) -> None:
    await guarded.fail(3)
    for wait in [1, 2, 4, 5, 5]:
        before = guarded.reached
        guarded.now += wait - 0.01
        assert await guarded.get() == ["failed"]
        assert guarded.reached == before, "asked too early"
        guarded.now += 0.02
        assert await guarded.get() == ["failed"]
        assert guarded.reached == before + 1
        assert guarded.backend.state is OPEN
    assert guarded.backend.outages == 1
    guarded.faulty.fault = None
    guarded.now += 6
    assert await guarded.get() == ["ok"]
    await guarded.fail(3)
    assert guarded.backend.outages == 2
    guarded.now += 1.01
    assert guarded.backend.available, "the cooldown begins anew"


async def test_only_one_call_is_the_probe(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 2
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        assert guarded.backend.state is PROBING
        assert not guarded.backend.available
        assert await guarded.get() == ["failed"]
        guarded.slow.resume()
    assert guarded.backend.state is CLOSED


@pytest.mark.parametrize("native", [True, False])
async def test_a_cancelled_probe_leaves_it_to_the_next_call(guarded: Guarded, native: bool) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 2
    guarded.slow.hang()
    if native:
        task = asyncio.ensure_future(guarded.get())
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with anyio.move_on_after(0.01):
            await guarded.get()
    assert guarded.backend.available
    guarded.slow.resume()
    assert await guarded.get() == ["ok"]


async def test_time_outs_open_it_and_late_answers_count_for_nothing(guarded: Guarded) -> None:
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        guarded.backend.record_failure()
        guarded.backend.record_failure()
        assert guarded.backend.state is CLOSED
        guarded.backend.record_failure()
        assert guarded.backend.state is OPEN
        guarded.slow.resume()
    assert guarded.backend.state is OPEN, "answers from before say nothing"


async def test_late_successes_do_not_hide_that_every_call_is_out_of_time(guarded: Guarded) -> None:
    for _ in range(3):
        guarded.slow.hang()
        async with anyio.create_task_group() as group:
            group.start_soon(guarded.get)
            await anyio.wait_all_tasks_blocked()
            guarded.backend.record_failure()
            guarded.slow.resume()
    assert guarded.backend.state is OPEN


async def test_a_probe_out_of_time_has_failed(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 2
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        guarded.backend.record_failure()
        assert guarded.backend.state is OPEN
        guarded.now += 1.5
        assert not guarded.backend.available, "the cooldown has doubled"
        guarded.slow.resume()
    assert guarded.backend.state is OPEN


async def test_failures_of_calls_from_before_do_not_fail_the_probe(guarded: Guarded) -> None:
    guarded.slow.hang()
    async with anyio.create_task_group() as old:
        old.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            guarded.backend.record_failure()
        guarded.now += 2
        async with anyio.create_task_group() as probe:
            probe.start_soon(guarded.get)
            await anyio.wait_all_tasks_blocked()
            assert guarded.backend.state is PROBING
            guarded.slow.resume()
    assert guarded.backend.state is CLOSED


async def test_what_could_not_be_deleted_is_deleted_first_of_all(guarded: Guarded) -> None:
    backend, inner = guarded.backend, guarded.faulty.inner
    await backend.put(chunks([2, 3]))
    guarded.faulty.fault = Fault.RAISE
    await backend.delete([make_key(1)])
    assert await guarded.get() == await guarded.get() == ["failed"]
    assert backend.state is OPEN
    await backend.delete([make_key(2)])
    assert list(await inner.contains([make_key(1), make_key(2), make_key(3)])) == [True, True, True]
    guarded.faulty.fault = None
    guarded.now += 10
    assert list(await backend.put(chunks([2]))) == [OK]
    assert list(await inner.contains([make_key(1), make_key(2), make_key(3)])) == [False, True, True]
    calls = guarded.faulty.calls["delete"]
    await backend.get(blanks([2]))
    assert guarded.faulty.calls["delete"] == calls, "nothing is deleted twice"


async def test_deletions_that_raise_open_it_and_are_made_up_for(guarded: Guarded) -> None:
    backend, inner = guarded.backend, guarded.faulty.inner
    await backend.put(chunks([2, 3, 4]))
    guarded.faulty.fault = Fault.RAISE
    for number in (1, 2, 3):
        assert backend.state is CLOSED
        await backend.delete([make_key(number)])
    assert backend.state is OPEN
    guarded.faulty.fault = None
    guarded.now += 2
    keys = [make_key(number) for number in (1, 2, 3, 4)]
    assert list(await inner.contains(keys)) == [True] * 4
    assert list(await backend.contains(keys)) == [False, False, False, True]
    assert backend.state is CLOSED


async def test_empty_batches_tell_nothing(guarded: Guarded) -> None:
    await guarded.fail(2)
    for method in ("contains", "put", "get"):
        assert list(await getattr(guarded.backend, method)([])) == []
    await guarded.backend.delete([])
    await guarded.fail(1)
    assert guarded.backend.state is OPEN


async def test_each_change_is_logged_once(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        await guarded.fail(8)
        guarded.faulty.fault = None
        guarded.now += 2
        await guarded.get()
        await guarded.get()
    assert [record.getMessage() for record in caplog.records] == [
        "tier doll: 1 of 1 chunks failed",
        "tier doll: circuit breaker open for 1 s after 3 consecutive failures (last: 1 of 1 chunks failed)",
        "tier doll: circuit breaker lets one batch through",
        "tier doll: circuit breaker closed",
    ]


async def test_what_is_raised_is_logged(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    guarded.faulty.fault = Fault.RAISE
    with caplog.at_level(logging.WARNING, "kvtier"):
        await guarded.get()
        await guarded.get()
    assert [record.getMessage() for record in caplog.records] == [
        "tier doll: a batch failed: ConnectionError('a fault that a test has asked for')"
    ]


async def test_a_scan_that_fails_gives_what_it_has(tmp_path) -> None:
    class Torn(type(disk(tmp_path))):
        async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
            async for batch in super().scan():
                yield batch
                raise OSError("the cable is out")

    async with opened(GuardedBackend(Torn(disk(tmp_path)._settings))) as backend:
        await backend.put(chunks([1]))
        assert [len(batch) async for batch in backend.scan()] == [1]
