"""Plan which chunks to store: reserve room for all chunks of a step in one request, without relying on it.

A reservation is used in the step in which its answer arrives if the request still has the blocks; otherwise
it is abandoned. That is usually the next step: waiting for it would take up to 2 ms of each step in which the
threads of a model on a CPU leave none to the cache process.

At the end of an answer, the chunks of its prompt are offered again if the cache process asks for that: from
then on it may come back, so the eviction policy may want what it has declined or evicted before. vLLM keeps
the blocks until that is answered and what has room is copied, :attr:`Saves.backlog` at most in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import TYPE_CHECKING

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import MAX_RESERVED_CHUNKS, Reserved, Run
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.request import Hit, RequestState
from kvtier.memory.keys import ChunkKey, join_keys, state_key
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout
from kvtier.pipeline.verify import Recomputation
from kvtier.rpc.calls import Call
from kvtier.settings import Settings
from kvtier.units import MIB

if TYPE_CHECKING:
    from kvtier.integrations.vllm.kv_events import KVEvents
    from kvtier.integrations.vllm.metrics import TransferStats

MAX_KEPT_SHARE = 2
"""Finished requests keep at most one in :data:`MAX_KEPT_SHARE` of the blocks, unless one alone has more."""
MAX_BACKLOG_BYTES, MAX_BACKLOG_CHUNKS = 64 * MIB, 128
"""Limits of what one step stores of earlier steps: the backlog of an outage would block it for 1 s."""
GATHERED_BYTES = 4 * MIB
"""Limit of what one step stores of chunks that are of no use before a later one leaves their state."""

Blocks = tuple[Sequence[int], ...]
"""A request's block table: the block ids of each KV-cache group."""
BlocksOf = Callable[[str], Blocks | None]
"""Returns the block table of a request by its id; ``None`` unless it is scheduled in this step."""


def chunk_blocks(
    layout: ChunkLayout, blocks: Blocks, index: int, tokens: int, local_tokens: int = 0
) -> tuple[list[int], ...]:
    """Return the blocks of chunk ``index``, one per page; :data:`NULL_BLOCK` within ``local_tokens``."""
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


