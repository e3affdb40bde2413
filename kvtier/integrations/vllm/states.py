"""Which states to store, of models whose layers keep a state instead of KV.

vLLM leaves the state after some tokens in blocks of its own for one step, and names them in that step
(``KVConnectorBlockState.boundary_state_offloads`` in vllm/v1/core/sched/output.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtier.integrations.vllm.copies import NULL_BLOCK
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.request import RequestState
from kvtier.integrations.vllm.saving import Saves

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


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
        for chunks in {last - 1, last, state.branch}:
            if chunks > state.hit_chunks:
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
                    state.saved_states.add(chunks)
                    state.extend(chunks * self._chunk_tokens)
                    self._saves.plan_state(state, chunks, blocks)

    def _admits(self, state: RequestState, chunks: int) -> bool:
        if chunks in state.saved_states:
            return False
        tokens = chunks * self._chunk_tokens
        if not self._save_decode and tokens > state.request.num_prompt_tokens:
            return False
        if state.request.num_tokens < tokens:  # With asynchronous scheduling, the last is not known yet.
            return False
        shared = state.request.shared_prefix_boundary // self._chunk_tokens
        return chunks >= self._last(state) - 1 or chunks in (state.branch, shared)

    def _last(self, state: RequestState) -> int:
        """Return the chunks before the last boundary of a prompt, after which a token is left to compute."""
        return int(state.request.num_prompt_tokens - 1) // self._chunk_tokens

    def _blocks(self, by_group: Mapping[int, int]) -> tuple[list[int], ...] | None:
        """Return the block of each group with states; ``None`` if one is missing."""
        blocks = []
        for group, number in zip(self._model.layout.groups, self._model.group_ids, strict=True):
            if group.state and by_group.get(number, NULL_BLOCK) == NULL_BLOCK:
                return None
            blocks.append([by_group[number]] if group.state else [])
        return tuple(blocks)
