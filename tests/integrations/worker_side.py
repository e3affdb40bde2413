"""A worker's book-keeping of copies that are under way, as they are on a GPU. See ``test_with_vllm.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.integrations.vllm import worker
from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.layout import ChunkLayout, GroupLayout

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))


class Bridge:
    """Answers as a cache process would, and writes down what it was asked."""

    def __init__(self) -> None:
        self.epoch = 1
        self.arena = object()
        self.here = True
        self.confirmed: list[list[int]] = []
        self.committed: list[list[int]] = []
        self.abandoned: list[list[int]] = []
        self.closed = False

    def poll(self) -> None:
        pass

    def ready(self) -> bool:
        return self.here

    def confirm(self, leases: list[int]) -> bool:
        self.confirmed.append(leases)
        return self.here

    def commit(self, leases: list[int]) -> bool:
        self.committed.append(leases)
        return self.here

    def abandon(self, leases: list[int]) -> None:
        self.abandoned.append(leases)

    def close(self) -> None:
        self.closed = True


class Copies:
    """Copies that are done when the test says so."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.begun: list[Sequence[ChunkCopy]] = []
        self.memories: list[object] = []
        self.broken = False
        self.closed = False

    def load(self, memory: object, chunks: Sequence[ChunkCopy]) -> int:
        self.memories.append(memory)
        self.begun.append(chunks)
        return len(self.begun)

    save = load

    def done(self, ticket: int) -> bool:
        if self.broken:
            raise RuntimeError("an illegal memory access")
        return ticket in self.finished

    def close(self) -> None:
        self.finished.update(range(1, len(self.begun) + 1))
        self.closed = True


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def side(bridge: Bridge, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> WorkerSide:
    monkeypatch.setattr(worker, "page_copies", lambda *_: copies)
    there: Any = bridge
    return WorkerSide(ModelLayout(LAYOUT, b"n" * 32, (), 40), there, 0)


class Buffer:
    """A staging buffer that is lost when the test says so."""

    number = 5

    def refresh(self) -> None:
        pass

    def memory(self, number: int) -> object | None:
        return self if number == self.number else None


@pytest.fixture
def buffer(side: WorkerSide) -> Buffer:
    buffer = side._staging = Buffer()  # type: ignore[assignment]
    return buffer


def mixed(name: str, *, last: bool = False) -> Job:
    """Chunks 1 and 4 in the arena, 2 and 3 in the buffer."""
    blocks = ([1, 2, 3, 4],)
    chunks = [ChunkCopy(lease, 0, 64, blocks, 5 if lease in {2, 3} else 0) for lease in (1, 2, 3, 4)]
    return Job(name, 1, chunks, last)


def job(name: str, lease: int, *, epoch: int = 1, last: bool = False) -> Job:
    return Job(name, epoch, [ChunkCopy(lease, 0, 64, ([1, 2, 3, 4],))], last)


def test_a_load_counts_once_its_copies_are_done(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.load([job("a", 1), job("b", 2)])
    assert side.take_results() == (set(), set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), set(), set())
    assert bridge.confirmed == []
    copies.finished.add(2)
    assert side.take_results() == (set(), {"a", "b"}, set())
    assert bridge.confirmed == [[1, 2]]
    assert side.take_results() == (set(), set(), set())


def test_loads_need_not_wait_for_one_another(side: WorkerSide, copies: Copies) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    side.load([job("c", 3)])
    copies.finished.add(3)
    assert side.take_results() == (set(), {"c"}, set())
    copies.finished.add(2)
    assert side.take_results() == ({"b"}, set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), {"a"}, set())


def test_a_later_hook_commits_what_is_saved(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.save([job("a", 1)])
    assert bridge.committed == []
    copies.finished.add(1)
    side.save([])
    assert bridge.committed == [[1]]


def test_a_cache_process_that_went_meanwhile_fails_the_load(
    side: WorkerSide, bridge: Bridge, copies: Copies
) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    bridge.epoch = 2  # Another one is there: lease 1 may be one of its own.
    copies.finished.update((1, 2))
    assert side.take_results() == ({"b"}, {"a"}, {"a"})
    assert [1] not in bridge.confirmed
    assert [2] not in bridge.committed


def test_a_job_for_a_cache_process_that_is_gone_fails_at_once(side: WorkerSide, copies: Copies) -> None:
    side.load([job("a", 1, epoch=7)])
    assert copies.begun == []
    assert side.take_results() == (set(), {"a"}, {"a"})


def test_a_load_that_is_not_confirmed_is_logged_with_its_size(
    side: WorkerSide, bridge: Bridge, copies: Copies
) -> None:
    logged: list[str] = []
    warning: Any = lambda message, *args: logged.append(message % args)  # noqa: E731
    side._warn = warning
    side.load([job("a", 1), job("b", 2)])
    bridge.here = False
    copies.finished.add(1)
    copies.finished.add(2)
    assert side.take_results() == (set(), {"a", "b"}, {"a", "b"})
    (line,) = logged
    assert line.startswith("loading 32KiB for 2 requests (a first) failed after ")
    assert line.endswith("the cache process did not confirm its leases; their tokens are recomputed")


def test_a_device_that_fails_fails_the_load(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    copies.broken = True
    assert side.take_results() == ({"b"}, {"a"}, {"a"})
    assert [1] not in bridge.confirmed
    assert [2] not in bridge.committed


def test_the_end_commits_what_was_under_way(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.save([job("a", 1)])
    side.close()
    assert copies.closed
    assert bridge.committed == [[1]]
    assert bridge.closed


def test_each_chunk_is_copied_from_where_it_lies(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    side.load([mixed("a")])
    assert [[chunk.lease for chunk in chunks] for chunks in copies.begun] == [[1], [2, 3], [4]]
    assert copies.memories == [bridge.arena, buffer, bridge.arena]
    copies.finished.update((1, 2, 3))
    assert side.take_results() == (set(), {"a"}, set())
    assert bridge.confirmed == [[1, 2, 3, 4]]


def test_a_load_from_a_buffer_that_was_lost_fails(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    buffer.number = 6
    side.load([mixed("a"), job("b", 9)])
    copies.finished.update(range(9))
    assert side.take_results() == (set(), {"a", "b"}, {"a"})
    assert bridge.confirmed == [[9]]


def test_a_save_into_a_buffer_that_was_lost_keeps_what_goes_to_the_arena(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    buffer.number = 6
    side.save([mixed("a", last=True)])
    copies.finished.update(range(9))
    assert side.take_results() == ({"a"}, set(), set())
    assert bridge.committed == [[1, 4]]
    assert bridge.abandoned == [[2, 3]]


def test_a_device_that_fails_gives_back_what_was_staged(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    side.save([mixed("a", last=True)])
    copies.broken = True
    assert side.take_results() == ({"a"}, set(), set())
    assert bridge.committed == [[]]
    assert bridge.abandoned == [[2, 3]]
