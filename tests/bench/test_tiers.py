"""One tier beside its limit: what is measured, and what a backend that does wrong comes to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from kvtier.backends.base import Backend, Outcome, PutItem
from kvtier.backends.cpu import CpuBackend
from kvtier.backends.disk import DiskBackend, DiskSettings
from kvtier.bench.errors import BenchFailed, Stuck
from kvtier.bench.rows import Extent, Row
from kvtier.bench.run import in_words, run
from kvtier.bench.tiers import measure_tier, steps_of, tier_bytes
from kvtier.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.units import MIB
from tests.backends.broken import DictBackend

EXTENT = Extent(size=64 << 10, chunks=3, in_flight=2, turns=2, look_ups=2)
SHELF = TierSettings(name="shelf", type="shelf", deadline=0.2)


def measured(backend: Backend, tier: TierSettings = SHELF) -> tuple[Row, int]:
    """The row, and how many steps were told of."""
    steps: list[None] = []
    row = run(partial(measure_tier, backend, tier, EXTENT, lambda: steps.append(None)))
    return row, len(steps)


def test_a_third_partys_backend_has_no_limit_and_is_left_empty() -> None:
    others = {ChunkKey(bytes(32)): b"others"}
    row, steps = measured(DictBackend(others))
    assert (row.limit, row.error) == (None, None)
    assert row.put is not None
    assert row.put.ratio is None
    assert row.look_ups_per_s is not None
    assert others == {ChunkKey(bytes(32)): b"others"}
    assert steps == steps_of(EXTENT)


def test_memory_is_held_against_memcpy() -> None:
    capacity = tier_bytes(EXTENT) + 2 * MIB
    tier = LocalTierSettings(name="ram", type="cpu", capacity=capacity)
    row, steps = measured(CpuBackend(tier), tier)
    assert row.limit == "memcpy"
    assert steps == steps_of(EXTENT)


def test_a_disk_whose_file_system_has_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.bench.limits._has_direct", lambda _: False)
    tier = DiskSettings(name="ssd", type="disk", capacity="1GiB", path=tmp_path)
    row, _ = measured(DiskBackend(tier), tier)
    assert (row.limit, row.error) == (None, None)
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault.FAIL, "it did not store what it was asked to: failed"),
        (Fault.FULL, "it did not store what it was asked to: full"),
        (Fault.FLIP, "it did not give back what it was asked to: miss"),
        (Fault.FORGET, "it did not give back what it was asked to: miss"),
    ],
)
def test_what_a_backend_does_wrong_is_said(fault: Fault, words: str) -> None:
    held: dict[ChunkKey, bytes] = {}
    backend = FaultyBackend(DictBackend(held))
    backend.fault = fault
    with pytest.raises(BenchFailed) as failed:
        measured(backend)
    assert in_words(failed.value) == words
    assert held == {}


class LooksUpWrong(DictBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False for _ in keys]


def test_a_look_up_that_finds_nothing() -> None:
    held: dict[ChunkKey, bytes] = {}
    with pytest.raises(BenchFailed, match="it holds 0 of 128 chunks"):
        measured(LooksUpWrong(held))
    assert held == {}


class NeverDeletes(DictBackend):
    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...


def test_a_backend_that_deletes_nothing() -> None:
    with pytest.raises(BenchFailed, match="still holds chunks 200ms after they were deleted"):
        measured(NeverDeletes({}))


class Hangs(DictBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        await anyio.sleep_forever()
        return []


def test_a_call_that_hangs_is_ended() -> None:
    with pytest.raises(BenchFailed, match="storing one chunk takes longer than 200ms"):
        measured(Hangs({}))


class CannotBeEnded(DictBackend):
    def __init__(self) -> None:
        super().__init__({})
        self.let_go = threading.Event()

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        while not self.let_go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return []


def test_a_call_that_cannot_be_ended_keeps_nobody_waiting() -> None:
    backend = CannotBeEnded()
    try:
        with pytest.raises(Stuck) as stuck:
            measured(backend)
    finally:
        backend.let_go.set()
    assert "may be left behind" in in_words(stuck.value)


def test_ending_the_wait_ends_the_work_and_cleans_up() -> None:
    held: dict[ChunkKey, bytes] = {}
    with pytest.raises(KeyboardInterrupt):
        run(partial(interrupted, Interrupts(held)))
    assert held == {}


class Interrupts(DictBackend):
    """Presses Ctrl-C when the first chunk is stored."""

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        outcomes = await super().put(items)
        signal_main_thread()
        await anyio.sleep_forever()
        return outcomes


def signal_main_thread() -> None:
    import signal

    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def interrupted(backend: Backend) -> Row:
    tier = SHELF.model_copy(update={"deadline": 60.0})
    return await measure_tier(backend, tier, EXTENT, lambda: None)
