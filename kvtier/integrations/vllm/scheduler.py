"""Scheduler side of the connector: plan loads and saves without delaying the engine.

All waits of one step together take at most :data:`STEP_WAIT_SECONDS`; there are no waits while the cache
process is late or unresponsive. In the worst case, the prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

from kvtier.bridge.client import SchedulerBridge
from kvtier.catalog.misses import MissReason
from kvtier.integrations.vllm.adapters import Adapter, Adapters
from kvtier.integrations.vllm.compat import end_of_answer, has_failed
from kvtier.integrations.vllm.early import Early, States
from kvtier.integrations.vllm.foreign_loads import ForeignLoads
from kvtier.integrations.vllm.hints import Hints
from kvtier.integrations.vllm.kv_events import EngineBlocks, KVEvents, published_group
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.loading import LOST, Loads
from kvtier.integrations.vllm.lookups import ASK_AGAIN, NOTHING, Lookups
from kvtier.integrations.vllm.metadata import StepMetadata, written_blocks
from kvtier.integrations.vllm.metrics import TransferStats
from kvtier.integrations.vllm.prompt_transfers import PromptTransfers
from kvtier.integrations.vllm.request import RequestState, cacheable, request_root, token_list
from kvtier.integrations.vllm.saves import Blocks, Saves
from kvtier.integrations.vllm.traces import LOAD, LOOKUP, SEND_SECONDS, UNTRACED, Traces
from kvtier.integrations.vllm.verification import ShadowVerification
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.logs import RateLimitedLog
from kvtier.settings import Settings

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvtier")

STEP_WAIT_SECONDS = 0.002
"""Limit of all waits of one step: a healthy cache process answers in 0.1 to 0.5 ms."""
LOOKUP_WAIT_SECONDS = 0.001
"""The part of it that lookups may use: without an answer, the request is delayed by a whole step."""
CLEAR_SECONDS = 1.0
OUTCOMES_SECONDS = 0.5
"""Interval at which a busy engine reports what became of requests. Each report costs as much as a lookup."""


class SchedulerSide:
    """Connector state in vLLM's scheduler. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        model: ModelLayout,
        bridge: SchedulerBridge,
        *,
        weights: EngineWeights,
        lookahead: int = 0,
        deferred: bool = False,
        numbered: bool = False,
        whole_blocks: bool = False,
        step_tokens: int = 0,
        kv_dtype: str = "",
    ) -> None:
        """``lookahead``: how many tokens after it the KV of a token depends on (``lookahead_tokens``).

        ``deferred``: whether workers may still be copying when a step ends. ``numbered``: whether
        vLLM numbers images, so that requests with any are not cached (``numbers_inputs``). ``whole_blocks``:
        whether vLLM drops hits that end within a block (``hits_end_at_blocks``). ``step_tokens``: see Early.
        ``kv_dtype``: type of the values of the KV cache.
        """
        self._settings = settings
        self._model = model
        self._layout = layout = model.layout
        self._bridge = bridge
        self.weights = weights
        """The weights that the engine has."""
        self._lookahead = lookahead
        self._deferred = deferred
        self._numbered = numbered
        self._stats = TransferStats()
        self._warn = RateLimitedLog(logger)
        self._events: KVEvents | None = None
        self._kv_transfers = PromptTransfers(settings, self._layout, bridge, self._stats, parts=model.parts)
        self._lookups = Lookups(
            settings, layout, bridge, self._kv_transfers, self._stats, whole_blocks=whole_blocks
        )
        self._requests: dict[str, RequestState] = {}
        self._skipped: set[str] = set()
        """Running requests that do not use the cache, and were reported."""
        self._traces = Traces(bridge)
        self.adapters = Adapters(bridge)
        """What is known of the engine's LoRA adapters."""
        self._loads = Loads(model, bridge)
        self._foreign_loads = ForeignLoads(self._layout.groups[0].block_tokens)
        self._saves = Saves(
            settings, self._layout, bridge, self._stats, blocks=model.num_blocks, deferred=deferred
        )
        stateful, decode = layout.has_states, settings.save_decode
        self._states = States(model, self._saves, save_decode=decode) if stateful else None
        self._early = Early(model, bridge, self._saves, self._states, step_tokens=step_tokens)
        share = settings.verify if kv_dtype and model.parts == 1 else 0.0
        self._shadow = ShadowVerification(share, kv_dtype, bridge, self._lookups, self._stats)
        self._waited_before = 0.0
        """Value of ``bridge.waited`` when this step began."""

    @property
    def epoch(self) -> int:
        """The connected cache process; 0 if it is not connected."""
        return self._bridge.epoch

    def publish_events(self, manager: KVCacheManager) -> None:
        """Publish KV events from now on, about the blocks that ``manager`` would cache."""
        group = published_group(self._model)
        if group is not None:
            blocks = EngineBlocks(manager, self._model, group)
            self._events = KVEvents(self._bridge, self._layout.chunk_tokens, blocks)
            self._lookups.events = self._saves.events = self._events

    # Lookup, before a request is scheduled.

    def on_new_request(self, request: Request) -> None:
        """Look up the whole prompt, so that chunks on disk are prefetched while the request is queued."""
        self._shadow.present.add(request.request_id)
        adapter = self.adapters.admit(request, 0, self._wait_left(LOOKUP_WAIT_SECONDS))
        unknown = request.lora_request is not None and adapter is None
        if unknown or not cacheable(request, numbered=self._numbered) or self.weights.is_mixed():
            return
        try:
            self._begin(request, adapter)
        except Exception as error:
            # What clients send is read and hashed here for the first time, and must not end the engine.
            self._warn("request %s is not cached: %r", request.request_id, error)
            if (state := self._requests.pop(request.request_id, None)) is not None:
                self._give_up(state)

    def _begin(self, request: Request, adapter: Adapter | None) -> None:
        hints = self._kv_transfers.hints(request)
        if hints.mode == "off":  # No hook knows the request, so it costs nothing.
            return
        state = self._track(request, hints, adapter)
        self._shadow.began(state)
        # Before any chunk is promoted or stored, so that none is evicted before it is pushed.
        self._kv_transfers.begin(state)
        self._lookups.look_up(state)
        self._early.queued(state)

    def _admit_again(self, request: Request, local_tokens: int) -> bool:
        """Return whether a request can use the chunks of its adapter, which may have changed since."""
        state = self._requests.get(request.request_id)
        if state is None and not self.adapters.is_pending(request.request_id):
            return False
        adapter = self.adapters.admit(request, local_tokens, self._wait_left(LOOKUP_WAIT_SECONDS))
        if state is not None and adapter is not state.adapter:
            if self.adapters.is_pending(request.request_id):
                return False
            self._give_up(self._requests.pop(request.request_id))
            state = None
        if state is None and adapter is not None:
            self.on_new_request(request)
        return adapter is not None

    def _track(self, request: Request, hints: Hints, adapter: Adapter | None) -> RequestState:
        canary = hints.canary.id if hints.canary else ""
        root = request_root(
            self.weights.current.namespace, request, adapter.identity if adapter else "", canary
        )
        # The chunk at the end of a prompt has no key if drafts read further ahead.
        whole_blocks = self._lookahead > 1 or (self._bridge.lacks_room and not canary)
        sizes = self._layout.chunk_tokens, self._lookahead, self._layout.granularity
        # The first part of the engine traces for all.
        trace = UNTRACED if self._model.part else self._traces.begin(request)
        state = RequestState(
            request, root, *sizes, whole_blocks=whole_blocks, hints=hints, adapter=adapter, trace=trace
        )
        self._requests[request.request_id] = state
        return state

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``local_tokens`` can be loaded; ``None`` while that is pending."""
        loading = request.request_id in self._loads
        if request.lora_request is not None and not loading and not self._admit_again(request, local_tokens):
            return ASK_AGAIN if self.adapters.is_pending(request.request_id) else NOTHING
        state = self._requests.get(request.request_id)
        if state is None and not loading:
            self._skip(request, local_tokens)
        if state is None or loading:
            return NOTHING
        if state.follow_prompt():
            self._saves.follow_prompt(state)
        found: tuple[int | None, bool] = NOTHING
        self._shadow.repeat(state)
        if state.lookup.ticket is None and state.verify.ticket is None:
            self._kv_transfers.note_preemption(state)
            self._kv_transfers.begin(state)
            self._lookups.look_up(state)
        if state.lookup.ticket is not None:
            found = self._lookups.matched(state, local_tokens, self._wait_left(LOOKUP_WAIT_SECONDS))
            if found != ASK_AGAIN:
                state.trace.end(LOOKUP, local_tokens=local_tokens, tokens=found[0] or 0)
            if found == ASK_AGAIN or state.lookup.ticket is None:
                return found
            if found[0] and self._shadow.share:
                found = self._shadow.offer(state, found)
                if found == NOTHING:  # Before, there was no room for what is held.
                    self._saves.forget(state)
                    self._early.queued(state)
        elif self._lookups.awaits_connection(state):
            return ASK_AGAIN
        else:
            self._lookups.note_local(state, local_tokens)
        if self._shadow.hides_local(state) and local_tokens:
            return ASK_AGAIN
        computed = local_tokens + (found[0] or 0)
        awaits_room = self._early.awaits_room(state, computed, self._wait_left(LOOKUP_WAIT_SECONDS))
        return ASK_AGAIN if awaits_room else found

    def _wait_left(self, limit: float) -> float:
        """Return how long a hook may still wait in this step, given the ``limit`` for all of its hooks."""
        return max(0.0, limit - (self._bridge.waited - self._waited_before))

    def _give_up(self, state: RequestState) -> None:
        self._lookups.cancel(state)
        self._shadow.end(state)
        state.stores = False
        self._kv_transfers.give_up(state)
        self._saves.drop(state)

    # Loading, after blocks have been allocated to a request.

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load of the reported hit, or release its leases if it is not used."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._shadow.scheduled(state)
        if state.lookup.ticket is None:
            if request.request_id not in self._loads:
                self._report(state, MissReason.VERIFIED if state.verify.dtype else None)
            return
        lookup = self._bridge.found(state.lookup.ticket)
        if lookup is None or not lookup.located:
            self._lookups.cancel(state)
            if external_tokens:
                self._loads.fail(state, LOST)
            else:
                self._report(state)
            return
        hit = self._lookups.accept(state, external_tokens)
        self._saves.skip_held(state, hit, loaded=external_tokens > 0)
        if not external_tokens:
            self._lookups.cancel(state)
            self._report(state)
            return
        blocks_of_groups = self._model.blocks(blocks.get_block_ids())
        self._loads.begin(state, self._lookups.take(state), hit, blocks_of_groups)
        welcome = self._bridge.welcome
        assert welcome is not None
        # By name: when the load is done, another cache process may be connected, with other tiers.
        sources = [*lookup.sources, *lookup.pending_sources][: hit.chunks]
        tiers = [(welcome.tiers[at], welcome.media[at]) for at in sources]
        self._lookups.note_hits(state, tiers, external_tokens)
        state.trace.begin(LOAD)

    def _report(self, state: RequestState, reason: MissReason | None = None, *, loaded: bool = False) -> None:
        """Report what became of a request. The first part of the engine reports for all."""
        if not self._model.part:
            self._lookups.report(state, reason, loaded=loaded)

    def _skip(self, request: Request, local_tokens: int) -> None:
        """Report a request that no hook knows, once."""
        if not self._model.part and request.request_id not in self._skipped and not request.num_preemptions:
            self._skipped.add(request.request_id)
            self._lookups.skip(request, local_tokens)

    def hits_by_medium(self, request: Request) -> dict[str, int]:
        """Return the tokens of the last hit, by the type of their source tier."""
        state = self._requests.get(request.request_id)
        found: dict[str, int] = {}
        for (_, medium), tokens in () if state is None else state.lookup.hits_by_tier.items():
            found[medium] = found.get(medium, 0) + tokens
        return found

    # Saving, at the end of every step's planning.

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return the loads and saves of the next step."""
        self._bridge.update()
        self._lookups.take_explanations()
        for request_id in output.preempted_req_ids or ():
            if (preempted := self._requests.get(request_id)) is not None:
                self._kv_transfers.note_preemption(preempted)
        blocks_of = self._model.blocks_of(output)
        self._foreign_loads.schedule(output.has_sync_kv_loads)
        for state in self._foreign_loads.depending(output.num_scheduled_tokens, self._requests, blocks_of):
            self._give_up(state)
        self._plan_saves(output)
        copyable = self._foreign_loads.copyable(blocks_of)
        saves = self._saves.step(copyable, self._wait_left(STEP_WAIT_SECONDS))
        if not self._saves.unreserved:  # No chunk can be added to a transfer that has ended.
            self._kv_transfers.end_finished()
        self._bridge.send_outcomes(after=OUTCOMES_SECONDS)
        if self._model.parts == 1 or not self._layout.has_states:  # Parts must find the same states.
            self._lookups.renew()
        self._bridge.probe()
        self._traces.send(after=SEND_SECONDS)
        self._shadow.end_step()
        self._waited_before = self._bridge.waited
        metadata = StepMetadata(self._loads.step(), saves, computes=output.total_num_scheduled_tokens > 0)
        if self._deferred:
            metadata.written = written_blocks(output, self._model)
        return metadata

    def _plan_saves(self, output: SchedulerOutput) -> None:
        """Plan to store the chunks that this step completes, and a few postponed ones of earlier steps."""
        running: list[tuple[RequestState, int, bool]] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            self._lookups.observe(state)
            if state.follow_prompt():
                self._saves.follow_prompt(state)
            if state.stores and not state.is_mixed:
                running.append((state, scheduled, state.saving.settled is None))
        self._saves.plan_step((state, scheduled) for state, scheduled, _ in running)
        if self._saves.possible:
            self._early.scheduled((state, first) for state, _, first in running)
        if self._states is not None and not self._foreign_loads.pending:
            self._states.plan(output, self._requests)

    # Completion.

    def short_loads(self, output: KVConnectorOutput) -> set[str]:
        """Return the failed loads of which some chunks did not arrive, and the others can be loaded again."""
        return {request_id for request_id in output.failed_recving or () if self._loads.is_short(request_id)}

    def update_from_output(self, output: KVConnectorOutput, short: Set[str] | None = None) -> None:
        """Release the leases of loads that the workers have finished. Others' loads may be in ``output``.

        ``short``: the loads to repeat; by default :meth:`short_loads`.
        """
        self._saves.freed(output.finished_sending or ())
        self._foreign_loads.fail(output.invalid_block_ids)
        again = self._requests.keys() & (self.short_loads(output) if short is None else short)
        failed = {request_id for request_id in output.failed_recving or () if request_id in self._loads}
        for request_id in failed:
            state = self._requests.get(request_id)
            if state is not None:
                self._saves.note_failed_load(state)
            if request_id in again:
                continue
            self._stats.add("failed_loads", 1)
            if state is not None:
                self._lookups.note_failed_load(state)
                self._report(state, MissReason.LOAD_FAILED)
                self._kv_transfers.give_up(state)
        for request_id in output.finished_recving or ():
            loaded = request_id in self._loads and request_id not in failed
            if (state := self._requests.get(request_id)) is not None:
                error = "" if loaded else "its tokens are computed instead"
                state.trace.end(LOAD, error, **state.lookup.hits)
            if loaded and state is not None:
                self._lookups.note_loaded(state)
                self._report(state, loaded=True)
            load = self._loads.finish(request_id, again=request_id in again)
            if load is not None:
                self._lookups.give_back(load.state, load.ticket)

    def finished(self, request: Request, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Report the end of a request, and plan its remaining saves.

        Return whether vLLM must keep its blocks until then, and the ``kv_transfer_params`` of its answer.
        """
        state = self._requests.pop(request.request_id, None)
        self._skipped.discard(request.request_id)
        self._traces.end(request.request_id)
        self.adapters.finish(request.request_id)
        self._shadow.present.discard(request.request_id)
        # There may be no further step for a long time.
        self._bridge.poll_if_due()
        self._lookups.take_explanations()
        if state is None:
            if not self._shadow.present:
                self._bridge.send_outcomes()
            return False, self._kv_transfers.answer(request, 0)
        self._shadow.end(state)
        canary = None if state.hints.canary is None else self._canary_report(state)
        self._lookups.cancel(state)
        if state.lookup.computing_since is not None:
            self._lookups.observe(state)
        computed = state.final_tokens(state.computed_at_end(), answer=self._settings.save_decode)
        unknown = state.is_mixed or request.request_id in self._loads
        how = end_of_answer(request)
        if how and state.stores and canary is None and not unknown:
            tokens = token_list(request)[request.num_prompt_tokens :]
            # As it was looked up: what follows it may have replaced its last chunk.
            prompt = self._saves.chunks_at_end(state, int(request.num_prompt_tokens))[0][-2:]
            answer = [key for key in self._saves.chunks_at_end(state, computed)[0][-2:] if key not in prompt]
            self._bridge.answer_ended(prompt, answer, how, tokens)
        if not self._shadow.present:
            self._bridge.send_outcomes()
        if has_failed(request) or unknown:
            self._loads.stop(request.request_id)
            self._give_up(state)
            loading = request.request_id in self._loads  # vLLM keeps the blocks until it has ended.
            held = not loading and self._saves.keep(state, self._model.blocks(block_ids))
            return held, self._kv_transfers.answer(request, 0, canary)
        held = state.stores and self._saves.finish(state, computed, self._model.blocks(block_ids))
        transferred = self._kv_transfers.finish(state)
        if not self._saves.unreserved:
            self._kv_transfers.end_finished()
        return held, self._kv_transfers.answer(request, transferred, canary)

    def _canary_report(self, state: RequestState) -> dict[str, Any]:
        """Return the answer to a canary: ``Report`` in :mod:`kvtier.observability.canary`."""
        chunk, welcome = self._layout.chunk_tokens, self._bridge.welcome
        return {
            "connected": self._bridge.accepts_requests,
            "chunk_tokens": chunk,
            "tiers": [] if welcome is None else welcome.canary_tiers,
            "pools": welcome is not None and welcome.pools,
            "peer": None if welcome is None else welcome.peer,
            "stored": state.saving.stored,
            "located": min(state.lookup.located * chunk, state.request.num_prompt_tokens),
            "loaded": state.lookup.loaded,
            "verifies": self._shadow.share > 0,
        }

    def report(self, request: Request) -> None:
        """Have the workers report a finished request of which only another part has chunks to save."""
        root = request_root(self.weights.current.namespace, request)
        self._saves.hold(RequestState(request, root, self._layout.chunk_tokens))

    # Weights.

    def bind(self, pool: BlockPool) -> None:
        """Set vLLM's block pool."""
        self.weights.bind(pool)
        self.adapters.bind(pool)

    def reset(self) -> None:
        """Use nothing that was stored so far, unless this is the reset after :meth:`set_weight_version`.

        Removes the chunks of weights without an id, because no engine can know whether they are still valid.
        Blocks up to :data:`CLEAR_SECONDS` for that; nothing depends on its success.
        """
        if self.weights.is_reset_of_last_change():
            return
        removed: int | None = 0
        if not self.weights.named:
            removed = self._bridge.clear(CLEAR_SECONDS)
        self.weights.forget()
        self._weights_changed()
        logger.info(
            "reset: %s; no chunk is shared with other engines until vLLM's weight_version is set",
            "the cache process has not answered" if removed is None else f"{removed} chunks removed",
        )

    def set_weight_version(self, version: str) -> None:
        """Use the chunks of the weights that vLLM's ``weight_version`` names."""
        if self.weights.name(version):
            self._weights_changed()
            self.weights.log(version)

    def _weights_changed(self) -> None:
        """Start all requests again with the keys of the new weights, or none if some have KV of earlier ones.

        Chunks that workers are storing at this moment stay those of the earlier weights.
        """
        requests, self._requests = self._requests, {}
        for state in requests.values():
            self._give_up(state)  # Before the bridge uses other weights, as no lookup may be left then.
        self._saves.drop()
        self._loads.fail_all("the weights have changed")
        self._bridge.use_weights(self.weights.current)
        if self._events is not None:
            self._events.forget_all()
        if not self.weights.is_mixed():
            for state in requests.values():
                self._track(state.request, state.hints, state.adapter)

    def loads(self, request_id: str) -> bool:
        """Return whether a request waits for a load from here, and not from another connector."""
        return request_id in self._loads

    def events(self) -> Iterable[KVCacheEvent]:
        """Return the changes of the tiers as vLLM's KV events. Called at the end of a step's results."""
        self._foreign_loads.process()  # vLLM calls this once for each step whose results it has processed.
        if self._events is None:
            return ()
        try:
            return self._events.take()
        except Exception:
            # They depend on internals of vLLM: a version that has changed them must not end the engine.
            logger.exception("KV events of the tiers are disabled")
            self._events = self._lookups.events = self._saves.events = None
            return ()

    def take_stats(self) -> TransferStats | None:
        """Return the counts since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Disconnect from the cache process."""
        self._bridge.close()
