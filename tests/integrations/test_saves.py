"""Room in advance, for states and with windows: used in one step, or given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import Settings
from kvtier.bridge.protocol import Reserved
from kvtier.integrations.vllm.copies import NULL_BLOCK
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import written_blocks
from kvtier.integrations.vllm.request import RequestState, SaveProgress
from kvtier.integrations.vllm.saves import Saves
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.stepping import make_request

LAYOUT = ChunkLayout(16, (GroupLayout(16, (64,), state=True), GroupLayout(16, (64,))))
KV = ChunkLayout(16, (GroupLayout(16, (64,)),))
WINDOW = ChunkLayout(16, (GroupLayout(16, (64,), window=16),))
BLOCKS: Any = ([7], [])


class Bridge:
    """A stand-in for a cache process that answers a reservation when it is told to."""

    def __init__(self) -> None:
        self.epoch, self.responsive, self.reserves = 1, True, True
        self.last_epoch = 1
        self.connections = 1
        self.calls: list[Any] = []
        self.answers = False
        self.abandoned: list[int] = []
        self.waits: list[float] = []

    def reserve(self, runs: Any) -> Any:
        self.calls.append(SimpleNamespace(settled=False, result=None, runs=runs))
        return self.calls[-1]

    def answer(self) -> None:
        for number, call in enumerate(self.calls, 1):
            if not call.settled:
                call.settled = True
                chunks = sum(len(run.keys) for run in call.runs) // KEY_BYTES
                call.result = Reserved(number, [number] * chunks, [4096] * chunks)

    def await_reply(self, call: Any, wait: float) -> Any:
        self.waits.append(wait)
        if self.answers:
            self.answer()
        return None if call is None else call.result

    def abandon(self, leases: list[int]) -> None:
        self.abandoned += leases


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


def saves_of(
    bridge: Any, layout: ChunkLayout, counted: dict[str, float] | None = None, **options: Any
) -> Saves:
    """Return the saves of an engine; what they count is in ``counted``."""
    stats: Any = SimpleNamespace(add=({} if counted is None else counted).__setitem__)
    return Saves(Settings(), layout, bridge, stats, **options)


@pytest.fixture
def saves(bridge: Bridge) -> Saves:
    return saves_of(bridge, LAYOUT)


def requests(count: int) -> list[RequestState]:
    """Return requests whose prompt of three chunks is computed."""
    states = []
    for number in range(count):
        request = make_request(48, request_id=str(number), num_computed_tokens=48)
        keys = [ChunkKey(bytes([number, at]) * 16) for at in range(3)]
        saving = SaveProgress(computed=48)
        states.append(RequestState(request, ChunkKey(bytes(32)), 16, keys=keys, saving=saving))
    return states


@pytest.fixture
def state() -> RequestState:
    (state,) = requests(1)
    return state


def step(saves: Saves) -> list[list[int]]:
    """Take a step. Return the leases of its copies, by job."""
    return [job.leases for job in saves.step(lambda _: None, 0.0)]


def test_state_is_saved_in_the_step_that_leaves_it(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    bridge.answers = True
    saves.plan_state(state, 2, BLOCKS)
    assert step(saves) == [[1]]
    assert bridge.abandoned == []


def test_late_room_is_not_used_in_a_later_step(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    """The blocks may hold another state by then: that of other tokens, under this key."""
    saves.plan_state(state, 2, BLOCKS)
    assert step(saves) == []
    bridge.answer()
    assert step(saves) == []
    assert bridge.abandoned == [1]


def test_room_in_advance_waits_for_its_state(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    """So that an answer may be late by some steps."""
    saves.expect_state(state, 2)
    assert step(saves) == []
    bridge.answer()
    assert step(saves) == []
    saves.plan_state(state, 2, BLOCKS)
    assert step(saves) == [[1]]
    assert len(bridge.calls) == 1
    assert bridge.abandoned == []


def test_room_of_before_a_reconnect_is_given_back(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    """The cache process has let others store the chunks when the connection was lost."""
    saves.expect_state(state, 2)
    assert step(saves) == []
    bridge.answer()
    bridge.connections += 1
    saves.plan_state(state, 2, BLOCKS)
    assert step(saves) == []
    assert bridge.abandoned == [1]


def test_room_is_given_back_while_no_connection_is_open(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    """Once there is one again. No other call would free it."""
    saves.expect_state(state, 2)
    assert step(saves) == []
    bridge.answer()
    bridge.epoch = 0
    assert step(saves) == []
    assert bridge.abandoned == [1]


def test_room_of_before_a_preemption_is_not_used(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    bridge.answers = True
    saves.expect_state(state, 2)
    assert step(saves) == []
    state.request.num_preemptions += 1
    saves.plan_state(state, 2, BLOCKS)
    assert step(saves) == [[2]]
    assert bridge.abandoned == [1]


@pytest.mark.parametrize("end", ["finish", "drop"])
def test_unused_room_is_given_back_at_once(
    saves: Saves, bridge: Bridge, state: RequestState, end: str
) -> None:
    """Without a further step, which an idle engine does not take."""
    saves.expect_state(state, 2)
    assert step(saves) == []
    bridge.answer()
    assert step(saves) == []
    if end == "finish":
        state.saving.next_chunk = 3
        assert not saves.finish(state, 48, ([1, 2, 3], [1, 2, 3]))
    else:
        saves.drop(state)
    assert bridge.abandoned == [1]
    assert saves.expected_states == 0


@pytest.mark.parametrize("lost", ["answer", "request"])
def test_room_that_was_never_granted_is_forgotten_with_its_request(
    saves: Saves, bridge: Bridge, state: RequestState, lost: str
) -> None:
    """Otherwise few more states would be expected, and the request would be kept for ever."""
    saves.expect_state(state, 2)
    bridge.responsive = lost == "answer"
    assert step(saves) == []
    for call in bridge.calls:
        call.settled = True
    assert step(saves) == []
    saves.drop(state)
    assert saves.expected_states == 0


def test_finished_request_is_kept_until_useless_room_is_given_back(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    """An idle engine takes no step otherwise."""
    state.saving.next_chunk = 3
    saves.plan_state(state, 3, BLOCKS)
    assert step(saves) == []
    assert saves.finish(state, 48, ([1, 2, 3], [1, 2, 3]))
    assert step(saves) == []
    bridge.answer()
    [last] = saves.step(lambda _: None, 0.0)
    assert (last.last, last.leases) == (True, [])
    assert bridge.abandoned == [1]


def test_state_is_no_block_for_routers(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    added: list[Any] = []
    events: Any = SimpleNamespace(add=lambda *arguments: added.append(arguments))
    saves.events = events
    saves.plan_state(state, 2, BLOCKS)
    step(saves)
    assert len(bridge.calls) == 1
    assert added == []


@pytest.mark.parametrize(("window", "kv_transfer"), [(0, None), (32, None), (0, 5)])
def test_step_waits_only_for_room_that_is_useless_later(
    bridge: Bridge, state: RequestState, window: int, kv_transfer: int | None
) -> None:
    """If vLLM may free its blocks before the next step, or a peer waits for the chunk."""
    saves = saves_of(bridge, ChunkLayout(16, (GroupLayout(16, (64,), window=window),)))
    state.transfer.ticket = kv_transfer
    assert saves.plan(state, 48, 3) == 3
    saves.step(lambda _: None, 0.5)
    assert bridge.waits == ([0.5] if window or kv_transfer else [])
    assert [run.awaited for run in bridge.calls[0].runs] == [kv_transfer is not None], "or it may be declined"


def test_step_waits_for_the_room_of_a_state(saves: Saves, bridge: Bridge, state: RequestState) -> None:
    saves.expect_state(state, 3)
    saves.step(lambda _: None, 0.5)
    assert bridge.waits == [], "it was requested in advance"
    saves.plan_state(state, 2, BLOCKS)
    bridge.answer()
    saves.step(lambda _: None, 0.5)
    assert bridge.waits == [0.5]


def test_step_waits_for_room_that_was_requested_before_it(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    """The answer comes in the step that leaves the state."""
    saves.expect_state(state, 2)
    saves.request()
    saves.plan_state(state, 2, BLOCKS)
    bridge.answers = True
    [job] = saves.step(lambda _: None, 0.5)
    assert job.leases == [1]
    assert (bridge.waits, bridge.abandoned) == ([0.5], [])


def test_blocks_are_kept_while_workers_may_be_copying(bridge: Bridge, state: RequestState) -> None:
    saves = saves_of(bridge, KV, blocks=100, deferred=True)
    bridge.answers = True
    assert saves.plan(state, 48, 3) == 3
    saves.step(lambda _: ([1, 2, 3],), 0.5)
    bridge.answer()
    assert [job.leases for job in saves.step(lambda _: ([1, 2, 3],), 0.5)] == [[1, 1, 1]]
    assert saves.finish(state, 48, ([1, 2, 3],)), "nothing is left to save, but its copies may be in flight"
    [last] = saves.step(lambda _: None, 0.5)
    assert last.last


def test_blocks_are_not_kept_on_the_host(bridge: Bridge, state: RequestState) -> None:
    """Copies are complete when their step ends."""
    saves = saves_of(bridge, KV, blocks=100)
    saves.plan(state, 48, 3)
    saves.step(lambda _: ([1, 2, 3],), 0.5)
    bridge.answer()
    assert len(saves.step(lambda _: ([1, 2, 3],), 0.5)) == 1
    assert not saves.finish(state, 48, ([1, 2, 3],))


def test_finished_requests_keep_a_limited_number_of_blocks(bridge: Bridge) -> None:
    counted: dict[str, float] = {}
    saves = saves_of(bridge, KV, counted, blocks=12, deferred=True)
    first, second, third, fourth = requests(4)
    for state in (first, second):
        assert saves.finish(state, 48, ([1, 2, 3, NULL_BLOCK],))
    assert not saves.finish(third, 48, ([7, 8, 9],)), "half of the blocks are kept"
    assert counted["not_stored_chunks"] == 3
    saves.freed(["0"])
    assert saves.finish(fourth, 48, ([10, 11, 12],))


def test_one_request_may_keep_more_than_that(bridge: Bridge, state: RequestState) -> None:
    saves = saves_of(bridge, KV, blocks=4, deferred=True)
    assert saves.finish(state, 48, ([1, 2, 3],))


def test_step_may_write_what_is_new_to_its_requests() -> None:
    layout = ChunkLayout(32, (GroupLayout(16, (64,)), GroupLayout(32, (64,), state=True)))
    model = ModelLayout(layout, bytes(32), (), (0, 2))
    tables = ([1, 2, 3], [4, 5], [6, 7])
    new = SimpleNamespace(block_ids=tables, num_computed_tokens=33)
    running: Any = ([8], [], [9])
    cached = SimpleNamespace(
        req_ids=["running", "resumed", "nothing new"],
        resumed_req_ids={"resumed"},
        new_block_ids=[running, ([11, 12], [13], [14]), None],
        num_computed_tokens=[64, 16, 5],
    )
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        new_block_ids_to_zero=[20],
        kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=21)],
    )
    # All but the blocks of full attention with computed tokens only: 1 and 2, and 11.
    assert sorted(written_blocks(output, model)) == [3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 20, 21]


def test_step_waits_once_for_room_in_advance_that_is_late(bridge: Bridge, state: RequestState) -> None:
    """In the step that computes the chunk: before it, the answer is no use yet, and after it too late."""
    saves = saves_of(bridge, WINDOW)
    saves.expect_chunks(state, 0, 1)
    saves.step(lambda _: None, 0.5)
    assert bridge.waits == []
    assert saves.plan(state, 16, 1) == 1
    saves.step(lambda _: None, 0.5)
    saves.step(lambda _: None, 0.5)
    assert bridge.waits == [0.5]
    assert len(bridge.calls) == 1


def test_chunks_with_late_room_are_saved_once_it_is_granted_in_their_step(
    bridge: Bridge, state: RequestState
) -> None:
    """While that request is pending, no other can be sent."""
    saves = saves_of(bridge, WINDOW)
    saves.expect_chunks(state, 0, 1)
    saves.expect_chunks(state, 1, 2)
    saves.step(lambda _: None, 0.5)
    bridge.reserves, bridge.answers = False, True
    state.request.num_computed_tokens = 0
    saves.plan_step([(state, 48)])
    assert state.saving.next_chunk == 2, "the third is planned later"
    [job] = saves.step(lambda _: ([1, 2, 3],), 0.5)
    assert job.leases == [1, 1]


def compute(saves: Saves, state: RequestState, before: int) -> list[list[int]]:
    """Take a step that computes a chunk after ``before`` tokens. Return the leases of its copies, by job."""
    state.request.num_computed_tokens = before
    saves.plan_step([(state, 16)])
    return [job.leases for job in saves.step(lambda _: ([0], [1, 2, 3, 4]), 0.0)]


@pytest.mark.parametrize("answered", ["before", "after"])
def test_chunks_before_a_state_are_saved_at_once(
    saves: Saves, bridge: Bridge, state: RequestState, answered: str
) -> None:
    """With one message for all of them, and in the step that completes the last if there is room by then."""
    saves.expect_chunks(state, 0, 3)
    assert step(saves) == []
    if answered == "before":
        bridge.answer()
    assert [compute(saves, state, before) for before in (0, 16)] == [[], []]
    assert compute(saves, state, 32) == ([[1, 1, 1]] if answered == "before" else [])
    bridge.answer()
    assert compute(saves, state, 48) == ([] if answered == "before" else [[1, 1, 1]])
    assert [len(run.keys) // KEY_BYTES for call in bridge.calls for run in call.runs] == [3]
    assert bridge.abandoned == []
    assert bridge.waits == [], "their blocks are kept"


def test_chunks_before_a_state_are_planned_again_after_a_preemption(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    saves.expect_chunks(state, 0, 3)
    assert step(saves) == []
    bridge.answer()
    assert [compute(saves, state, before) for before in (0, 16)] == [[], []]
    state.request.num_preemptions += 1
    assert compute(saves, state, 0) == []
    assert bridge.abandoned == [1, 1, 1]
    bridge.answer()
    assert compute(saves, state, 16) == [[2]]
    assert state.saving.next_chunk == 2


def test_chunks_before_a_state_are_planned_again_after_a_reconnect(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    """Their room is lost in the step that completes the last of them. Their blocks are not."""
    saves.expect_chunks(state, 0, 3)
    assert step(saves) == []
    bridge.answer()
    assert [compute(saves, state, before) for before in (0, 16)] == [[], []]
    bridge.connections += 1
    assert compute(saves, state, 32) == []
    assert bridge.abandoned == [1, 1, 1]
    compute(saves, state, 48)
    bridge.answer()
    assert step(saves) == [[2, 2, 2]] or compute(saves, state, 48) == [[2, 2, 2]]


def test_limit_of_a_step_does_not_divide_chunks_with_room(bridge: Bridge) -> None:
    """Or what is left of them would be reserved again."""
    saves = saves_of(bridge, LAYOUT)
    first, second = requests(2)
    saves.backlog = 2
    for state in (first, second):
        saves.expect_chunks(state, 0, 3)
    assert step(saves) == []
    bridge.answer()
    for state in (first, second):
        state.request.num_computed_tokens = 32
    saves.plan_step([(first, 16), (second, 16)])
    assert [state.saving.next_chunk for state in (first, second)] == [3, 3]
    jobs = saves.step(lambda _: ([0], [1, 2, 3]), 0.0)
    assert [len(job.leases) for job in jobs] == [3, 3]
    assert len(bridge.calls) == 1


def test_only_room_for_what_is_there_soon_is_awaited(
    saves: Saves, bridge: Bridge, state: RequestState
) -> None:
    """A queued prompt of many steps begins without the answer."""
    saves.expect_state(state, 2)
    saves.expect_chunks(state, 0, 3)
    assert step(saves) == []
    assert not saves.awaits_room(state, 31, 0.5)
    assert bridge.waits == []
    assert saves.awaits_room(state, 32, 0.5)
    bridge.answers = True
    assert not saves.awaits_room(state, 32, 0.5)
    assert bridge.waits == [0.5, 0.5]
