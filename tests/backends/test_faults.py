"""The fault-injecting wrappers of `kvtier.testing.faults`."""

from __future__ import annotations

import anyio
import pytest

from kvtier.testing.backend import make_key
from kvtier.testing.faults import Fault, FaultyBackend, SlowBackend
from tests.rigs.chunks import FAILED, FULL, MISS, OK, blanks, chunks, memory, opened

pytestmark = pytest.mark.anyio

KEYS = [make_key(number) for number in range(3)]
ONLY = frozenset({KEYS[1]})


@pytest.mark.parametrize("only", [None, ONLY])
async def test_fail_affects_the_chosen_keys_only(only: frozenset | None) -> None:
    async with opened(FaultyBackend(memory())) as faulty:
        await faulty.put(chunks(range(3)))
        faulty.fault, faulty.only = Fault.FAIL, only
        affected = [only is None or key in only for key in KEYS]
        assert list(await faulty.contains(KEYS)) == [not bad for bad in affected]
        expected = [FAILED if bad else OK for bad in affected]
        assert list(await faulty.get(blanks(range(3)))) == expected
        assert list(await faulty.put(chunks(range(3)))) == expected
        await faulty.delete(KEYS)
        faulty.fault = None
        assert list(await faulty.contains(KEYS)) == affected


async def test_full_and_forget_store_nothing() -> None:
    async with opened(FaultyBackend(memory())) as faulty:
        faulty.fault, faulty.only = Fault.FULL, ONLY
        assert list(await faulty.put(chunks(range(3)))) == [OK, FULL, OK]
        faulty.fault = Fault.FORGET
        assert list(await faulty.put(chunks(range(3)))) == [OK, OK, OK]
        faulty.fault = None
        assert list(await faulty.get(blanks(range(3)))) == [OK, MISS, OK]


async def test_raise_raises_and_short_answers_too_little() -> None:
    async with opened(FaultyBackend(memory())) as faulty:
        faulty.fault, faulty.only = Fault.RAISE, ONLY
        assert list(await faulty.put(chunks([0, 2]))) == [OK, OK]
        for call in (faulty.put(chunks([1])), faulty.get(blanks([0, 1])), faulty.delete(KEYS)):
            with pytest.raises(ConnectionError):
                await call
        faulty.fault = Fault.SHORT
        assert list(await faulty.contains(KEYS)) == [True, False]
        assert list(await faulty.get(blanks([0, 2]))) == [OK]


async def test_fault_flip_flips_one_bit() -> None:
    async with opened(FaultyBackend(memory())) as faulty:
        await faulty.put(chunks([0, 1]))
        faulty.fault, faulty.only = Fault.FLIP, ONLY
        items = blanks([0, 1])
        assert list(await faulty.get(items)) == [OK, OK]
        differing = [
            sum((a ^ b).bit_count() for a, b in zip(bytes(got), bytes(put), strict=True))
            for (_, got), (_, put) in zip(items, chunks([0, 1]), strict=True)
        ]
        assert differing == [0, 1]


async def test_counts_calls() -> None:
    async with opened(FaultyBackend(memory())) as faulty:
        await faulty.get([])
        await faulty.get(blanks([0, 1]))
        await faulty.put(chunks([0]))
        assert faulty.calls == {"contains": 0, "get": 1, "put": 1} or faulty.calls == {"get": 1, "put": 1}


@pytest.mark.parametrize("method", ["contains", "put", "get", "delete"])
async def test_hang_blocks_until_resumed(method: str) -> None:
    async with opened(SlowBackend(memory())) as slow:
        slow.hang()
        slow.hang()
        arguments = KEYS if method in ("contains", "delete") else chunks(range(3))
        ended = False

        async def call() -> None:
            nonlocal ended
            await getattr(slow, method)(arguments)
            ended = True

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            assert (slow.waiting, ended) == (1, False)
            slow.resume()
        assert (slow.waiting, ended) == (0, True)


@pytest.mark.parametrize("stubborn", [True, False])
async def test_stubborn_call_ignores_cancellation(stubborn: bool) -> None:
    async with opened(SlowBackend(memory(), stubborn=stubborn)) as slow:
        slow.hang()
        async with anyio.create_task_group() as group:
            group.start_soon(slow.get, blanks([0]))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                assert slow.waiting == stubborn
                slow.resume()


async def test_delay_is_applied() -> None:
    async with opened(SlowBackend(memory(), 0.05)) as slow:
        began = anyio.current_time()
        await slow.contains(KEYS)
        assert anyio.current_time() - began >= 0.05
