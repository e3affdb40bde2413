"""The memory backends beyond the conformance suite."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvtier import native
from kvtier.backends import cpu
from kvtier.backends.cpu import HugePageBackend, HugePageSettings
from kvtier.errors import ArenaError, TierError
from kvtier.memory.arena import Arena
from kvtier.testing.backend import blank, make_key, noise
from tests.rigs.chunks import FULL, OK, memory, opened

pytestmark = pytest.mark.anyio

PAGE = 4096

BeforeEachCopy = Callable[[Callable[[], object]], None]


@pytest.fixture(params=["native", "python"])
def before_each_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BeforeEachCopy:
    """Call a function before each copy, with the native core and without it."""
    if request.param == "native" and not native.available():
        pytest.skip(native.summary())

    def patch(step: Callable[[], object]) -> None:
        if request.param == "python":
            monkeypatch.setattr(native, "available", lambda: False)
        for name in ("_copy_one", "_copy_all"):
            copy = getattr(cpu, name)

            def delayed(*given: Any, copy: Callable[..., None] = copy, **named: Any) -> None:
                step()
                copy(*given, **named)

            monkeypatch.setattr(cpu, name, delayed)

    return patch


async def test_full_backend_keeps_its_objects(leak_check: list[Arena]) -> None:
    async with opened(memory(8 * PAGE)) as backend:
        values = {make_key(number): memoryview(noise(b"%d" % number, 3 * PAGE)) for number in range(3)}
        assert list(await backend.put(list(values.items()))) == [OK, OK, FULL]
        assert list(await backend.put([(make_key(0), blank(4 * PAGE))])) == [FULL]
        assert backend.arena.used == 6 * PAGE
        view = blank(3 * PAGE)
        assert list(await backend.get([(make_key(0), view)])) == [OK]
        assert bytes(view) == values[make_key(0)]
        await backend.delete(list(values))
        assert backend.arena.used == 0
        assert list(await backend.put([(make_key(0), blank(8 * PAGE))])) == [OK]


async def test_deleted_object_is_freed_after_pending_reads(
    leak_check: list[Arena], before_each_copy: BeforeEachCopy
) -> None:
    resume = threading.Event()
    async with opened(memory(4 << 20)) as backend:
        key, value = make_key(1), memoryview(noise(b"value", 1 << 20))
        assert list(await backend.put([(key, value)])) == [OK]
        before_each_copy(lambda: resume.wait(60))
        view = blank(1 << 20)
        async with anyio.create_task_group() as group:
            group.start_soon(backend.get, [(key, view)])
            await anyio.wait_all_tasks_blocked()
            await backend.delete([key])
            assert backend.arena.used == 1 << 20, "freed during a read"
            resume.set()
        assert bytes(view) == value
        assert backend.arena.used == 0


async def test_cancelled_put_frees_its_memory(
    leak_check: list[Arena], before_each_copy: BeforeEachCopy
) -> None:
    resume = threading.Event()
    before_each_copy(lambda: resume.wait(60))
    async with opened(memory(4 << 20)) as backend:
        async with anyio.create_task_group() as group:
            group.start_soon(backend.put, [(make_key(1), blank(1 << 20))])
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                assert backend.arena.used == 1 << 20, "freed during a write"
                resume.set()
        assert (backend.arena.used, backend.arena.leases) == (0, 0)
        assert list(await backend.contains([make_key(1)])) == [False]


async def test_large_copies_run_in_a_thread(before_each_copy: BeforeEachCopy) -> None:
    threads: list[int] = []
    before_each_copy(lambda: threads.append(threading.get_ident()))
    async with opened(memory()) as backend:
        await backend.put([(make_key(1), blank(cpu.INLINE_COPY_BYTES))])
        assert threads == [threading.get_ident()]
        await backend.put([(make_key(1), blank(cpu.INLINE_COPY_BYTES + 1))])
        assert len(threads) == 2
        assert threads[1] != threading.get_ident()


async def test_failed_allocation_names_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(capacity: int, *, huge: bool = False, fallback: bool = True) -> Arena:
        raise ArenaError(f"none left: {huge=} {fallback=}")

    monkeypatch.setattr(Arena, "create", refuse)
    with pytest.raises(TierError, match="tier 'ram': none left: huge=False"):
        await memory().open()
    settings = HugePageSettings(name="huge", type="hugepage", capacity=1 << 30, fallback=False)
    with pytest.raises(TierError, match="tier 'huge': none left: huge=True fallback=False"):
        await HugePageBackend(settings).open()


async def test_missing_huge_pages_are_refused_or_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # More than any test machine has reserved.
    settings = {"name": "huge", "type": "hugepage", "capacity": 1 << 46}
    with pytest.raises(TierError, match=r"tier 'huge': .* huge pages .*fallback"):
        await HugePageBackend(HugePageSettings(fallback=False, **settings)).open()
    async with opened(HugePageBackend(HugePageSettings(**settings))) as backend:
        assert backend.arena.page_bytes == PAGE
        assert list(await backend.put([(make_key(1), blank(PAGE))])) == [OK]
    assert "huge pages" in caplog.text
