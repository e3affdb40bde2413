"""Worker side of the connector: tracking of asynchronous copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.bridge.protocol import Confirmed
from kvtier.errors import ChannelClosed
from kvtier.integrations.vllm import adapters, worker
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout
from kvtier.rpc.calls import Call, Calls

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))
CONFIRM_TIMEOUT = 3.5
"""Seconds after which an unconfirmed load fails."""


class Bridge:
    """A stand-in for a bridge that answers like a cache process, and records the calls."""

    def __init__(self) -> None:
        self.epoch = 1
        self.connecting = self.found = self.retried = False
        """``found``: whether a server is reached with the next attempt."""
        self.waited = 0.0
        self.answers = True
        self.calls = Calls()
        self.confirmations: list[Call[bool]] = []
        self.arena = object()
        self.staging = None
        self.connected = True
        self.held = True
        self.waits: list[float] = []
        self.polls: list[float] = []
        self.confirmed: list[list[int]] = []
        self.committed: list[list[int]] = []
        self.abandoned: list[list[int]] = []
        self.closed = False
        self.void: set[int] = set()
        """Reservations from before the connection."""

    def fill(self, leases: list[int]) -> list[bool]:
        return [lease not in self.void for lease in leases]

    def poll(self, wait: float = 0.0) -> None:
        self.polls.append(wait)

    def update(self) -> None:
        self.connecting |= self.found and self.retried

    def retry_now(self) -> None:
        self.retried = True

    def confirm(self, leases: list[int]) -> Call[bool] | None:
        self.confirmed.append(leases)
        call = self.calls.add("confirmations", Confirmed, lambda confirmed: confirmed.held)
        self.confirmations.append(call)
        return call if self.connected else None

    def answer(self, index: int) -> None:
        self.calls.settle(Confirmed(self.confirmations[index].ticket, self.held))

    def await_reply(self, call: Call[bool] | None, wait: float) -> bool | None:
        self.waits.append(wait)
        if call is not None and self.answers:
            self.calls.settle(Confirmed(call.ticket, self.held))
        return None if call is None else call.result

    def commit(self, leases: list[int]) -> bool:
        self.committed.append(leases)
        return self.connected

    def abandon(self, leases: list[int], epoch: int = 0) -> None:
        self.abandoned.append(leases)

    def close(self) -> None:
        self.closed = True


class Copies:
    """Copies that the test completes."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.started: list[Sequence[ChunkCopy]] = []
        self.memories: list[object] = []
        self.broken = False
        self.closed = False

    deferred = False

    def load(self, memory: object, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        self.memories.append(memory)
        self.started.append(chunks)
        return len(self.started)

    save = load

    def done(self, ticket: int) -> bool:
        if self.broken:
            raise RuntimeError("an illegal memory access")
        return ticket in self.finished

    def close(self) -> None:
        self.finished.update(range(1, len(self.started) + 1))
        self.closed = True


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def side(bridge: Bridge, copies: Copies, buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> WorkerSide:
    monkeypatch.setattr(worker, "page_copies", lambda *_: copies)
    monkeypatch.setattr(worker, "StagingBuffer", lambda _: buffer)
    any_bridge: Any = bridge
    return WorkerSide(ModelLayout(LAYOUT, b"n" * 32, (), ()), any_bridge, 0, confirm_timeout=CONFIRM_TIMEOUT)


def counts(side: WorkerSide) -> dict[str, Any]:
    """Return what a worker has counted since the last call."""
    stats = side.take_stats()
    assert stats is not None
    return stats.data


class Buffer:
    """A staging buffer that the test can lose."""

    number = 5

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def memory(self, number: int) -> object | None:
        return self if number == self.number else None


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


def mixed(name: str, *, last: bool = False) -> Job:
    """Chunks 1 and 4 in the arena, 2 and 3 in the buffer."""
    blocks = ([1, 2, 3, 4],)
    chunks = [ChunkCopy(lease, 0, 64, blocks, 5 if lease in {2, 3} else 0) for lease in (1, 2, 3, 4)]
    return Job(name, 1, chunks, last)


def job(name: str, lease: int, *, epoch: int = 1, last: bool = False) -> Job:
    return Job(name, epoch, [ChunkCopy(lease, 0, 64, ([1, 2, 3, 4],))], last)


def test_load_is_confirmed_once_its_copies_are_done(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    side.load([job("a", 9), mixed("b")])
    assert side.take_results() == (set(), set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), set(), set())
    assert bridge.confirmed == []
    copies.finished.add(2)
    assert side.take_results() == (set(), {"a", "b"}, set())
    assert bridge.confirmed == [[9, 1, 2, 3, 4]]
    assert side.take_results() == (set(), set(), set())


def test_late_confirmation_does_not_block_a_step(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    bridge.answers = False
    copies.finished.update((1, 2))
    side.load([job("a", 1)])
    assert side.take_results() == (set(), set(), set())
    side.load([job("b", 2)])
    assert side.take_results() == (set(), set(), set())
    assert bridge.confirmed == [[1], [2]], "one request per load"
    assert max(bridge.waits) <= worker.CONFIRM_WAIT_SECONDS
    bridge.answer(1)
    assert side.take_results() == (set(), {"b"}, set())
    bridge.answer(0)
    assert side.take_results() == (set(), {"a"}, set())


def test_missing_confirmation_fails_the_load(
    side: WorkerSide, bridge: Bridge, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    warnings: list[str] = []
    monkeypatch.setattr(side, "_warn", lambda message, *arguments: warnings.append(message % arguments))
    bridge.answers = False
    copies.finished.add(1)
    side.load([job("a", 1)])
    now += CONFIRM_TIMEOUT / 2
    assert side.take_results() == (set(), set(), set())
    now += CONFIRM_TIMEOUT
    assert side.take_results() == (set(), {"a"}, {"a"})
    (warning,) = warnings
    assert warning.startswith("request a: loading 64 tokens (16KiB) failed after ")
    assert warning.endswith(" s, computing them instead: no confirmation from the cache process within 3.5 s")
    bridge.answer(0)
    assert side.take_results() == (set(), set(), set())


def test_load_waits_while_its_worker_connects(
    side: WorkerSide, bridge: Bridge, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the cache process, an idle engine's scheduler finds it before its workers do."""
    now = 100.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    bridge.epoch, bridge.found = 0, True
    side.load([part("a", 1, epoch=2), job("a", 2, epoch=2)])
    assert side.take_results() == (set(), set(), set())
    assert bridge.connecting, "at once, not at the time of the next attempt"
    assert copies.started == []
    bridge.epoch, bridge.connecting, bridge.found = 2, False, False
    copies.finished.update((1, 2))
    side.load([])
    assert side.take_results() == (set(), {"a"}, set())
    assert bridge.confirmed == [[1, 2]]

    bridge.epoch, bridge.connecting = 0, True
    side.load([job("b", 3, epoch=3)])
    assert side.take_results() == (set(), set(), set())
    now += worker.RECONNECT_SECONDS
    side.load([])
    assert side.take_results() == (set(), {"b"}, {"b"}), "no longer than that"

    bridge.connecting = False
    side.load([job("c", 4, epoch=3)])
    assert side.take_results() == (set(), {"c"}, {"c"}), "nothing to wait for"


def part(name: str, lease: int, *, epoch: int = 1) -> Job:
    """Return a job that others of the same load follow."""
    return Job(name, epoch, job(name, lease).chunks, more=True)


def test_load_in_parts_is_reported_and_confirmed_once(
    side: WorkerSide, bridge: Bridge, copies: Copies
) -> None:
    """After the copies of all parts, in whatever order they end."""
    side.load([part("a", 1), part("b", 2)])
    side.load([part("a", 3), job("b", 4)])
    side.load([job("a", 5)])
    copies.finished.update((2, 3, 4))
    assert side.take_results() == (set(), set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), {"a", "b"}, set())
    assert sorted(bridge.confirmed) == [[1, 3, 5], [2, 4]]
    assert counts(side)["loaded_tokens"] == 5 * 64


def test_loaded_tokens_are_those_of_the_hit(side: WorkerSide, copies: Copies) -> None:
    """Of a chunk of 60 tokens, vLLM has the first block, and the prompt differs in the third."""
    side.load([Job("a", 1, [ChunkCopy(1, 0, 60, ([NULL_BLOCK, 2, NULL_BLOCK, NULL_BLOCK],))])])
    copies.finished.add(1)
    side.take_results()
    found = counts(side)
    assert (found["loaded_tokens"], found["loaded_bytes"]) == (16, 4096)


def test_copied_tokens_of_models_with_windows_and_states() -> None:
    window, state = GroupLayout(16, (100,), window=17), GroupLayout(16, (7,), state=True)
    layout = ChunkLayout(64, (window, state))
    assert ChunkCopy(1, 0, 60, ([1, 2], [])).copied(layout) == (60, 200)
    assert ChunkCopy(1, 0, STATE_TOKENS, ([], [1])).copied(layout) == (0, 7)


def test_failed_part_fails_its_load_only(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.load([part("a", 1, epoch=7), part("b", 2)])
    copies.finished.update((1, 2))
    assert side.take_results() == (set(), set(), set()), "more jobs follow"
    side.load([job("a", 3), job("b", 4)])
    assert side.take_results() == (set(), {"a", "b"}, {"a"})
    assert bridge.confirmed == [[2, 4]]


def test_load_that_the_scheduler_fails_is_reported_after_its_copies(side: WorkerSide, copies: Copies) -> None:
    """vLLM frees its blocks then."""
    side.load([part("a", 1)])
    side.load([Job("a", 1, [], failure="a chunk is missing")])
    assert side.take_results() == (set(), set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), {"a"}, {"a"})


@pytest.mark.parametrize("confirms", [True, False])
def test_idle_step_waits_until_results_arrive(
    side: WorkerSide, bridge: Bridge, copies: Copies, confirms: bool
) -> None:
    bridge.answers = confirms
    copies.finished.add(1)
    side.load([job("a", 1)])
    side.idle_wait()
    assert [wait for wait in bridge.polls if wait] == ([] if confirms else [worker.IDLE_WAIT_SECONDS])


@pytest.mark.parametrize("lost", [False, True])
def test_expired_leases_fail_the_load(side: WorkerSide, bridge: Bridge, copies: Copies, lost: bool) -> None:
    bridge.held = False
    bridge.answers = not lost
    copies.finished.add(1)
    side.load([job("a", 1)])
    if lost:
        bridge.calls.fail(ChannelClosed("it is gone"))
    assert side.take_results() == (set(), {"a"}, {"a"})


def test_loads_finish_independently(side: WorkerSide, copies: Copies) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    side.load([job("c", 3)])
    copies.finished.add(3)
    assert side.take_results() == (set(), {"c"}, set())
    copies.finished.add(2)
    assert side.take_results() == ({"b"}, set(), set())
    copies.finished.add(1)
    assert side.take_results() == (set(), {"a"}, set())


def test_later_hook_commits_finished_saves(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.save([job("a", 1)])
    assert bridge.committed == []
    copies.finished.add(1)
    side.save([])
    assert bridge.committed == [[1]]


def test_ranks_write_in_turn_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is copied by one of them, and committed by both: it is READY once nobody writes to it."""
    shared = ChunkLayout(64, (GroupLayout(16, (4096,), shards=(0, 0)),), ranks=2)
    for rank, own in ((0, [2, 4]), (1, [1, 3])):
        bridge, copies = Bridge(), Copies()
        monkeypatch.setattr(worker, "page_copies", lambda *_, copies=copies: copies)
        any_bridge: Any = bridge
        side = WorkerSide(ModelLayout(shared, b"n" * 32, (), ()), any_bridge, rank)
        side.save([job(f"request {lease}", lease) for lease in (1, 2, 3, 4)])
        assert [chunk.lease for chunk in copies.started[0]] == own
        copies.finished.add(1)
        side.save([])
        assert bridge.committed == [[1, 2, 3, 4]]
        assert counts(side)["stored_bytes"] == 2 * shared.rank_bytes(64)


def test_sleep_and_wake(side: WorkerSide, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV memory is unmapped meanwhile: no copy may use its address, and all of them have ended."""
    registered: list[object] = []
    monkeypatch.setattr(worker, "page_views", lambda _model, caches: [[caches]])
    monkeypatch.setattr(worker, "page_copies", lambda *place: (registered.append(place[2]), copies)[1])
    caches: Any = {"layer": "tensor"}
    side.restore()
    assert registered == [], "nothing was registered yet"
    side.register(caches)
    side.save([job("a", 1)])
    side.unregister()
    assert copies.closed
    side.restore()
    side.restore()
    assert registered == [[[caches]], [], [[caches]], [[caches]]]


def test_replaced_cache_process_fails_the_load(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    bridge.epoch = 2  # Another process: lease 1 may be one of its own.
    copies.finished.update((1, 2))
    assert side.take_results() == ({"b"}, {"a"}, {"a"})
    assert [1] not in bridge.confirmed
    assert [2] not in bridge.committed


def test_job_of_previous_cache_process_fails_immediately(side: WorkerSide, copies: Copies) -> None:
    side.load([job("a", 1, epoch=7)])
    assert copies.started == []
    assert side.take_results() == (set(), {"a"}, {"a"})


def test_save_of_another_epoch_is_abandoned(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.save([job("a", 1, epoch=7), job("b", 2, last=True)])
    copies.finished.add(1)
    assert side.take_results() == ({"b"}, set(), set())
    assert bridge.abandoned == [[1]]
    assert bridge.committed == [[2]]


def test_reservation_from_before_the_connection_is_not_written(
    side: WorkerSide, bridge: Bridge, copies: Copies
) -> None:
    """Its memory may be that of another engine now."""
    bridge.void = {1}
    side.save([job("a", 1), job("b", 2, last=True)])
    assert [[chunk.lease for chunk in chunks] for chunks in copies.started] == [[2]]
    copies.finished.add(1)
    assert side.take_results() == ({"b"}, set(), set())
    assert bridge.committed == [[2]]


def test_save_of_an_adapter_that_is_not_loaded_is_abandoned(
    side: WorkerSide, bridge: Bridge, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_loaded", {1: "new"})
    jobs = [job(name, lease, last=True) for name, lease in (("a", 1), ("b", 2), ("c", 3), ("d", 4))]
    for saved, adapter in zip(jobs, [None, (1, "new"), (1, "old"), (2, "new")], strict=True):
        saved.adapter = adapter
    side.save(jobs)
    copies.finished.add(1)
    assert side.take_results() == ({"a", "b", "c", "d"}, set(), set())
    assert bridge.abandoned == [[3], [4]]
    assert bridge.committed == [[1, 2]]


def test_device_error_fails_the_load(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.load([job("a", 1)])
    side.save([job("b", 2, last=True)])
    copies.broken = True
    assert side.take_results() == ({"b"}, {"a"}, {"a"})
    assert [1] not in bridge.confirmed
    assert [2] not in bridge.committed


def test_close_commits_saves_in_flight(side: WorkerSide, bridge: Bridge, copies: Copies) -> None:
    side.save([job("a", 1)])
    side.close()
    assert copies.closed
    assert bridge.committed == [[1]]
    assert bridge.closed


def test_chunks_are_copied_from_their_memory(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    side.load([mixed("a"), job("b", 9)])
    assert [[chunk.lease for chunk in chunks] for chunks in copies.started] == [[1, 4, 9], [2, 3]]
    assert copies.memories == [bridge.arena, buffer], "one copy per memory"
    copies.finished.update((1, 2))
    assert side.take_results() == (set(), {"a", "b"}, set())
    assert bridge.confirmed == [[1, 2, 3, 4, 9]]


def test_load_from_lost_buffer_fails(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    buffer.number = 6
    side.load([mixed("a"), job("b", 9)])
    copies.finished.update(range(9))
    assert side.take_results() == (set(), {"a", "b"}, {"a"})
    assert bridge.confirmed == [[9]]


def test_save_to_lost_buffer_commits_the_arena_part(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    buffer.number = 6
    side.save([mixed("a", last=True)])
    copies.finished.update(range(9))
    assert side.take_results() == ({"a"}, set(), set())
    assert bridge.committed == [[1, 4]]
    assert bridge.abandoned == [[2, 3]]


def test_device_error_abandons_all_reservations(
    side: WorkerSide, bridge: Bridge, copies: Copies, buffer: Buffer
) -> None:
    side.save([mixed("a", last=True)])
    copies.broken = True
    assert side.take_results() == ({"a"}, set(), set())
    assert bridge.committed == [[]]
    assert sorted(bridge.abandoned[0]) == [1, 2, 3, 4]


def test_worker_without_loads_and_saves_looks_at_its_connection_now_and_then(
    side: WorkerSide, bridge: Bridge, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look costs a system call, in every step of an engine that decodes."""
    updates: list[None] = []
    monkeypatch.setattr(bridge, "update", lambda: updates.append(None))
    monkeypatch.setattr(worker, "UPDATE_SECONDS", float("inf"))
    copies.finished.update((1, 2))
    side.load([job("load", 1)])
    side.take_results()
    looked = len(updates)
    for _ in range(3):
        side.load([])
    assert len(updates) == looked
    side.load([job("load", 2)])
    assert len(updates) == looked + 1
    side.take_results()
    monkeypatch.setattr(worker, "UPDATE_SECONDS", 0.0)
    side.load([])
    assert len(updates) == looked + 2
