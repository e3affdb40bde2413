"""Scheduler side of the connector: plan loads and saves without delaying the engine.

All waits of one step together take :data:`STEP_WAIT_SECONDS` at most, and none at all while the cache
process is late or unresponsive. The worst outcome of a hook is that a prompt is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvtier.backends.logs import RareWarning
from kvtier.bridge.client import SchedulerBridge
from kvtier.integrations.vllm.changes import ChangeLog
from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.handing import HandOvers
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job, StepMetadata
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.request import RequestState, cacheable, request_root
from kvtier.integrations.vllm.saving import Blocks, Saves, chunk_blocks
from kvtier.settings import Settings

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvtier")

STEP_WAIT_SECONDS = 0.002
"""Limit of all waits of one step: a healthy cache process answers in 0.1 to 0.5 ms."""
LOOK_UP_WAIT_SECONDS = 0.001
"""How much of it may be spent on look-ups: asking again costs a whole step."""
PATIENCE_SECONDS = 1.0
"""How much longer than the prefetch deadline an answer may take before a request is computed instead."""
LONGEST_WAIT_SECONDS = 120.0
"""How long an answer may take with ``prefetch.policy: wait``: a fetch may stand still."""
SILENCE_SECONDS = 10.0
"""How long the cache process may be silent then, until requests are computed instead of waiting for it."""
CLEAR_SECONDS = 1.0
NOTHING = (0, False)
ASK_AGAIN = (None, False)


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
        if waits:
            bridge.expect_answers_within(SILENCE_SECONDS)
        self._patience = LONGEST_WAIT_SECONDS if waits else settings.prefetch.deadline + PATIENCE_SECONDS
        self._stats = TransferStats()
        self._warn = RareWarning(logger)
        self._changes = ChangeLog(self._layout.chunk_tokens) if events else None
        self._handing = HandOvers(settings, self._layout.chunk_tokens, bridge, self._stats)
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[str, tuple[int, list[int]]] = {}
        """The cache process, by its epoch, and its leases that workers are reading from."""
        self._loads: list[Job] = []
        self._saves = Saves(settings, self._layout, bridge, self._stats, self._changes)
        self._waited_before = 0.0
        """What the bridge had waited when this step began."""

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
        if request.skip_reading_prefix_cache or state.load_failed or not self._bridge.takes_questions:
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
        wait = 0.0 if state.waited else self._wait_left(LOOK_UP_WAIT_SECONDS)
        state.waited = True
        finding = self._bridge.found(state.ticket, wait)
        if finding is None:
            state.ticket = None
            return NOTHING
        if not self._bridge.responsive:
            self._give_up_look_up(state)
            return NOTHING
        if not finding.final:
            if time.monotonic() < max(state.asked_at, finding.heard_at) + state.patience:
                return ASK_AGAIN
            self._warn(
                "request %s: no chunk has arrived for %.1f s, %d are in flight: the prompt is computed",
                request.request_id,
                state.patience,
                finding.fetching,
            )
            self._give_up_look_up(state)
            return NOTHING
        state.local_tokens = local_tokens
        hit = self._tokens(state, len(finding.leases))
        return (hit - local_tokens, True) if hit > local_tokens else NOTHING

    def _wait_left(self, limit: float) -> float:
        """How long a hook may still wait in this step, with ``limit`` for all hooks together."""
        return max(0.0, limit - (self._bridge.waited - self._waited_before))

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
            pages = chunk_blocks(self._layout, block_ids, index, tokens, state.local_tokens)
            staging = finding.staging if finding.sources[index] == self._bridge.staging_source else 0
            lease, offset = finding.leases[index], finding.offsets[index]
            chunks.append(ChunkCopy(lease, offset, tokens, pages, staging))
        self._loading[request.request_id] = self._bridge.epoch, finding.leases[first:]
        self._loads.append(Job(request.request_id, self._bridge.epoch, chunks))
        self._count_hits(state, finding.sources, external_tokens)

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
        self._bridge.update()
        for request_id in output.preempted_req_ids or ():
            if (preempted := self._requests.get(request_id)) is not None:
                self._handing.note_preemption(preempted)
        self._plan_saves(output)
        block_state = output.kv_connector_block_state
        blocks_of = _no_blocks if block_state is None else block_state.get_block_ids
        saves = self._saves.step(blocks_of, self._wait_left(STEP_WAIT_SECONDS))
        if not self._saves.unasked:
            self._handing.end_finished()
        self._bridge.probe()
        self._waited_before = self._bridge.waited
        metadata = StepMetadata(self._loads, saves, computes=output.total_num_scheduled_tokens > 0)
        self._loads = []
        return metadata

    def _plan_saves(self, output: SchedulerOutput) -> None:
        """Store the chunks that this step completes, and a few of those that it could not store before."""
        due, possible = [], self._saves.possible
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            before, state.settled = state.settled, state.request.num_computed_tokens
            if not possible:
                continue
            computed = self._computed_tokens(state.request, scheduled)
            if self._saves.due(state, computed):
                # With drafts it becomes due a step later than without.
                since = before if self._speculative and before is not None else state.settled
                due.append((state, computed, since))
        self._saves.plan_step(due)

    def _computed_tokens(self, request: Request, scheduled: int) -> int:
        """Leading tokens that are known, and whose KV is there for good once this step has run."""
        if self._speculative:
            # Drafts may yet be rejected: count what earlier steps have settled.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
        else:
            computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        return int(computed if self._settings.save_decode else min(computed, request.num_prompt_tokens))

    # Ending.

    def worked(self, output: KVConnectorOutput) -> None:
        """Workers have finished loads: their leases can go."""
        for request_id in output.finished_recving or ():
            epoch, leases = self._loading.pop(request_id, (0, []))
            if epoch == self._bridge.epoch:  # Another process numbers its leases anew.
                self._bridge.release(leases)
        for request_id in output.failed_recving or ():
            self._stats.add("failed_loads", 1)
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
            self._saves.drop(state)
            return False, self._handing.answer(request, 0)
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if not self._settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        held = self._saves.finish(state, computed, block_ids)
        handed_over = self._handing.finish(state)
        if not self._saves.unasked:
            self._handing.end_finished()
        return held, self._handing.answer(request, handed_over)

    def clear(self) -> bool:
        """Remove this model's chunks everywhere on this host; whether that was done."""
        for state in self._requests.values():
            self._give_up_look_up(state)
            state.next_chunk = 0
        self._saves.drop()
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


def _no_blocks(request_id: str) -> Blocks | None:
    return None
