"""Look up what is stored of a prompt, and decide how far the answer can be used, and from which chunks."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import Outcome, RequestInfo
from kvtier.catalog.misses import MissReason
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.integrations.vllm.plain import shown
from kvtier.integrations.vllm.request import NO_HIT, Hit, RequestState
from kvtier.integrations.vllm.request_reports import RequestReports
from kvtier.integrations.vllm.traces import LOOKUP
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import beginning_of, equal_blocks
from kvtier.pipeline.query import Query
from kvtier.settings import Settings
from kvtier.tiers.throughput import Throughput

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.bridge.client import LookupState
    from kvtier.integrations.vllm.kv_events import KVEvents
    from kvtier.integrations.vllm.metrics import TransferStats
    from kvtier.integrations.vllm.prompt_transfers import PromptTransfers
    from kvtier.memory.layout import ChunkLayout

logger = logging.getLogger("vllm.kvtier")

TIMEOUT_SECONDS = 1.0
"""Time after the prefetch deadline until a request is computed instead of waiting for an answer."""
MAX_WAIT_SECONDS = 120.0
"""Timeout of a lookup without progress with ``prefetch.policy: wait``, because a fetch may stall."""
RENEW_SECONDS = 0.25
"""Age of an answer from which a queued request asks once more: what others have left meanwhile, such as the
turn before it, may be stored by now."""
RENEWED = 8
"""Maximum number of requests at the head of the queue: more are rarely scheduled in one step."""
CONNECT_SECONDS = 0.1
"""How long a request waits for a cache process that has been reached and has yet to welcome the engine."""
MAX_IMAGES = 64
"""Of what is shown of a request."""
NOTHING = (0, False)
ASK_AGAIN = (None, False)


def hit_of(lookup: LookupState, state: RequestState, layout: ChunkLayout) -> Hit:
    """Return what a lookup has found; before its final answer, what it will have found if no chunk fails.

    Its last chunk may belong to another prompt: as many of its blocks are used as are equal.
    """
    chunk, tokens, chunks = layout.chunk_tokens, int(state.request.num_tokens), lookup.total
    if chunks < lookup.found.needed:
        return NO_HIT
    last_tokens = lookup.found.last_tokens
    if not last_tokens:
        # With states, the last lease is that of the state.
        chunks = max(0, chunks - layout.has_states)
        return Hit(min(chunks * chunk, state.lookup.covered), chunks)
    start = (chunks - 1) * chunk
    equal = 0 if start >= tokens else _equal(lookup, state, start)
    if state.lookahead:  # The KV of the last of these blocks depends on tokens after it.
        equal -= 1
    used = layout.usable(last_tokens, min(max(0, equal) * layout.granularity, tokens - start))
    return Hit(start + used, chunks, last_tokens) if used else Hit(min(start, tokens), chunks - 1)


def reported_tokens(hit: Hit, state: RequestState, layout: ChunkLayout, *, whole_blocks: bool = False) -> int:
    """Return how many tokens of a hit vLLM can use. ``whole_blocks``: it drops hits that end within a block.

    It computes the last token of a prompt in any case. If the whole prompt is hit, it first frees the blocks
    outside the window of the next token: the window of the last token may include one of them. A prompt of
    one token would have no computed token then, and be looked up again and again.
    """
    tokens, chunk = int(state.request.num_tokens), layout.chunk_tokens
    whole_blocks = whole_blocks and not layout.has_states
    if hit.tokens < tokens or (tokens > 1 and not layout.has_windows and not whole_blocks):
        return hit.tokens
    start = (hit.chunks - 1) * chunk
    stored, before_last = hit.stored_tokens(hit.chunks - 1, chunk), tokens - 1 - start
    if before_last and (whole_blocks or not layout.continues(stored, before_last)):
        before_last = layout.usable(stored, before_last)
    return start + before_last


def _equal(lookup: LookupState, state: RequestState, start: int) -> int:
    """Return how many blocks of the last chunk are the prompt's from ``start`` on, or will have been."""
    if not lookup.final:
        return lookup.found.likely_blocks
    before = start // state.chunk_tokens
    if before > len(state.keys) or lookup.found.parent != state.parent(before):
        return 0  # The same tokens after others.
    return equal_blocks(state.block_hashes(start, int(state.request.num_tokens)), lookup.found.block_hashes)


