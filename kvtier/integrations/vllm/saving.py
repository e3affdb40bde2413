"""Plan what is stored: reserve room for all chunks of a step at once, and never depend on the answer.

A reservation that is granted late is used in the step in which it arrives, as long as the request still has
the blocks; otherwise it is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvtier.bridge.bridge import Question
from kvtier.bridge.client import SchedulerBridge, Slots
from kvtier.bridge.protocol import MAX_RESERVED_CHUNKS, Run
from kvtier.integrations.vllm.changes import ChangeLog
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.request import RequestState
from kvtier.keys import ChunkKey, join_keys
from kvtier.layout import ChunkLayout
from kvtier.settings import Settings
from kvtier.units import MIB

if TYPE_CHECKING:
    from kvtier.integrations.vllm.metrics import TransferStats

MAX_BACKLOG_BYTES, MAX_BACKLOG_CHUNKS = 64 * MIB, 128
"""Limits of what one step stores of earlier steps beside its own: all of an outage would take it a second."""

Blocks = tuple[Sequence[int], ...]
"""A request's block table: the block ids of each KV-cache group."""
BlocksOf = Callable[[str], Blocks | None]
"""The block table of a request that is scheduled in this step, by its id."""


def chunk_blocks(
    layout: ChunkLayout, blocks: Blocks, index: int, tokens: int, local_tokens: int = 0
) -> tuple[list[int], ...]:
    """The blocks of chunk ``index``, a page each; those within ``local_tokens`` are left out."""
    found = []
    for group, ids in zip(layout.groups, blocks, strict=True):
        base = index * layout.chunk_tokens // group.block_tokens
        kept = local_tokens // group.block_tokens
        found.append(
            [
                ids[base + block] if kept <= base + block < len(ids) else NULL_BLOCK
                for block in group.blocks(tokens)
            ]
        )
    return tuple(found)


@dataclass(slots=True, eq=False)
class Save:
    """Consecutive chunks of one request that are to be stored."""

    state: RequestState
    first: int
    keys: list[ChunkKey]
    sizes: list[int]
    """The tokens of each chunk."""
    preemptions: int
    """How often the request had been preempted: once more, and its blocks are another's."""
    hand_over: int
    """The hand-over for which room in the staging buffer is asked for, too; 0 for none."""
    void: bool = False
    epoch: int = 0
    """The cache process that was asked for room."""
    slots: list[Slots] | None = None
    """What was granted, for each of :attr:`runs`."""

    @property
    def runs(self) -> list[Run]:
        """The room to ask for: before that in the arena, that in the staging buffer."""
        parent, keys = self.state.parent(self.first), join_keys(self.keys)
        arena = Run(parent, keys, self.sizes[-1])
        return [Run(parent, keys, self.sizes[-1], self.hand_over), arena] if self.hand_over else [arena]


