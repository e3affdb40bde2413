"""Measuring one tier next to its limit, and errors of faulty backends."""

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
from kvtier.backends.disk.backend import DiskBackend, DiskSettings
from kvtier.backends.s3 import S3Backend, S3Settings
from kvtier.lab.bench.rows import Extent, Row
from kvtier.lab.bench.run import describe_error, run
from kvtier.lab.bench.sides import BenchFailed, Stuck
from kvtier.lab.bench.tiers import measure_tier, steps_of, tier_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.units import MIB
from tests.rigs.chunks import DictBackend
from tests.rigs.servers.s3 import S3Server

EXTENT = Extent(size=64 << 10, chunks=3, in_flight=2, turns=2, lookups=2)
SHELF = TierSettings(name="shelf", type="shelf", deadline=0.2)


def measure(backend: Backend, tier: TierSettings = SHELF) -> tuple[Row, int]:
    """Return the row, and the number of reported steps."""
    steps: list[None] = []
    row = run(partial(measure_tier, backend, tier, EXTENT, lambda: steps.append(None)))
    return row, len(steps)


def test_third_party_backend_has_no_limit_and_is_left_unchanged() -> None:
    others = {ChunkKey(bytes(32)): b"others"}
    row, steps = measure(DictBackend(others))
    assert (row.limit, row.error) == (None, None)
    assert row.put is not None
    assert row.put.ratio is None
    assert row.lookups_per_s is not None
    assert others == {ChunkKey(bytes(32)): b"others"}
    assert steps == steps_of(EXTENT)


def test_limit_of_memory_is_memcpy() -> None:
    capacity = tier_bytes(EXTENT) + 2 * MIB
    tier = LocalTierSettings(name="ram", type="cpu", capacity=capacity)
    row, steps = measure(CpuBackend(tier), tier)
    assert row.limit == "memcpy"
    assert steps == steps_of(EXTENT)


def test_limit_of_an_object_store_is_its_client_library(tmp_path: Path) -> None:
    if reason := S3Server.missing():
        pytest.skip(reason)
    with S3Server(tmp_path) as server:
        tier = S3Settings(name="pool", **server.tier())
        row, steps = measure(S3Backend(tier), tier)
        assert server.objects("chunks") == []
    assert (row.limit, row.error) == ("client library", None)
    assert row.put is not None
    assert row.put.ratio is not None
    assert steps == steps_of(EXTENT)


def test_disk_without_direct_io_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.lab.bench.limits._has_direct", lambda _: False)
    tier = DiskSettings(name="ssd", type="disk", capacity="1GiB", path=tmp_path)
    row, _ = measure(DiskBackend(tier), tier)
    assert (row.limit, row.error) == (None, None)
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.FAIL, "the medium did not store all chunks: failed"),
        (Fault.FULL, "the medium did not store all chunks: full"),
        (Fault.FLIP, "the medium did not return all chunks: miss"),
        (Fault.FORGET, "the medium did not return all chunks: miss"),
    ],
)
def test_backend_faults_are_reported(fault: Fault, message: str) -> None:
    held: dict[ChunkKey, bytes] = {}
    backend = FaultyBackend(DictBackend(held))
    backend.fault = fault
    with pytest.raises(BenchFailed) as failed:
        measure(backend)
    assert describe_error(failed.value) == message
    assert held == {}


class FindsNothing(DictBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False for _ in keys]


def test_lookup_that_finds_nothing() -> None:
    held: dict[ChunkKey, bytes] = {}
    with pytest.raises(BenchFailed, match="the backend holds 0 of 128 chunks"):
        measure(FindsNothing(held))
    assert held == {}


class NeverDeletes(DictBackend):
    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...


def test_backend_that_never_deletes() -> None:
    with pytest.raises(BenchFailed, match="still holds chunks 200ms after they were deleted"):
        measure(NeverDeletes({}))


class Hangs(DictBackend):
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        await anyio.sleep_forever()
        return []


def test_hanging_call_times_out() -> None:
    with pytest.raises(BenchFailed, match="storing one chunk exceeded the deadline of 200ms"):
        measure(Hangs({}))


class IgnoresCancellation(DictBackend):
    def __init__(self) -> None:
        super().__init__({})
        self.released = threading.Event()

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        while not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return []


def test_call_that_ignores_cancellation_does_not_block() -> None:
    backend = IgnoresCancellation()
    try:
        with pytest.raises(Stuck) as stuck:
            measure(backend)
    finally:
        backend.released.set()
    assert "may be left behind" in describe_error(stuck.value)


def test_interrupt_stops_the_run_and_cleans_up() -> None:
    held: dict[ChunkKey, bytes] = {}
    with pytest.raises(KeyboardInterrupt):
        run(partial(interrupted, Interrupts(held)))
    assert held == {}


class Interrupts(DictBackend):
    """Sends SIGINT once the first chunk is stored."""

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