def described(state: RequestState, *, show_text: bool) -> RequestInfo:
    """Return what a request is, to tell later what became of it. With ``show_text``, with its tokens."""
    request, adapter = state.request, state.adapter
    places = [feature.mm_position for feature in request.mm_features[:MAX_IMAGES]]
    images = [(place.offset, place.length) for place in places]
    identity = "" if adapter is None else adapter.identity
    block = state.granularity
    beginning = beginning_of(request.prompt_token_ids or (), block) if block else b""
    prompt = array("I", request.prompt_token_ids).tobytes() if show_text else b""
    return RequestInfo(identity, images, beginning, prompt)


def reads_nothing(state: RequestState) -> bool:
    """Return whether a request may load nothing, as its client wants."""
    return not state.loads or bool(state.request.skip_reading_prefix_cache)


def stalled(state: RequestState, lookup: LookupState) -> bool:
    """Return whether a lookup has made no progress for as long as its request may wait."""
    progress = state.lookup
    return time.monotonic() >= max(progress.asked_at, lookup.updated_at) + progress.timeout


class Lookups:
    """The lookups of an engine's requests, until their leases pass to a load. Not thread-safe.

    Only :meth:`matched` blocks, for up to its ``wait``.
    """

    def __init__(
        self,
        settings: Settings,
        layout: ChunkLayout,
        bridge: SchedulerBridge,
        kv_transfers: PromptTransfers,
        stats: TransferStats,
        *,
        whole_blocks: bool = False,
    ) -> None:
        """``whole_blocks``: see :func:`reported_tokens`."""
        self._layout = layout
        self._bridge = bridge
        self._kv_transfers = kv_transfers
        self._stats = stats
        self._whole_blocks = whole_blocks
        self._partial_chunks = settings.partial_chunks
        waits = settings.prefetch.policy == "wait"
        self._timeout = MAX_WAIT_SECONDS if waits else settings.prefetch.deadline + TIMEOUT_SECONDS
        self._open: dict[str, RequestState] = {}
        """Requests that were looked up, in the order of arrival: vLLM's queue, unless it has priorities."""
        self._reports = RequestReports(stats)
        self._explains = 0
        """The cache process that explanations are awaited from."""
        self._throughput = Throughput()
        """How fast the engine computes prompts, under the load that it has."""
        self._warn = RateLimitedLog(logger)
        self.events: KVEvents | None = None
        """Publishes the chunks that are held, if vLLM publishes KV events."""

    def observe(self, state: RequestState) -> None:
        """Measure how fast prompts are computed: in each step with a request, and at the end of one."""
        request, progress = state.request, state.lookup
        if progress.computing_since is None:
            progress.computing_since, progress.computed_before = time.monotonic(), request.num_computed_tokens
        elif progress.computing_since and request.num_tokens > request.num_prompt_tokens:
            # The first token is there. Later steps of the request compute single tokens.
            if not request.num_preemptions:
                tokens = request.num_prompt_tokens - progress.computed_before
                self._throughput.record(tokens, time.monotonic() - progress.computing_since)
            progress.computing_since = 0.0

    def look_up(self, state: RequestState) -> None:
        """Look up the whole prompt of a request, if it may load."""
        progress = state.lookup
        if reads_nothing(state) or progress.load_failed or not self._bridge.accepts_requests:
            return
        query, info = self._query(state)
        if self.events is not None:
            # Chunks of earlier runs and of other engines: only this request knows their tokens.
            self.events.add(state, 0, query.keys, query.tokens)
        progress.ticket = self._bridge.look_up(query, info, state.trace.begin(LOOKUP))
        progress.timeout = self._timeout + query.expect_seconds
        progress.waited = False
        if progress.ticket is None:
            state.trace.end(LOOKUP, "the cache process does not answer")
            return
        self._open[state.request.request_id] = state
        progress.asked = progress.asked or progress.ticket
        progress.asked_at = time.monotonic()
        if state.hints.canary is None:
            self._stats.add("looked_up_tokens", query.tokens)

    def _query(self, state: RequestState) -> tuple[Query, RequestInfo | None]:
        """Return what to ask of the whole prompt of a request, and what the request is."""
        request = state.request
        # A state cannot step back to compute the last token again.
        keys = list(state.extend(request.num_tokens - self._layout.has_states))
        covered = len(keys) * self._layout.chunk_tokens
        if not self._layout.has_states and request.num_tokens == request.num_prompt_tokens:
            tokens = int(request.num_tokens)
            ends = [tokens] if self._kv_transfers.wants_tail(state) else []
            ends += [state.stored_prompt(self._layout)] if self._partial_chunks else []
            for end in ends:
                if (tail := state.tail_key(end)) is not None:
                    keys.append(tail)
                    covered = end
                    break
        state.lookup.covered = covered
        expected = self._kv_transfers.expected(state, keys)
        query = Query(
            keys,
            covered,
            hints=state.chunk_hints,
            block_tags=self._block_tags(state),
            compute_seconds=self._throughput.expected(covered) or 0.0,
            expect_seconds=expected.seconds,
            expect_chunks=expected.chunks,
            repeated=state.lookup.asked_at > 0,
        )
        canary, welcome = state.hints.canary, self._bridge.welcome
        if canary is not None:  # It loads even what is computed sooner, and is not reported.
            changes = {"compute_seconds": 0.0, "repeated": True, "canary": canary.tier}
            return msgspec.structs.replace(query, **changes), None
        return query, described(state, show_text=welcome is not None and welcome.show_text)

    def awaits_connection(self, state: RequestState) -> bool:
        """Return whether a request waits, since the cache process was restarted and is being connected."""
        progress, now = state.lookup, time.monotonic()
        if reads_nothing(state) or progress.load_failed or not self._bridge.connecting:
            return False
        progress.connecting_since = progress.connecting_since or now
        return now < progress.connecting_since + CONNECT_SECONDS

    def _block_tags(self, state: RequestState) -> PromptTags | None:
        """Return the tags of the whole blocks of a prompt; ``None`` if no block of it is whole."""
        block_tags = block_tags_of(state.block_hashes(0, state.request.num_tokens))
        if not block_tags:
            return None
        return PromptTags(state.root, block_tags, self._layout.chunk_tokens // self._layout.granularity)

    def matched(self, state: RequestState, local_tokens: int, wait: float) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``local_tokens`` can be loaded; ``None`` while that is pending.

        Ends a lookup without an answer in time. Blocks up to ``wait`` seconds, once for each lookup.
        """
        progress = state.lookup
        self._adopt_renewal(state)
        assert progress.ticket is not None
        # vLLM asks again in each step: a wait in every one of them would slow down all other requests.
        wait = 0.0 if progress.waited else wait
        progress.waited = True
        lookup = self._bridge.found(progress.ticket, wait)
        progress.local_tokens, progress.unanswered = local_tokens, MissReason.NOT_LOOKED_UP
        if lookup is None:
            self.take(state)
            return NOTHING
        if not self._bridge.responsive:
            self.cancel(state)
            return NOTHING
        progress.unanswered = None
        progress.located = max(progress.located, lookup.known)
        # Chunks in flight are loaded as they arrive, once there is something to load.
        begins = lookup.located and len(lookup.leases) > local_tokens // self._layout.chunk_tokens
        if not lookup.final and not begins:
            if not stalled(state, lookup):
                return ASK_AGAIN
            self._warn(
                "request %s: no chunk has arrived for %.1f s, %d are in flight: computing the prompt instead",
                state.request.request_id,
                progress.timeout,
                lookup.found.fetching,
            )
            self.cancel(state)
            progress.unanswered = MissReason.TOO_LATE
            return NOTHING
        progress.branch = lookup.found.held
        progress.hit = hit_of(lookup, state, self._layout)
        tokens = reported_tokens(progress.hit, state, self._layout, whole_blocks=self._whole_blocks)
        return (tokens - local_tokens, True) if tokens > local_tokens else NOTHING

    def renew(self) -> None:
        """Have the head of the queue ask once more where answers are old, but not where chunks are pushed."""
        now = time.monotonic()
        for state in list(islice(self._open.values(), 0 if self._bridge.late else RENEWED)):
            self._adopt_renewal(state)
            progress, hints = state.lookup, state.hints
            lookup = None if progress.ticket is None else self._bridge.found(progress.ticket)
            if lookup is None or not lookup.final or now < progress.asked_at + RENEW_SECONDS:
                continue
            expects = hints.expect is not None or hints.canary is not None or progress.renewal is not None
            worth = self._layout.stored_tokens(progress.covered) - 1
            if not expects and hit_of(lookup, state, self._layout).tokens < worth:
                progress.renewal = self._bridge.look_up(*self._query(state), renews=progress.asked)
                progress.asked_at = now

    def _adopt_renewal(self, state: RequestState) -> None:
        """Use the answer of a renewed lookup once it is complete, unless it is worse."""
        progress = state.lookup
        if progress.renewal is None or progress.ticket is None:
            return
        new, old = self._bridge.found(progress.renewal), self._bridge.found(progress.ticket)
        if new is not None and not new.final:
            return
        if new is not None and old is not None and new.total >= old.total:
            progress.ticket, progress.renewal = progress.renewal, progress.ticket
        self._cancel_renewal(state)

    def _cancel_renewal(self, state: RequestState) -> None:
        if state.lookup.renewal is not None:
            self._bridge.cancel(state.lookup.renewal)
            state.lookup.renewal = None

    def accept(self, state: RequestState, external_tokens: int) -> Hit:
        """Return the hit that vLLM has allocated blocks for: as many tokens as were reported, or fewer.

        What was reported counts, whatever has been lost since: vLLM takes these tokens for computed unless
        their load fails. They are fewer if another part of the engine has fewer.
        """
        progress, chunk = state.lookup, self._layout.chunk_tokens
        hit = progress.hit.up_to(progress.local_tokens + external_tokens, chunk)
        progress.hit_chunks = max(hit.chunks, progress.local_tokens // chunk)
        return hit

    def take(self, state: RequestState) -> int:
        """Return the ticket of a lookup, whose leases the caller releases from now on."""
        ticket, state.lookup.ticket = state.lookup.ticket, None
        self._open.pop(state.request.request_id, None)
        self._cancel_renewal(state)
        assert ticket is not None
        return ticket

    def give_back(self, state: RequestState, ticket: int) -> None:
        """Use a lookup again whose load has failed."""
        state.lookup.ticket = ticket

    def cancel(self, state: RequestState) -> None:
        """Cancel a request's lookup, if any, and release its leases."""
        if state.lookup.ticket is not None:
            self._bridge.cancel(self.take(state))

    def note_failed_load(self, state: RequestState) -> None:
        """Compute a request without further attempts to load."""
        state.lookup.load_failed = True

    def note_loaded(self, state: RequestState) -> None:
        """Count what a request has loaded; of a canary, only for its answer."""
        for tier, tokens in state.lookup.hits.items():
            if state.hints.canary is None:
                self._stats.add("hit_tokens", tokens, tier)
            else:
                state.lookup.loaded[tier] = tokens

    def note_hits(self, state: RequestState, tiers: Sequence[tuple[str, str]], external_tokens: int) -> None:
        """Note the name and type of the tier of each chunk of a hit, which is reported to vLLM."""
        progress = state.lookup
        progress.hits_by_tier, stop = {}, progress.local_tokens + external_tokens
        for index, tier in enumerate(tiers):
            start = max(index * state.chunk_tokens, progress.local_tokens)
            tokens = min((index + 1) * state.chunk_tokens, stop) - start
            if tokens > 0:
                progress.hits_by_tier[tier] = progress.hits_by_tier.get(tier, 0) + tokens

    def report(self, state: RequestState, reason: MissReason | None = None, *, loaded: bool = False) -> None:
        """Report what became of a request, once it is known what it loads; see :class:`RequestReports`.

        ``reason``: why it has loaded nothing, if the cache process cannot know.
        """
        progress, request = state.lookup, state.request
        if progress.reported or request.num_preemptions or state.hints.canary is not None:
            return
        progress.reported = True
        reason = reason or progress.unanswered
        if not progress.asked:
            reason = reason or self._why_not_asked(state)
        if reason is not None or not loaded:
            progress.hits_by_tier = {}
        self._end(request, progress.asked, progress.local_tokens, progress.hits, reason)

    def note_local(self, state: RequestState, local_tokens: int) -> None:
        """Note what vLLM's own cache holds of a request that was not looked up."""
        state.lookup.local_tokens = local_tokens

    def skip(self, request: Request, local_tokens: int) -> None:
        """Report a request that does not use the cache."""
        self._end(request, 0, local_tokens, {}, MissReason.DISABLED_BY_REQUEST)

    def _end(
        self, request: Request, asked: int, local: int, hits: dict[str, int], reason: MissReason | None
    ) -> None:
        # Nothing in a request may end the engine, least of all what is said of it.
        try:
            tokens = int(request.num_prompt_tokens)
            outcome = Outcome(asked, shown(request.request_id), tokens, local, hits, reason)
            self._bridge.end(outcome)
            self._reports.add(outcome)
        except Exception as error:
            self._warn("request %s is not reported: %r", request.request_id, error)

    def take_explanations(self) -> None:
        """Log the requests whose misses were explained since the last step, or will never be."""
        # First: they may have come with a connection that is lost by now.
        for explanation in self._bridge.take_explanations():
            self._reports.explain(explanation)
        if self._bridge.epoch != self._explains:
            if self._explains:
                self._reports.lost()
            self._explains = self._bridge.epoch

    def _why_not_asked(self, state: RequestState) -> MissReason:
        if reads_nothing(state):
            return MissReason.DISABLED_BY_REQUEST
        if not self._bridge.accepts_requests:
            return MissReason.NOT_LOOKED_UP
        return MissReason.SHORTER_THAN_A_BLOCK