class Saves:
    """The chunks that are being stored; one thread. Nothing blocks beyond the ``wait`` of :meth:`step`."""

    def __init__(
        self,
        settings: Settings,
        layout: ChunkLayout,
        bridge: SchedulerBridge,
        stats: TransferStats,
        changes: ChangeLog | None,
    ) -> None:
        self._partial_chunks = settings.partial_chunks
        self._stages = settings.hand_over.device == "cuda"
        self._layout = layout
        self.backlog = min(
            MAX_BACKLOG_CHUNKS, max(1, MAX_BACKLOG_BYTES // layout.payload_bytes(layout.chunk_tokens))
        )
        """Chunks of earlier steps that one step may store."""
        self._bridge = bridge
        self._stats = stats
        self._changes = changes
        self._planned: list[Save] = []
        """Those for which room has not been asked for."""
        self._asked: list[tuple[Question[list[Slots]], list[Save]]] = []
        self._granted: list[Save] = []
        """Those that wait for a step in which their request is scheduled."""
        self._unusable: list[int] = []
        self._held: list[RequestState] = []
        """Finished requests whose blocks vLLM keeps until they are saved."""

    # Planning.

    @property
    def possible(self) -> bool:
        """Whether room can be asked for in this step. Chunks that are not planned now can be later."""
        return self._bridge.reserves

    @property
    def room(self) -> int:
        """How many chunks can be planned besides those that are, each of which may be reserved twice."""
        return MAX_RESERVED_CHUNKS // 2 - sum(len(save.keys) for save in self._planned) - 1

    @property
    def unasked(self) -> bool:
        """Whether a finished request has chunks for which room has not been asked for."""
        return bool(self._planned)

    def due(self, state: RequestState, computed: int) -> bool:
        """Whether a request has chunks to store, with ``computed`` tokens whose KV is final."""
        whole = computed // self._layout.chunk_tokens > state.next_chunk
        return whole or self._wants_tail(state, computed)

    def _wants_tail(self, state: RequestState, computed: int) -> bool:
        prompt = state.request.num_prompt_tokens
        return (
            (self._partial_chunks or state.hand_over is not None)
            and not state.tail_saved
            and computed >= prompt
            and prompt % self._layout.chunk_tokens != 0
        )

    def plan_step(self, due: Iterable[tuple[RequestState, int, int]]) -> None:
        """Store what is due: all that this step completes, and :attr:`backlog` chunks of earlier steps.

        For each request its computed tokens, and how many of them it had before this step.
        """
        room, backlog = self.room, self.backlog
        for state, computed, since in due:
            fresh = self._fresh(state, computed, since)
            planned = self.plan(state, computed, min(fresh + backlog, room))
            room -= planned
            backlog -= max(0, planned - fresh)

    def _fresh(self, state: RequestState, computed: int, since: int) -> int:
        """How many whole chunks that are not planned end between ``since`` and ``computed`` tokens."""
        whole = self._layout.chunk_tokens
        return max(0, computed // whole - max(since // whole, state.next_chunk))

    def plan(self, state: RequestState, computed: int, limit: int) -> int:
        """Store what is :meth:`due`, up to ``limit`` chunks and a partial one; how many are planned."""
        first = state.next_chunk
        keys = state.extend(computed, first)
        if len(keys) > limit:  # The rest in the next step.
            keys, computed = keys[: max(limit, 0)], 0
        sizes = [self._layout.chunk_tokens] * len(keys)
        state.next_chunk = first + len(keys)
        if self._wants_tail(state, computed):
            state.tail_saved = True
            prompt = state.request.num_prompt_tokens
            tail = state.tail_key(prompt)
            if tail is not None and prompt // self._layout.chunk_tokens == state.next_chunk:
                keys.append(tail)
                sizes.append(prompt % self._layout.chunk_tokens)
        if keys:
            hand_over = state.hand_over or 0 if self._stages else 0
            self._planned.append(Save(state, first, keys, sizes, state.request.num_preemptions, hand_over))
        return len(keys)

    def finish(self, state: RequestState, computed: int, blocks: Blocks) -> bool:
        """A request has finished; whether vLLM must keep ``blocks`` until a worker has seen its last job."""
        if not self._bridge.responsive:
            self.drop(state)
            return False
        if self.due(state, computed):
            fresh = self._fresh(state, computed, state.settled or 0)
            self.plan(state, computed, min(fresh + self.backlog, self.room))
            left = computed // self._layout.chunk_tokens - state.next_chunk
            self._stats.add("not_stored_chunks", max(0, left))
        if not any(save.state is state and not save.void for save in self._pending()):
            return False
        state.held_blocks = blocks
        self._held.append(state)
        return True

    def drop(self, state: RequestState | None = None) -> None:
        """Store nothing of a request that is still pending; of any request with ``None``."""
        for save in self._pending():
            if state is None or save.state is state:
                save.void = True

    def _pending(self) -> list[Save]:
        asked = [save for _, saves in self._asked for save in saves]
        return [*self._planned, *asked, *self._granted]

    # A step.

    def step(self, blocks_of: BlocksOf, wait: float) -> list[Job]:
        """Ask for room for what is planned, in one message, and plan the copies for which there is room.

        Blocks up to ``wait`` seconds for the answer.
        """
        # First what is late: a chunk that is given back can be reserved for another request at once.
        jobs = self._use_answers(blocks_of)
        question = self._ask()
        if question is not None and self._bridge.await_answer(question, wait) is not None:
            jobs += self._use_answers(blocks_of)
        return jobs + self._last_jobs()

    def _use_answers(self, blocks_of: BlocksOf) -> list[Job]:
        """Plan the copies into what was granted, and give back what cannot be used."""
        self._take_answers()
        granted, self._granted = self._granted, []
        jobs = [self._job(save, blocks_of) for save in granted]
        self._bridge.abandon(self._unusable)
        self._unusable = []
        return [job for job in jobs if job is not None]

    def _ask(self) -> Question[list[Slots]] | None:
        if not self._bridge.responsive:
            self._planned = []
        saves = self._planned = [save for save in self._planned if not save.void]
        if not saves or not self.possible:
            return None
        question = self._bridge.reserve([run for save in saves for run in save.runs])
        self._planned = []
        if question is None:
            return None
        self._asked.append((question, saves))
        for save in saves:
            save.epoch = self._bridge.epoch
            if self._changes is not None:
                self._changes.remember(save.state, save.first, save.keys, save.sizes)
        return question

    def _take_answers(self) -> None:
        asked, self._asked = self._asked, []
        for question, saves in asked:
            if question.open:
                self._asked.append((question, saves))
            elif question.answer is not None:
                slots = iter(question.answer)
                for save in saves:
                    save.slots = list(islice(slots, 2 if save.hand_over else 1))
                self._granted += saves

    def _job(self, save: Save, blocks_of: BlocksOf) -> Job | None:
        """The copies into what was granted; ``None`` where there are none, or not in this step."""
        state, slots = save.state, save.slots or []
        if save.void or save.epoch != self._bridge.epoch or state.request.num_preemptions != save.preemptions:
            self._abandon(save, [slot.lease for room in slots for slot in room if slot is not None])
            return None
        blocks = state.held_blocks or blocks_of(state.request.request_id)
        if blocks is None:
            self._granted.append(save)
            return None
        pages = [
            chunk_blocks(self._layout, blocks, save.first + at, size) for at, size in enumerate(save.sizes)
        ]
        copies, unusable = [], []
        places = chain.from_iterable(zip(room, save.sizes, pages, strict=True) for room in slots)
        for slot, size, chunk in places:
            if slot is None:
                continue
            if any(NULL_BLOCK in group for group in chunk):
                # vLLM has freed blocks that left the window: the chunk is incomplete.
                unusable.append(slot.lease)
            else:
                copies.append(ChunkCopy(slot.lease, slot.offset, size, chunk, slot.staging))
        self._abandon(save, unusable)
        stored = sum(not copy.staging for copy in copies)
        self._stats.add("not_stored_chunks", len(save.keys) - stored)
        return Job(state.request.request_id, save.epoch, copies) if copies else None

    def _abandon(self, save: Save, leases: Sequence[int]) -> None:
        if save.epoch == self._bridge.epoch:  # Another process numbers its leases anew.
            self._unusable += leases

    def _last_jobs(self) -> list[Job]:
        """For each finished request of which nothing is pending a job that lets vLLM free its blocks."""
        if not self._held:
            return []
        if not self._bridge.responsive:
            for state in self._held:
                self.drop(state)
        pending = {id(save.state) for save in self._pending() if not save.void}
        done = [state for state in self._held if id(state) not in pending]
        self._held = [state for state in self._held if id(state) in pending]
        return [Job(state.request.request_id, self._bridge.epoch, [], last=True) for state in done]
