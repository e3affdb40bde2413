"""The circuit breaker: when it opens and closes, and deferred deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import anyio
import pytest

from kvtier.backends.base import Capabilities, StoredObject, SupportsPrefix
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import make_key
from kvtier.testing.faults import Fault, FaultyBackend, SlowBackend
from kvtier.tiers.breaker import BreakerState, CircuitBreaker
from tests.rigs.chunks import FAILED, FULL, MISS, OK, blanks, chunks, disk, memory, opened
from tests.rigs.composed_backends import TierBackend

pytestmark = pytest.mark.anyio

CLOSED, OPEN, PROBING = BreakerState


class Guarded:
    """A tier whose breaker has a controllable clock, over a backend that can be made to fail and hang."""

    def __init__(self, failures: int = 3, cooldown: float = 1.0, max_cooldown: float = 5.0) -> None:
        self.now = 100.0
        self.faulty = FaultyBackend(memory())
        self.slow = SlowBackend(self.faulty)
        self.breaker = CircuitBreaker("doll", failures, cooldown, max_cooldown, clock=lambda: self.now)
        self.backend = TierBackend(
            self.slow, breaker=self.breaker, retry_seconds=max_cooldown, clock=lambda: self.now
        )

    async def get(self) -> list[str]:
        return [outcome.value for outcome in await self.backend.get(blanks([1]))]

    async def fail(self, times: int) -> None:
        self.faulty.fault = Fault.FAIL
        for _ in range(times):
            await self.backend.get(blanks([1]))

    @property
    def inner_calls(self) -> int:
        return self.faulty.calls.total()


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    wrapper = Guarded()
    async with opened(wrapper.backend):
        await wrapper.backend.put(chunks([1]))
        yield wrapper


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.RAISE, Fault.SHORT])
@pytest.mark.parametrize("method", ["get", "put"])
async def test_opens_after_consecutive_failures(guarded: Guarded, fault: Fault, method: str) -> None:
    backend, breaker = guarded.backend, guarded.breaker
    for _ in range(3):
        guarded.faulty.fault = fault
        for _ in range(2):
            await getattr(backend, method)(chunks([1]))
        assert breaker.state is CLOSED
        guarded.faulty.fault = None
        await backend.get(blanks([1]))
    guarded.faulty.fault = fault
    for _ in range(3):
        assert breaker.available
        assert list(await getattr(backend, method)(chunks([1, 2]))) == [FAILED, FAILED] or fault is Fault.FAIL
    assert breaker.state is OPEN
    assert not breaker.available


async def test_one_failed_key_counts_as_a_failed_batch(guarded: Guarded) -> None:
    guarded.faulty.fault, guarded.faulty.only = Fault.FAIL, frozenset({make_key(2)})
    for _ in range(3):
        assert list(await guarded.backend.get(blanks([1, 2]))) == [OK, FAILED]
    assert guarded.breaker.state is OPEN


async def test_lookups_that_raise_open_the_breaker(guarded: Guarded) -> None:
    guarded.faulty.fault = Fault.RAISE
    for _ in range(3):
        assert guarded.breaker.state is CLOSED
        assert list(await guarded.backend.contains([make_key(1), make_key(2)])) == [False, False]
    assert guarded.breaker.state is OPEN
    before = guarded.inner_calls
    assert list(await guarded.backend.contains([make_key(1)])) == [False]
    assert guarded.inner_calls == before
    guarded.faulty.fault = None
    guarded.now += 2
    assert list(await guarded.backend.contains([make_key(1), make_key(2)])) == [True, False]
    assert guarded.breaker.state is CLOSED


class Prefixed(FaultyBackend, SupportsPrefix):
    """Support ``held_prefix``, with the faults of ``contains``."""

    def capabilities(self) -> Capabilities:
        return Capabilities.of(self)

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        held = await self.contains(keys)
        return [*held, False].index(False)


async def test_held_prefix_that_raises_opens_the_breaker() -> None:
    now = 100.0
    faulty = Prefixed(memory())
    breaker = CircuitBreaker("doll", failures=3, cooldown=1.0, clock=lambda: now)
    backend = TierBackend(faulty, breaker=breaker)
    keys = [make_key(number) for number in range(1, 4)]
    async with opened(backend):
        await backend.put(chunks([1, 2]))
        assert await backend.held_prefix(keys) == 2
        assert await backend.held_prefix(keys[2:]) == 0
        faulty.fault = Fault.RAISE
        for _ in range(3):
            assert breaker.state is CLOSED
            assert await backend.held_prefix(keys) == 0
        assert breaker.state is OPEN
        faulty.fault = None
        before = faulty.calls.total()
        assert await backend.held_prefix(keys) == 0
        assert faulty.calls.total() == before
        now += 2
        assert await backend.held_prefix(keys) == 2
        assert breaker.state is CLOSED


async def test_misses_and_full_are_not_failures(guarded: Guarded) -> None:
    guarded.faulty.fault = Fault.FULL
    for _ in range(10):
        assert list(await guarded.backend.put(chunks([2]))) == [FULL]
        assert list(await guarded.backend.get(blanks([3]))) == [MISS]
        assert list(await guarded.backend.contains([make_key(3)])) == [False]
        await guarded.backend.delete([make_key(3)])
    assert guarded.breaker.state is CLOSED


async def test_open_breaker_fails_fast_without_calling_the_backend(guarded: Guarded) -> None:
    await guarded.fail(3)
    before = guarded.inner_calls
    guarded.slow.hang()
    with anyio.fail_after(30):
        assert list(await guarded.backend.contains([make_key(1)])) == [False]
        assert list(await guarded.backend.get(blanks([1, 2]))) == [FAILED, FAILED]
        assert list(await guarded.backend.put(chunks([1]))) == [FAILED]
        await guarded.backend.delete([make_key(5)])
    assert guarded.inner_calls == before


async def test_successful_probe_closes_the_breaker(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 0.99
    assert await guarded.get() == ["failed"]
    guarded.now += 0.02
    assert guarded.breaker.available
    assert await guarded.get() == ["ok"]
    assert guarded.breaker.state is CLOSED


async def test_failed_probes_double_the_cooldown(guarded: Guarded) -> None:
    await guarded.fail(3)
    for wait in [1, 2, 4, 5, 5]:
        before = guarded.inner_calls
        guarded.now += wait - 0.01
        assert await guarded.get() == ["failed"]
        assert guarded.inner_calls == before, "probed too early"
        guarded.now += 0.02
        assert await guarded.get() == ["failed"]
        assert guarded.inner_calls == before + 1
        assert guarded.breaker.state is OPEN
    assert guarded.breaker.outages == 1
    guarded.faulty.fault = None
    guarded.now += 6
    assert await guarded.get() == ["ok"]
    await guarded.fail(3)
    assert guarded.breaker.outages == 2
    guarded.now += 1.01
    assert guarded.breaker.available, "the cooldown restarts at its initial value"


async def test_only_one_call_probes(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 2
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        assert guarded.breaker.state is PROBING
        assert not guarded.breaker.available
        assert await guarded.get() == ["failed"]
        guarded.slow.resume()
    assert guarded.breaker.state is CLOSED


@pytest.mark.parametrize("native", [True, False])
async def test_next_call_probes_after_a_cancelled_probe(guarded: Guarded, native: bool) -> None:
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
    assert guarded.breaker.available
    guarded.slow.resume()
    assert await guarded.get() == ["ok"]


async def test_timeouts_open_the_breaker_and_late_replies_are_ignored(guarded: Guarded) -> None:
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        guarded.breaker.record_failure()
        guarded.breaker.record_failure()
        assert guarded.breaker.state is CLOSED
        guarded.breaker.record_failure()
        assert guarded.breaker.state is OPEN
        guarded.slow.resume()
    assert guarded.breaker.state is OPEN, "replies to calls from before it opened are ignored"


async def test_late_successes_do_not_reset_timeouts(guarded: Guarded) -> None:
    for _ in range(3):
        guarded.slow.hang()
        async with anyio.create_task_group() as group:
            group.start_soon(guarded.get)
            await anyio.wait_all_tasks_blocked()
            guarded.breaker.record_failure()
            guarded.slow.resume()
    assert guarded.breaker.state is OPEN


async def test_timed_out_probe_fails(guarded: Guarded) -> None:
    await guarded.fail(3)
    guarded.faulty.fault = None
    guarded.now += 2
    guarded.slow.hang()
    async with anyio.create_task_group() as group:
        group.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        guarded.breaker.record_failure()
        assert guarded.breaker.state is OPEN
        guarded.now += 1.5
        assert not guarded.breaker.available, "the cooldown is doubled"
        guarded.slow.resume()
    assert guarded.breaker.state is OPEN


async def test_failures_of_earlier_calls_do_not_fail_the_probe(guarded: Guarded) -> None:
    guarded.slow.hang()
    async with anyio.create_task_group() as old:
        old.start_soon(guarded.get)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            guarded.breaker.record_failure()
        guarded.now += 2
        async with anyio.create_task_group() as probe:
            probe.start_soon(guarded.get)
            await anyio.wait_all_tasks_blocked()
            assert guarded.breaker.state is PROBING
            guarded.slow.resume()
    assert guarded.breaker.state is CLOSED


async def test_failed_deletions_are_retried_before_other_calls(guarded: Guarded) -> None:
    backend, breaker, inner = guarded.backend, guarded.breaker, guarded.faulty.inner
    await backend.put(chunks([2, 3]))
    guarded.faulty.fault = Fault.RAISE
    await backend.delete([make_key(1)])
    assert await guarded.get() == await guarded.get() == ["failed"]
    assert breaker.state is OPEN
    await backend.delete([make_key(2)])
    assert list(await inner.contains([make_key(1), make_key(2), make_key(3)])) == [True, True, True]
    guarded.faulty.fault = None
    guarded.now += 10
    assert list(await backend.put(chunks([2]))) == [OK]
    assert list(await inner.contains([make_key(1), make_key(2), make_key(3)])) == [False, True, True]
    calls = guarded.faulty.calls["delete"]
    await backend.get(blanks([2]))
    assert guarded.faulty.calls["delete"] == calls, "nothing is deleted twice"


async def test_deletions_that_raise_open_the_breaker_and_are_retried(guarded: Guarded) -> None:
    backend, breaker, inner = guarded.backend, guarded.breaker, guarded.faulty.inner
    await backend.put(chunks([2, 3, 4]))
    guarded.faulty.fault = Fault.RAISE
    for number in (1, 2, 3):
        assert breaker.state is CLOSED
        await backend.delete([make_key(number)])
    assert breaker.state is OPEN
    guarded.faulty.fault = None
    guarded.now += 2
    keys = [make_key(number) for number in (1, 2, 3, 4)]
    assert list(await inner.contains(keys)) == [True] * 4
    assert list(await backend.contains(keys)) == [False, False, False, True]
    assert breaker.state is CLOSED


async def test_empty_batches_are_ignored(guarded: Guarded) -> None:
    await guarded.fail(2)
    for method in ("contains", "put", "get"):
        assert list(await getattr(guarded.backend, method)([])) == []
    await guarded.backend.delete([])
    await guarded.fail(1)
    assert guarded.breaker.state is OPEN


async def test_state_changes_are_logged_once(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        await guarded.fail(8)
        guarded.faulty.fault = None
        guarded.now += 2
        await guarded.get()
        await guarded.get()
    assert [record.getMessage() for record in caplog.records] == [
        "tier doll: 1 of 1 chunks failed",
        "tier doll: circuit breaker open for 1 s after 3 consecutive failures (last: 1 of 1 chunks failed)",
        "tier doll: circuit breaker half-open, probing with one batch",
        "tier doll: circuit breaker closed",
    ]


async def test_exceptions_are_logged(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    guarded.faulty.fault = Fault.RAISE
    with caplog.at_level(logging.WARNING, "kvtier"):
        await guarded.get()
        await guarded.get()
    assert [record.getMessage() for record in caplog.records] == [
        "tier doll: a batch failed: ConnectionError('injected fault')"
    ]


async def test_failed_scan_yields_earlier_batches(tmp_path) -> None:
    class FailingScan(type(disk(tmp_path))):
        async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
            async for batch in super().scan():
                yield batch
                raise OSError("disconnected")

    async with opened(TierBackend(FailingScan(disk(tmp_path)._settings))) as backend:
        await backend.put(chunks([1]))
        assert [len(batch) async for batch in backend.scan()] == [1]
