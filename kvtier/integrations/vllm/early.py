"""Reserve room before the step that needs it, for what vLLM may have for that step only.

That is a state, and with attention windows a chunk of the prompt, unless it is the last one. The cache
process may answer later than the step waits. With the state, room is reserved for the chunks before it, which
are of no use without it: they are stored at once, as a message in each step would take 1 to 3 % of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvtier.bridge.client import SchedulerBridge
from kvtier.integrations.vllm.copies import NULL_BLOCK
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.request import RequestState
from kvtier.integrations.vllm.saves import Saves

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MAX_EARLY_STATES = 8
"""With more states to come, a request that is not scheduled yet reserves no room for its own."""
ROOM_SECONDS = 0.1
"""How long a queued request may wait for its room. The answer usually follows that to its lookup at once."""


class States:
    """Admits states. A state costs as much as many chunks, so not every one that vLLM leaves is stored.

    The rule is that of Marconi (arXiv 2411.19379): states where a prompt is likely to be continued, which is
    its end and that of its answer, and where prompts have branched.
    """

    def __init__(self, model: ModelLayout, saves: Saves, *, save_decode: bool) -> None:
        self._model = model
        self._chunk_tokens = model.layout.chunk_tokens
        self._saves = saves
        self._save_decode = save_decode

    def expect(self, state: RequestState) -> None:
        """Reserve room for the states at the end of a prompt and at a branch, in its first step."""
        last = self._last(state)
        state.extend(state.request.num_prompt_tokens)
        for chunks in {last - 1, last, state.lookup.branch}:
            if chunks > state.lookup.hit_chunks:
                self._saves.expect_state(state, chunks)

    def plan(self, output: SchedulerOutput, requests: Mapping[str, RequestState]) -> None:
        """Plan to store the states that this step leaves at the ends of chunks."""
        block_state = output.kv_connector_block_state
        offers = {} if block_state is None else block_state.boundary_state_offloads
        for request_id, offered in offers.items():
            state = requests.get(request_id)
            if state is None or not state.stores:
                continue
            block_of: dict[int, dict[int, int]] = {}
            for group, block, tokens in offered:
                block_of.setdefault(tokens, {})[group] = block
            for tokens, by_group in block_of.items():
                chunks, rest = divmod(tokens, self._chunk_tokens)
                blocks = self._blocks(by_group)
                if blocks is not None and not rest and self._admits(state, chunks):
                    state.early.saved_states.add(chunks)
                    state.extend(chunks * self._chunk_tokens)
                    self._saves.plan_state(state, chunks, blocks)

    def _admits(self, state: RequestState, chunks: int) -> bool:
        if chunks in state.early.saved_states:
            return False
        tokens = chunks * self._chunk_tokens
        if not self._save_decode and tokens > state.request.num_prompt_tokens:
            return False
        if state.request.num_tokens < tokens:  # With asynchronous scheduling, the last is not known yet.
            return False
        shared = state.request.shared_prefix_boundary // self._chunk_tokens
        return chunks >= self._last(state) - 1 or chunks in (state.lookup.branch, shared)

    def _last(self, state: RequestState) -> int:
        """Return the number of chunks before the last boundary of a prompt that leaves a token to compute."""
        return int(state.request.num_prompt_tokens - 1) // self._chunk_tokens

    def _blocks(self, by_group: Mapping[int, int]) -> tuple[list[int], ...] | None:
        """Return the block of each group with states; ``None`` if one is missing."""
        blocks = []
        for group, number in zip(self._model.layout.groups, self._model.group_ids, strict=True):
            if group.state and by_group.get(number, NULL_BLOCK) == NULL_BLOCK:
                return None
            blocks.append([by_group[number]] if group.state else [])
        return tuple(blocks)


class Early:
    """Reserves room for queued requests, and for the next step of running ones.

    Bounded, because room that waits for its chunk is missing elsewhere: queued requests hold at most as many
    chunks as one step computes, and all together twice as many.
    """

    def __init__(
        self,
        model: ModelLayout,
        bridge: SchedulerBridge,
        saves: Saves,
        states: States | None,
        *,
        step_tokens: int,
    ) -> None:
        """``step_tokens``: the maximum number of tokens that one step computes."""
        layout = model.layout
        self._chunk_tokens = layout.chunk_tokens
        self._bridge = bridge
        self._saves = saves
        self._states = states
        self._step_tokens = step_tokens
        self._step_chunks = -(-step_tokens // layout.chunk_tokens) if layout.has_windows else 0

    def queued(self, state: RequestState) -> None:
        """Reserve room for what the first step of a request leaves, after its lookup was sent.

        After a hit, states that continue it are needed instead. Not if chunks may come from elsewhere, from
        shared pools or pushed by a prefill instance: a chunk with room to be stored is not received.
        """
        welcome = self._bridge.welcome
        asks_pools = state.lookup.ticket is not None and welcome is not None and welcome.pools
        if not state.stores or asks_pools or state.hints.expect is not None:
            return
        # An idle engine has not read the last answers.
        self._bridge.poll_if_due()
        if not self._bridge.responsive:
            return
        if self._states is not None and self._saves.expected_states < MAX_EARLY_STATES:
            self._states.expect(state)
            # Others may store the chunks of a longer prompt before they are computed.
            if int(state.request.num_prompt_tokens) <= self._step_tokens:
                self._gather(state)
        self._expect_chunks(state, self._step_chunks)
        self._saves.request()
        state.early.room_until = time.monotonic() + ROOM_SECONDS

    def awaits_room(self, state: RequestState, computed: int, wait: float) -> bool:
        """Return whether a queued request must be asked about again: its first step may need more room.

        ``computed``: its tokens before that step. Blocks up to ``wait`` seconds.
        """
        tokens = computed + self._step_tokens
        if time.monotonic() < state.early.room_until and self._saves.awaits_room(state, tokens, wait):
            return True
        state.early.room_until = 0.0
        return False

    def scheduled(self, running: Iterable[tuple[RequestState, bool]]) -> None:
        """Plan to reserve room for what the next step of these requests leaves.

        ``running``: requests, each with whether this is its first step: then for its states as well.
        """
        for state, first in running:
            if first and self._states is not None:
                self._states.expect(state)
            self._gather(state)
            self._expect_chunks(state, 2 * self._step_chunks)

    def _gather(self, state: RequestState) -> None:
        """Have the next chunks of a prompt stored at once, unless a decode instance waits for each."""
        if self._states is None or self._step_chunks:
            return
        first = state.saving.next_chunk
        whole = int(state.request.num_prompt_tokens) // self._chunk_tokens
        stop = min(whole, first + min(self._saves.gathered, self._saves.room))
        if first < state.lookup.branch < stop:  # A state is stored there.
            stop = state.lookup.branch
        if first + 1 < stop and state.transfer.ticket is None:
            state.extend(stop * self._chunk_tokens)
            self._saves.expect_chunks(state, first, stop)

    def _expect_chunks(self, state: RequestState, limit: int) -> None:
        if not self._step_chunks:
            return
        count = min(self._step_chunks, limit - self._saves.expected_chunks, self._saves.room)
        if count <= 0:
            return
        first = state.saving.next_chunk
        stop = min(int(state.request.num_prompt_tokens), (first + count) * self._chunk_tokens)
        for chunk in range(first, first + len(state.extend(stop, first))):
            self._saves.expect_chunks(state, chunk, chunk + 1)
