"""The scheduler's side of the connector: what to load, what to save, and what it costs nobody to ask.

Every hook returns promptly. Whatever the cache process does, or does not do, the worst outcome of a hook
here is that a prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvtier.bridge.client import RESERVE_SECONDS, SchedulerBridge, Slot
from kvtier.integrations.vllm.changes import ChangeLog
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.handing import HandOvers
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job, StepMetadata
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.request import RequestState, cacheable, request_root
from kvtier.settings import Settings

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvtier")

FIRST_ANSWER_SECONDS = 0.001
"""How long the scheduler waits, once, for an answer that takes 0.1 ms: asking again costs a whole step."""
PATIENCE_SECONDS = 1.0
"""How much longer than the prefetch deadline an answer may take before a request is computed instead."""
LONGEST_WAIT_SECONDS = 120.0
"""How long an answer may take with ``prefetch.policy: wait``: a cache process may be stopped for good."""
HAND_OVER_RESERVE_SECONDS = 1.0
"""How long the cache process of a prefiller may take to find room, where that of others has 0.1 s."""
CLEAR_SECONDS = 10.0
NOTHING = (0, False)
ASK_AGAIN = (None, False)

Blocks = tuple[Sequence[int], ...]


class SchedulerSide:
    """Lives in vLLM's scheduler; one thread."""

    def __init__(
        self,
        settings: Settings,
        model: ModelLayout,
        bridge: SchedulerBridge,
        *,
        speculative: bool,
        events: bool,
    ) -> None:
        self._settings = settings
        self._model = model
        self._layout = model.layout
        self._bridge = bridge
        self._speculative = speculative
        waits = settings.prefetch.policy == "wait"
        self._patience = LONGEST_WAIT_SECONDS if waits else settings.prefetch.deadline + PATIENCE_SECONDS
        self._stats = TransferStats()
        self._changes = ChangeLog(self._layout.chunk_tokens) if events else None
        self._handing = HandOvers(settings, self._layout.chunk_tokens, bridge, self._stats)
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[str, list[int]] = {}
        """Leases that workers are reading from."""
        self._loads: list[Job] = []
        self._saves: list[Job] = []

    # Finding: before a request is scheduled.

    def on_new_request(self, request: Request) -> None:
        """Ask for the whole prompt at once, so that what is on disk is on its way while the request waits."""
        if not cacheable(request):
            return
        root = request_root(self._model.namespace, request)
        state = RequestState(request, root, self._layout.chunk_tokens)
        state.hints = self._handing.hints(request)
        self._requests[request.request_id] = state
        # Before anything of it is brought up or stored, so that nothing is evicted before it is pushed.
        self._handing.begin(state)
        self._look_up(state)

    def _look_up(self, state: RequestState) -> None:
        request = state.request
        if request.skip_reading_prefix_cache or state.load_failed:
            return
        keys = list(state.extend(request.num_tokens))
        covered = len(keys) * self._layout.chunk_tokens
        wants_tail = self._settings.partial_chunks or self._handing.wants_tail(state)
        if wants_tail and request.num_tokens == request.num_prompt_tokens:
            tail = state.tail_key(request.num_tokens)
            if tail is not None:
                keys.append(tail)
                covered = request.num_tokens
        expected = self._handing.expected(state, keys)
        state.ticket = self._bridge.look_up(
            keys, covered, expect_chunks=expected.chunks, expect_seconds=expected.seconds
        )
        state.patience = self._patience + expected.seconds
        state.waited = False
        if state.ticket is not None:
            state.ask()
            self._stats.add("looked_up_tokens", covered)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``local_tokens`` can be loaded; ``None`` while that is being found out."""
        state = self._requests.get(request.request_id)
        if state is None or request.request_id in self._loading:
            return NOTHING
        if state.ticket is None:
            self._handing.note_preemption(state)
            self._handing.begin(state)
            self._look_up(state)
        if state.ticket is None:
            return NOTHING
        wait = 0.0 if state.waited else FIRST_ANSWER_SECONDS
        state.waited = True
        finding = self._bridge.found(state.ticket, wait)
        if finding is None:
            state.ticket = None
            return NOTHING
        if not finding.final:
            if state.seconds_waited < state.patience:
                return ASK_AGAIN
            self._give_up_look_up(state)
            return NOTHING
        state.local_tokens = local_tokens
        hit = self._tokens(state, len(finding.leases))
        return (hit - local_tokens, True) if hit > local_tokens else NOTHING

    def _give_up_look_up(self, state: RequestState) -> None:
        if state.ticket is not None:
            self._bridge.cancel(state.ticket)
            state.ticket = None

    def _tokens(self, state: RequestState, chunks: int) -> int:
        return min(chunks * self._layout.chunk_tokens, int(state.request.num_tokens))

    # Loading: when a request has been given blocks.

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load of what was promised, or give back what is not wanted after all."""
        state = self._requests.get(request.request_id)
        if state is None or state.ticket is None:
            return
        finding = self._bridge.found(state.ticket)
        if finding is None or not finding.final:
            self._give_up_look_up(state)
            return
        state.next_chunk = max(
            state.next_chunk, self._tokens(state, len(finding.leases)) // self._layout.chunk_tokens
        )
        if not external_tokens:
            self._give_up_look_up(state)
            return
        self._bridge.take(state.ticket)
        state.ticket = None
        first = state.local_tokens // self._layout.chunk_tokens
        self._bridge.release(finding.leases[:first])
        block_ids = blocks.get_block_ids()
        chunks = []
        for index in range(first, len(finding.leases)):
            tokens = self._tokens(state, index + 1) - index * self._layout.chunk_tokens
            chunk_blocks = self._blocks(block_ids, index, tokens, state.local_tokens)
            staging = finding.staging if finding.sources[index] == self._bridge.staging_source else 0
            lease, offset = finding.leases[index], finding.offsets[index]
            chunks.append(ChunkCopy(lease, offset, tokens, chunk_blocks, staging))
        self._loading[request.request_id] = finding.leases[first:]
        self._loads.append(Job(request.request_id, self._bridge.epoch, chunks))
        self._count_hits(state, finding.sources, external_tokens)

    def _blocks(
        self, block_ids: Blocks, index: int, tokens: int, local_tokens: int = 0
    ) -> tuple[list[int], ...]:
        """The blocks of chunk ``index``, a page each; those within ``local_tokens`` are left out."""
        found = []
        for group, ids in zip(self._layout.groups, block_ids, strict=True):
            base = index * self._layout.chunk_tokens // group.block_tokens
            kept = local_tokens // group.block_tokens
            found.append(
                [
                    ids[base + block] if kept <= base + block < len(ids) else NULL_BLOCK
                    for block in group.blocks(tokens)
                ]
            )
        return tuple(found)

    def _count_hits(self, state: RequestState, sources: Sequence[int], external_tokens: int) -> None:
        request, chunk = state.request, self._layout.chunk_tokens
        state.hits_by_tier = {}
        for index, source in enumerate(sources):
            start = max(index * chunk, state.local_tokens)
            tokens = self._tokens(state, index + 1) - start
            if tokens > 0:
                state.hits_by_tier[source] = state.hits_by_tier.get(source, 0) + tokens
        welcome = self._bridge.welcome
        assert welcome is not None
        named = {welcome.tiers[source]: tokens for source, tokens in state.hits_by_tier.items()}
        for tier, tokens in named.items():
            self._stats.add("hit_tokens", tokens, tier)
        logger.info(
            "request %s: %d of %d tokens hit (%s), %d more in vLLM's own cache",
            request.request_id,
            external_tokens,
            request.num_tokens,
            ", ".join(f"{tier} {tokens}" for tier, tokens in named.items()),
            state.local_tokens,
        )

    def hits_by_medium(self, request: Request) -> dict[str, int]:
        """The tokens of the last hit by the type of tier that they came from."""
        state, welcome = self._requests.get(request.request_id), self._bridge.welcome
        if state is None or welcome is None:
            return {}
        return {welcome.media[source]: tokens for source, tokens in state.hits_by_tier.items()}

    # Saving: at the end of every step's planning.

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """The loads and saves of the step that is about to run."""
        self._bridge.poll()
        for request_id in output.preempted_req_ids or ():
            if (preempted := self._requests.get(request_id)) is not None:
                self._handing.note_preemption(preempted)
        block_state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or block_state is None:
                continue
            computed = self._computed_tokens(state.request, scheduled)
            if self._has_unsaved(state, computed):
                block_ids = block_state.get_block_ids(request_id)
                if block_ids is not None:
                    self._save(state, computed, block_ids)
        metadata = StepMetadata(self._loads, self._saves)
        self._loads, self._saves = [], []
        return metadata

    def _computed_tokens(self, request: Request, scheduled: int) -> int:
        """Leading tokens that are known, and whose KV is there for good once this step has run."""
        if self._speculative:
            # Drafts may yet be rejected: count what earlier steps have settled.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
        else:
            computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        return int(computed if self._settings.save_decode else min(computed, request.num_prompt_tokens))

    def _has_unsaved(self, state: RequestState, computed: int) -> bool:
        whole = computed // self._layout.chunk_tokens > state.next_chunk
        return whole or self._wants_tail(state, computed)

    def _wants_tail(self, state: RequestState, computed: int) -> bool:
        prompt = state.request.num_prompt_tokens
        return (
            (self._settings.partial_chunks or state.hand_over is not None)
            and not state.tail_saved
            and computed >= prompt
            and prompt % self._layout.chunk_tokens != 0
        )

    def _save(self, state: RequestState, computed: int, block_ids: Blocks, *, last: bool = False) -> bool:
        """Reserve room for the chunks that are complete, and plan their copies; whether there are any."""
        first = state.next_chunk
        keys = list(state.extend(computed)[first:])
        sizes = [self._layout.chunk_tokens] * len(keys)
        state.next_chunk = first + len(keys)
        if self._wants_tail(state, computed):
            state.tail_saved = True
            prompt = state.request.num_prompt_tokens
            tail = state.tail_key(prompt)
            if tail is not None and prompt // self._layout.chunk_tokens == state.next_chunk:
                keys.append(tail)
                sizes.append(prompt % self._layout.chunk_tokens)
        blocks = [self._blocks(block_ids, first + index, tokens) for index, tokens in enumerate(sizes)]
        copies = self._reserve(state, first, keys, sizes, blocks)
        if copies:
            self._saves.append(Job(state.request.request_id, self._bridge.epoch, copies, last))
        return bool(copies)

    def _reserve(
        self,
        state: RequestState,
        first: int,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        blocks: Sequence[tuple[list[int], ...]],
    ) -> list[ChunkCopy]:
        if not keys:
            return []
        # What finds no room is not handed over, and this engine has computed it for nothing.
        seconds = RESERVE_SECONDS if state.hand_over is None else HAND_OVER_RESERVE_SECONDS
        parent = state.parent(first)
        staged: Sequence[Slot | None] = ()
        if state.hand_over is not None and self._settings.hand_over.device == "cuda":
            staged = self._bridge.reserve(parent, keys, sizes[-1], seconds, state.hand_over)  # type: ignore[arg-type]
        slots = self._bridge.reserve(parent, keys, sizes[-1], seconds)  # type: ignore[arg-type]
        copies = self._copies(slots, sizes, blocks)
        self._stats.add("not_stored_chunks", len(slots) - len(copies))
        if self._changes is not None:
            self._changes.remember(state, first, keys, sizes)
        return self._copies(staged, sizes, blocks) + copies

    def _copies(
        self, slots: Sequence[Slot | None], sizes: Sequence[int], blocks: Sequence[tuple[list[int], ...]]
    ) -> list[ChunkCopy]:
        """What is to be copied into the slots, of which there is one for each chunk or none at all."""
        copies, unusable = [], []
        for slot, tokens, chunk_blocks in zip(slots, sizes, blocks, strict=False):
            if slot is None:
                continue
            if any(NULL_BLOCK in group for group in chunk_blocks):
                # vLLM has dropped blocks that left the window: the chunk is not whole any longer.
                unusable.append(slot.lease)
            else:
                copies.append(ChunkCopy(slot.lease, slot.offset, tokens, chunk_blocks, slot.staging))
        self._bridge.abandon(unusable)
        return copies

    # Ending.

    def worked(self, output: KVConnectorOutput) -> None:
        """Workers have finished loads: their leases can go."""
        for request_id in output.finished_recving or ():
            self._bridge.release(self._loading.pop(request_id, []))
        for request_id in output.failed_recving or ():
            self._stats.add("failed_loads", 1)
            logger.warning("request %s: its load failed, it is computed instead", request_id)
            state = self._requests.get(request_id)
            if state is not None:
                state.load_failed = True
                state.next_chunk = 0
                self._handing.give_up(state)

    def finished(self, request: Request, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; whether vLLM must keep its blocks until what is unsaved has been saved.

        And what its answer says of the hand-over.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, self._handing.answer(request, 0)
        self._give_up_look_up(state)
        if request.status == RequestStatus.FINISHED_ABORTED or request.request_id in self._loading:
            self._handing.give_up(state)
            return False, self._handing.answer(request, 0)
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if not self._settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        saves = self._has_unsaved(state, computed) and self._save(state, computed, block_ids, last=True)
        return saves, self._handing.answer(request, self._handing.finish(state))

    def clear(self) -> bool:
        """Remove this model's chunks everywhere on this host; whether that was done."""
        for state in self._requests.values():
            self._give_up_look_up(state)
            state.next_chunk = 0
        removed = self._bridge.clear(CLEAR_SECONDS)
        logger.info("reset: %s", "no answer" if removed is None else f"{removed} chunks removed")
        return removed is not None

    def events(self) -> Iterable[KVCacheEvent]:
        """What came into the tiers and left them, in vLLM's words."""
        welcome = self._bridge.welcome
        if self._changes is None or welcome is None:
            return ()
        return self._changes.events(self._bridge.changes(), welcome.media)

    def take_stats(self) -> TransferStats | None:
        """What happened since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Leave the cache process."""
        self._bridge.close()