def state_blocks(layout: ChunkLayout, blocks: Blocks, tokens: int) -> tuple[list[int], ...]:
    """Return the block of each group that holds the state after ``tokens`` tokens; none of other groups."""
    return tuple(
        [ids[-(-tokens // group.block_tokens) - 1]] if group.state else []
        for group, ids in zip(layout.groups, blocks, strict=True)
    )


@dataclass(slots=True, eq=False)
class Save:
    """Consecutive chunks of one request to store, or one state."""

    state: RequestState
    first: int
    keys: list[ChunkKey]
    sizes: list[int]
    """Number of tokens of each chunk."""
    preemptions: int
    """The request's preemption count: after a further preemption it has lost its blocks."""
    kv_transfer: int
    """Ticket of the KV transfer for which to reserve room in the staging buffer as well; 0 for none."""
    is_state: bool = False
    state_blocks: tuple[list[int], ...] | None = None
    """The blocks of a state, in the one step in which they are valid."""
    in_advance: bool = False
    """Whether room is reserved in advance: what to store does not exist yet."""
    fresh: bool = True
    """Whether what to store exists since this step, if it is not :attr:`in_advance`."""
    extends: bytes = b""
    """For a state: the last chunk of the hit that it extends."""
    offered_again: bool = False
    """Whether chunks are offered again that may be held, at the end of an answer."""
    cancelled: bool = False
    epoch: int = 0
    """The cache process that the reservation was requested from."""
    connection: int = 0
    """Over which of the connections: reservations are cancelled when it is lost."""
    leases: Sequence[int] = ()
    """The reservation of each chunk, 0 without room: in the staging buffer, if any, then in the arena."""
    offsets: Sequence[int] = ()
    """Where the room begins, for each of :attr:`leases`."""
    staging: int = 0
    """The staging buffer of the first half of :attr:`leases`, with a :attr:`kv_transfer`."""

    @property
    def stop(self) -> int:
        """The number of chunks after which it exists."""
        return self.first if self.is_state else self.first + len(self.keys)

    @property
    def runs(self) -> list[Run]:
        """The room to reserve: in the staging buffer, if any, then in the arena."""
        state, start = self.state, self.first * self.state.chunk_tokens
        parent, keys, dtype = state.parent(self.first), join_keys(self.keys), state.verify.dtype
        arena = Run(
            parent,
            keys,
            self.sizes[-1],
            hints=state.chunk_hints,
            block_hashes=state.block_hashes(start, start + sum(self.sizes)),
            extends=self.extends,
            awaited=state.transfer.ticket is not None,
            recomputes=Recomputation(state.request.request_id, start, dtype) if dtype else None,
            canary=state.hints.canary is not None,
            offered_again=self.offered_again,
        )
        return [Run(parent, keys, self.sizes[-1], self.kv_transfer), arena] if self.kv_transfer else [arena]

    def part(self, start: int, stop: int) -> Save:
        """Return some of the chunks, which have been answered for."""
        part = replace(self, first=self.first + start)
        part.keys, part.sizes = self.keys[start:stop], self.sizes[start:stop]
        part.leases, part.offsets = self.leases[start:stop], self.offsets[start:stop]
        return part


class Saves:
    """The chunks being stored. Not thread-safe. Only :meth:`step` blocks, for up to its ``wait``."""

    def __init__(
        self,
        settings: Settings,
        layout: ChunkLayout,
        bridge: SchedulerBridge,
        stats: TransferStats,
        *,
        blocks: int = 0,
        deferred: bool = False,
    ) -> None:
        """``blocks``: number of the engine's blocks. ``deferred``: see :class:`SchedulerSide`."""
        self._deferred = deferred
        self._max_kept = blocks // MAX_KEPT_SHARE
        self._tails = not layout.has_states
        self._loses_blocks = layout.has_windows
        """Whether vLLM frees blocks of a running request: those outside its attention window."""
        self._partial_chunks = settings.partial_chunks
        self._save_decode = settings.save_decode
        self._stages = settings.kv_transfer.device == "cuda"
        self._wanted_again = False
        """Whether the cache process wants them to offer these chunks again."""
        self._again_left = 0
        """How many chunks that are stored again this step may still copy."""
        self._layout = layout
        self.backlog = min(
            MAX_BACKLOG_CHUNKS, max(1, MAX_BACKLOG_BYTES // layout.payload_bytes(layout.chunk_tokens))
        )
        """Maximum number of chunks of earlier steps that one step stores."""
        self.gathered = min(self.backlog, GATHERED_BYTES // layout.payload_bytes(layout.chunk_tokens))
        """Number of chunks before a state that are stored at once, though several steps compute them."""
        self._bridge = bridge
        self._stats = stats
        self.events: KVEvents | None = None
        """Publishes the chunks that are stored, if vLLM publishes KV events."""
        self._planned: list[Save] = []
        """Saves without a reservation request."""
        self._requested: list[tuple[Call[Reserved], list[Save]]] = []
        """Saves with a pending reservation request."""
        self._granted: list[Save] = []
        """Saves that wait for a step in which their request is scheduled."""
        self._unusable: list[int] = []
        """Reservations to abandon."""
        self._expected: dict[tuple[str, int, bool], Save] = {}
        """What room is reserved for in advance, by request id, number of chunks before, and ``is_state``."""
        self._held: list[RequestState] = []
        """Finished requests whose blocks vLLM keeps until they are saved."""
        self._kept: dict[str, int] = {}
        """The number of blocks that vLLM keeps of each finished request."""

    # Planning.

    @property
    def possible(self) -> bool:
        """Whether room can be reserved in this step. Chunks that are not planned now can be planned later."""
        return self._bridge.reserves

    @property
    def room(self) -> int:
        """Number of further chunks that can be planned. Each chunk may need two reservations."""
        # Less one, because `plan` may add a partial chunk beyond its limit.
        return MAX_RESERVED_CHUNKS // 2 - sum(len(save.keys) for save in self._planned) - 1

    @property
    def expected_states(self) -> int:
        """Number of states to come for which room has been planned or reserved."""
        return sum(save.is_state for save in self._expected.values())

    @property
    def expected_chunks(self) -> int:
        """Number of chunks to come for which room has been planned or reserved."""
        return sum(len(save.keys) for save in self._expected.values() if not save.is_state)

    @property
    def unreserved(self) -> bool:
        """Whether a finished request has chunks for which no reservation has been requested."""
        return bool(self._planned)

    def due(self, state: RequestState, computed: int) -> bool:
        """Return whether a request with ``computed`` tokens of final KV has chunks to store."""
        whole = computed // self._layout.chunk_tokens > state.saving.next_chunk
        return whole or self._prompt_tail(state, computed) > 0

    def _prompt_tail(self, state: RequestState, computed: int) -> int:
        """Return the tokens up to the end of a partial chunk of the prompt to store; 0 for none."""
        prompt = int(state.request.num_prompt_tokens)
        if computed < prompt or not self._tails:
            return 0
        if state.transfer.ticket is None:
            # What is held lacks less than a block: not worth a second chunk.
            whole = self._layout.stored_tokens(prompt)
            held = self._last_chunk_end(prompt) < whole <= state.saving.tail_end
            return 0 if held else self._longer_tail(state, state.stored_prompt(self._layout))
        # The decode instance needs all of it, even if a chunk that is held begins like it.
        planned = state.saving.tail_planned and state.saving.tail_end >= prompt
        return prompt if prompt % self._layout.chunk_tokens and not planned else 0

    def _answer_tail(self, state: RequestState, computed: int) -> int:
        """Return the tokens up to the end of a partial chunk of the answer to store; 0 for none."""
        return self._longer_tail(state, self._last_block_end(computed)) if self._tails else 0

    def _longer_tail(self, state: RequestState, end: int) -> int:
        """Return ``end`` if a partial chunk ends there, beyond what is held; else 0."""
        held = max(state.saving.tail_end, self._last_chunk_end(end))
        return end if self._partial_chunks and end > held else 0

    def _last_block_end(self, tokens: int) -> int:
        return tokens - tokens % self._layout.granularity

    def _last_chunk_end(self, tokens: int) -> int:
        return tokens - tokens % self._layout.chunk_tokens

    def plan_step(self, running: Iterable[tuple[RequestState, int]]) -> None:
        """Plan all chunks that this step completes, and up to :attr:`backlog` chunks of earlier steps.

        While no room can be reserved, only those for which it was requested in advance. ``running``: requests
        of the step that may store, and how many tokens it computes of each.
        """
        room, backlog, possible = self.room, self.backlog, self.possible
        for state, scheduled in running:
            progress = state.saving
            before, progress.settled = progress.settled, state.request.num_computed_tokens
            computed = state.final_tokens(progress.settled + scheduled, answer=self._save_decode)
            progress.computed = computed
            if not (possible or self._expected):
                continue
            if not self.due(state, computed) or self._gathers(state, computed):
                continue
            # With a lookahead, a chunk at the end of a step becomes due one step later.
            since = before if state.lookahead and before is not None else progress.settled
            fresh = self._fresh(state, computed, since)
            limit = min(fresh + backlog, room) if possible else self._expected_next(state)
            planned = self.plan(state, computed, limit) if limit or possible else 0
            room -= planned
            backlog -= max(0, planned - fresh)

    def _gathers(self, state: RequestState, computed: int) -> bool:
        """Return whether the next chunks are to be stored at once, and the last of them is not complete."""
        save = self._find_expected(state, state.saving.next_chunk)
        return save is not None and computed // self._layout.chunk_tokens < save.stop

    def _expected_next(self, state: RequestState) -> int:
        """Return for how many consecutive unplanned chunks room was requested in advance."""
        stop = state.saving.next_chunk
        while (save := self._find_expected(state, stop)) is not None:
            stop = save.stop
        return stop - state.saving.next_chunk

    def _fresh(self, state: RequestState, computed: int, since: int) -> int:
        """Return the number of unplanned whole chunks that end between ``since`` and ``computed`` tokens."""
        whole = self._layout.chunk_tokens
        return max(0, computed // whole - max(since // whole, state.saving.next_chunk))

    def plan(self, state: RequestState, computed: int, limit: int, *, finished: bool = False) -> int:
        """Plan the chunks that are :meth:`due`, up to ``limit`` and a partial one; return their number.

        With ``finished``, the partial chunk goes on to the end of the answer, unless a decode instance waits
        for that of the prompt.
        """
        first = state.saving.next_chunk
        keys = state.extend(computed, first)
        if len(keys) > limit:  # The rest in the next step.
            keys, computed = keys[: max(limit, 0)], 0
        sizes = [self._layout.chunk_tokens] * len(keys)
        state.saving.next_chunk = first + len(keys)
        end = self._prompt_tail(state, computed)
        if finished and (not end or state.transfer.ticket is None):
            end = self._answer_tail(state, computed) or end
        if end:
            state.saving.tail_end, state.saving.tail_planned = end, True
            tail = state.tail_key(end)
            # Only after all whole chunks before it: without them it is never hit.
            if tail is not None and end // self._layout.chunk_tokens == state.saving.next_chunk:
                keys.append(tail)
                sizes.append(end % self._layout.chunk_tokens)
        last: Save | None = None
        gathered = first
        for chunk, (key, size) in enumerate(zip(keys, sizes, strict=True), first):
            if chunk < gathered:
                continue
            if size == self._layout.chunk_tokens and (save := self._take_expected(state, chunk)) is not None:
                last, gathered = None, save.stop
            elif last is None:
                last = self._new_save(state, chunk, key, size)
            else:
                last.keys.append(key)
                last.sizes.append(size)
        state.saving.next_chunk = max(state.saving.next_chunk, gathered)  # Beyond the limit, all or none.
        return len(keys)

    def _new_save(self, state: RequestState, first: int, key: ChunkKey, tokens: int) -> Save:
        kv_transfer = state.transfer.ticket or 0 if self._stages else 0
        save = Save(state, first, [key], [tokens], state.request.num_preemptions, kv_transfer)
        self._planned.append(save)
        return save

    def expect_state(self, state: RequestState, chunks: int) -> None:
        """Reserve room for the state at the end of a chunk, which will be there for one step only."""
        if self._find_expected(state, chunks, is_state=True) is None:
            save = self._new_save(state, chunks, state_key(state.parent(chunks)), STATE_TOKENS)
            save.is_state, save.in_advance, save.kv_transfer = True, True, 0
            save.extends = state.parent(state.lookup.hit_chunks) if state.lookup.hit_chunks else b""
            self._expected[state.request.request_id, chunks, True] = save

    def expect_chunks(self, state: RequestState, first: int, stop: int) -> None:
        """Reserve room for whole chunks of a prompt before they are computed, to store them at once."""
        if self._find_expected(state, first) is None:
            save = self._new_save(state, first, state.keys[first], self._layout.chunk_tokens)
            save.keys = state.keys[first:stop]
            save.sizes *= len(save.keys)
            save.in_advance = True
            self._expected[state.request.request_id, first, False] = save

    def awaits_room(self, state: RequestState, tokens: int, wait: float) -> bool:
        """Return whether room in advance is not granted yet for what is there after ``tokens`` tokens.

        Blocks up to ``wait`` seconds for the answer.
        """
        if self._lacks_room(state, tokens) and self._requested:
            # The last one: the cache process answers in the order of the requests.
            self._bridge.await_reply(self._requested[-1][0], wait)
        return self._lacks_room(state, tokens)

    def _lacks_room(self, state: RequestState, tokens: int) -> bool:
        asked = [save for call, saves in self._requested if not call.settled for save in saves]
        return any(
            save.in_advance
            and save.state is state
            and not save.cancelled
            and save.stop * self._layout.chunk_tokens <= tokens
            for save in self._planned + asked
        )

    def plan_state(self, state: RequestState, chunks: int, blocks: tuple[list[int], ...]) -> None:
        """Store the state at the end of a chunk from ``blocks``, in this step or never."""
        self.expect_state(state, chunks)
        save = self._take_expected(state, chunks, is_state=True)
        assert save is not None
        save.state_blocks = blocks

    def _find_expected(self, state: RequestState, chunks: int, *, is_state: bool = False) -> Save | None:
        save = self._expected.get((state.request.request_id, chunks, is_state))
        valid = save is not None and not save.cancelled and save.preemptions == state.request.num_preemptions
        return save if valid else None

    def _take_expected(self, state: RequestState, chunks: int, *, is_state: bool = False) -> Save | None:
        """Return the save of something that exists from this step on, if room was reserved in advance."""
        save = self._find_expected(state, chunks, is_state=is_state)
        if save is not None:
            save.in_advance = False
            del self._expected[state.request.request_id, chunks, is_state]
        return save

    def follow_prompt(self, state: RequestState) -> None:
        """Give up what was expected of a prompt that was continued with further input."""
        state.saving.tail_planned = False
        self.forget(state)

    def skip_held(self, state: RequestState, hit: Hit, *, loaded: bool) -> None:
        """Plan no chunk of a hit that vLLM uses. ``loaded``: whether it loads any of it."""
        progress, chunk = state.saving, self._layout.chunk_tokens
        progress.next_chunk = max(progress.next_chunk, hit.tokens // chunk)
        if loaded and hit.tokens % chunk:
            progress.tail_end = hit.tokens
        if state.lookup.hit_chunks:
            self.forget(state, progress.next_chunk)

    def note_failed_load(self, state: RequestState) -> None:
        """Store everything of a prompt once it is computed, also what was to be loaded."""
        state.saving.next_chunk = state.saving.tail_end = 0

    def forget(self, state: RequestState, held: int | None = None) -> None:
        """Give up what a request has not come to: states, and chunks, or only those before ``held``."""
        request_id = state.request.request_id
        for key, save in list(self._expected.items()):
            if key[0] == request_id and (save.is_state or held is None or save.first < held):
                self._expected.pop(key).cancelled = True
        self._abandon_cancelled()

    def chunks_at_end(self, state: RequestState, computed: int) -> tuple[list[ChunkKey], list[int]]:
        """Return the keys and tokens of all chunks that a finished request has stored, or would have."""
        keys = state.extend(computed)
        sizes = [self._layout.chunk_tokens] * len(keys)
        if self._tails:
            prompt, start = int(state.request.num_prompt_tokens), self._last_chunk_end(computed)
            ends = [state.stored_prompt(self._layout), self._last_block_end(computed)]
            ends = ends if self._partial_chunks else []
            if state.transfer.ticket is not None or state.saving.tail_end == prompt:
                ends.append(prompt)
            end = max((end for end in ends if start < end <= computed), default=start)
            if (tail := state.tail_key(end)) is not None:
                keys.append(tail)
                sizes.append(end - start)
        return keys, sizes

    def finish(self, state: RequestState, computed: int, blocks: Blocks) -> bool:
        """Plan the remaining chunks of a finished request, or all chunks if they may be offered again.

        Return whether vLLM must keep ``blocks`` until a worker reports its last job.
        """
        state.saving.computed = computed
        if not self._bridge.responsive:
            self.drop(state)
            return self.keep(state, blocks)
        if self._may_offer_again(state, blocks):
            self._offer_again(state, computed)
        elif self.due(state, computed) or self._answer_tail(state, computed):
            fresh = self._fresh(state, computed, state.saving.settled or 0)
            self.plan(state, computed, min(fresh + self.backlog, self.room), finished=True)
            left = computed // self._layout.chunk_tokens - state.saving.next_chunk
            self._stats.add("not_stored_chunks", max(0, left))
        self.forget(state)
        return self.keep(state, blocks)

    def _may_offer_again(self, state: RequestState, blocks: Blocks) -> bool:
        """Return whether to offer all chunks of a finished request again.

        Half of the blocks that may be kept are left to requests with chunks that were never offered.
        """
        transferred = state.transfer.ticket is not None or state.hints.expect is not None
        return (
            self._wanted_again
            and not self._bridge.late
            and self._tails
            and not (self._loses_blocks or transferred or state.verify.dtype or state.hints.canary)
            and self._may_keep(sum(map(len, blocks)), self._max_kept // 2)
        )

    def _offer_again(self, state: RequestState, computed: int) -> None:
        """Plan all chunks of a finished request, in one save: a policy knows a prompt only as a whole."""
        self._planned = [save for save in self._planned if save.state is not state]
        keys, sizes = self.chunks_at_end(state, computed)
        if (room := self.room) > 0 and keys:
            save = self._new_save(state, 0, keys[0], sizes[0])
            save.keys, save.sizes, save.offered_again = keys[:room], sizes[:room], True

    def _may_keep(self, blocks: int, limit: int) -> bool:
        return not self._kept or sum(self._kept.values()) + blocks <= limit

    def keep(self, state: RequestState, blocks: Blocks) -> bool:
        """Return whether vLLM must keep the blocks of a finished request until a worker reports its last job.

        It must if chunks are left to save, which are given up if too many blocks are kept already. It should
        if workers may still be copying: otherwise, their next use of these blocks waits for that.
        """
        if id(state) not in self._unsettled() and not state.saving.copied:
            return False
        count = sum(len(ids) - ids.count(NULL_BLOCK) for ids in blocks)
        if not self._may_keep(count, self._max_kept):
            left = sum(len(save.keys) for save in self._pending() if save.state is state)
            self._stats.add("not_stored_chunks", left)
            self.drop(state)
            return False
        state.saving.held_blocks = blocks
        self._kept[state.request.request_id] = count
        self.hold(state)
        return True

    def freed(self, request_ids: Iterable[str]) -> None:
        """Note that vLLM frees the blocks of finished requests."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)

    def hold(self, state: RequestState) -> None:
        """Give the workers a last job of a finished request, once nothing of it is left to save."""
        self._held.append(state)

    def drop(self, state: RequestState | None = None) -> None:
        """Cancel the pending saves of a request, or of all requests."""
        for save in [*self._pending(), *self._expected.values()]:
            if state is None or save.state is state:
                save.cancelled = True
        self._expected = {key: save for key, save in self._expected.items() if not save.cancelled}
        self._abandon_cancelled()

    def _abandon_cancelled(self) -> None:
        """Abandon room that was granted and will not be used. At once: there may be no further step."""
        self._take_answers()
        for save in self._granted:
            if save.cancelled:
                self._abandon(save, save.leases)
        self._granted = [save for save in self._granted if not save.cancelled]
        self._bridge.abandon(self._unusable)
        self._unusable = []

    def _unsettled(self) -> set[int]:
        """Return which requests have something to save, or may still be granted room.

        Room that is of no use by then has to be given back in a step, which an idle engine takes only for
        requests whose blocks are kept.
        """
        left = {id(save.state) for save in self._pending()}
        if self._bridge.responsive:
            left.update(id(save.state) for _, saves in self._requested for save in saves)
        return left

    def _pending(self) -> list[Save]:
        """Return the saves that are planned, requested or granted."""
        requested = chain.from_iterable(saves for _, saves in self._requested)
        return [save for save in (*self._planned, *requested, *self._granted) if not save.cancelled]

    # A step.

    def step(self, blocks_of: BlocksOf, wait: float) -> list[Job]:
        """Reserve room for all planned chunks in one message, and plan copies into the granted room.

        Blocks up to ``wait`` seconds for the answer, if that cannot be used in the next step as well.
        """
        if not (self._planned or self._requested or self._granted or self._held):
            return []
        self._again_left = self.backlog
        # Answers to the last step first: room that is abandoned here can be reserved for others at once.
        jobs = self._use_answers(blocks_of)
        self.request()
        awaited = [call for call, saves in self._requested if any(map(self._needs_answer_now, saves))]
        if awaited and self._bridge.await_reply(awaited[-1], wait) is not None:
            jobs += self._use_answers(blocks_of)
        for save in self._pending():
            save.fresh = save.in_advance  # What was late once is waited for by no further step.
            if save.state_blocks is not None:  # The next step may overwrite its blocks.
                save.cancelled = True
        return jobs + self._last_jobs()

    def _needs_answer_now(self, save: Save) -> bool:
        """Return whether the next step is too late for a save: its blocks may be lost, or a peer waits."""
        if save.cancelled or save.in_advance or not save.fresh:
            return False
        return self._loses_blocks or save.state_blocks is not None or save.state.transfer.ticket is not None

    def _use_answers(self, blocks_of: BlocksOf) -> list[Job]:
        """Plan copies into the granted room, and abandon unusable reservations."""
        self._take_answers()
        granted, self._granted = self._granted, []
        jobs: dict[tuple[str, int], Job] = {}
        for save in granted:
            job = self._job(save, blocks_of)
            if job is None:
                continue
            # One for each request: chunks with room in advance are saves of their own.
            first = jobs.setdefault((job.request_id, job.epoch), job)
            if first is not job:
                first.chunks.extend(job.chunks)
        self._bridge.abandon(self._unusable)
        self._unusable = []
        return list(jobs.values())

    def request(self) -> None:
        """Request room for what is planned, if that is :attr:`possible`. Does not block."""
        if not self._bridge.responsive:
            self._fail(self._planned)
        saves = self._planned = [save for save in self._planned if not save.cancelled]
        if not saves or not self.possible:
            return
        self._planned, call = [], self._bridge.reserve([run for save in saves for run in save.runs])
        if call is None:
            self._fail(saves)
            return
        self._requested.append((call, saves))
        for save in saves:
            save.epoch, save.connection = self._bridge.epoch, self._bridge.connections
            if self.events is not None and not save.is_state:
                self.events.add(save.state, save.first, save.keys, sum(save.sizes))

    def _take_answers(self) -> None:
        requested, self._requested = self._requested, []
        for call, saves in requested:
            if not call.settled:
                self._requested.append((call, saves))
            elif call.result is not None:
                stop, reserved = 0, call.result
                self._wanted_again = reserved.offer_again
                for save in saves:
                    start, stop = stop, stop + len(save.keys) * (2 if save.kv_transfer else 1)
                    save.leases, save.offsets = reserved.leases[start:stop], reserved.offsets[start:stop]
                    save.staging = reserved.staging
                self._granted += saves
            else:
                self._fail(saves)

    def _fail(self, saves: Sequence[Save]) -> None:
        """Cancel saves for which there will be no room, so that those in advance are planned again."""
        for save in saves:
            save.cancelled = True

    def _job(self, save: Save, blocks_of: BlocksOf) -> Job | None:
        """Return the copies into the granted room; ``None`` if there is nothing to copy in this step."""
        state = save.state
        if not save.cancelled and state.request.num_preemptions != save.preemptions:
            self._plan_again(save)
            return None
        if save.cancelled:
            self._abandon(save, save.leases)
            return None
        if (save.epoch, save.connection) != (self._bridge.epoch, self._bridge.connections):
            self._plan_again(save)
            return None
        blocks: Blocks | None
        if save.in_advance:
            self._granted.append(save)
            return None
        if save.offered_again:
            save = self._first_part(save)
        if save.state_blocks is not None:
            pages = [save.state_blocks]
        elif (blocks := state.saving.held_blocks or blocks_of(state.request.request_id)) is not None:
            if state.saving.computed < save.first * self._layout.chunk_tokens + sum(save.sizes):
                self._plan_again(save)
                return None
            pages = [
                chunk_blocks(self._layout, blocks, save.first + at, size)
                for at, size in enumerate(save.sizes)
            ]
        else:
            self._granted.append(save)
            return None
        copies, unusable = [], []
        memories = [save.staging, 0] if save.kv_transfer else [0]
        copied = product(memories, zip(save.sizes, pages, strict=True))
        for lease, offset, (staging, (size, chunk)) in zip(save.leases, save.offsets, copied, strict=True):
            if not lease:
                continue
            if any(NULL_BLOCK in group for group in chunk):
                # vLLM has freed blocks outside the attention window: the chunk is incomplete.
                unusable.append(lease)
            else:
                copies.append(ChunkCopy(lease, offset, size, chunk, staging))
        self._abandon(save, unusable)
        stored = sum(not copy.staging for copy in copies)
        if save.offered_again:
            self._stats.add("stored_again_chunks", stored)
        else:
            self._stats.add("not_stored_chunks", len(save.keys) - stored)
        if not copies:
            return None
        if save.is_state or self._tails:  # Without a state, chunks are of no use to models that have any.
            end = save.first * self._layout.chunk_tokens + sum(copy.tokens for copy in copies)
            state.saving.stored = max(state.saving.stored, end)
        state.saving.copied = self._deferred
        lora, adapter = state.request.lora_request, state.adapter
        expected = (lora.lora_int_id, adapter.identity) if lora and adapter else None
        trace = state.trace.context
        return Job(state.request.request_id, save.epoch, copies, adapter=expected, trace=trace)

    def _first_part(self, save: Save) -> Save:
        """Return what this step may copy of chunks that are stored again. The others stay granted."""
        room = [at for at, lease in enumerate(save.leases) if lease]
        left, self._again_left = self._again_left, max(0, self._again_left - len(room))
        if len(room) <= left:
            return save
        self._granted.append(save.part(room[left], len(save.keys)))
        return save.part(0, room[left])

    def _plan_again(self, save: Save) -> None:
        """Have chunks stored later, by another cache process or once they have been computed again."""
        save.cancelled = True
        self._abandon(save, save.leases)
        if not save.is_state:
            save.state.saving.next_chunk = min(save.state.saving.next_chunk, save.first)
            if save.sizes[-1] != self._layout.chunk_tokens:
                save.state.saving.tail_end, save.state.saving.tail_planned = 0, False

    def _abandon(self, save: Save, leases: Sequence[int]) -> None:
        if save.epoch == self._bridge.last_epoch:  # Lease numbers are valid in the process that granted them.
            self._unusable += filter(None, leases)

    def _last_jobs(self) -> list[Job]:
        """Return a job for each finished request without pending saves, which lets vLLM free its blocks."""
        if not self._held:
            return []
        if not self._bridge.responsive:
            for state in self._held:
                self.drop(state)
        pending = self._unsettled()
        done = [state for state in self._held if id(state) not in pending]
        self._held = [state for state in self._held if id(state) in pending]
        return [Job(state.request.request_id, self._bridge.epoch, [], last=True) for state in done]
