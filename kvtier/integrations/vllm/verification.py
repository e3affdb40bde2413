"""Shadow verification, on the scheduler's side: an idle engine computes a prompt that it could load.

vLLM is told of no hit, and stores the prompt as any other. Room for chunks that are held is granted for
comparison only (:mod:`kvtier.pipeline.verify`). The leases of the lookup keep these chunks meanwhile.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

from kvtier.integrations.vllm.lookups import ASK_AGAIN, NOTHING, Lookups, stalled
from kvtier.integrations.vllm.request import RequestState, VerifyProgress

if TYPE_CHECKING:
    from kvtier.bridge.client import SchedulerBridge
    from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")

MAX_TOKENS = 16_384
"""The longest prompt that is computed for that."""


class ShadowVerification:
    """Chooses the requests that an engine computes instead of loading them. Not thread-safe."""

    def __init__(
        self, share: float, dtype: str, bridge: SchedulerBridge, lookups: Lookups, stats: TransferStats
    ) -> None:
        """``share``: of all loads. ``dtype``: type of the values of the KV cache."""
        self.share = share
        self._dtype = dtype
        self._bridge = bridge
        self._lookups = lookups
        self._stats = stats
        self._due = random.random()  # noqa: S311 - no secret
        """How many loads are to be verified, 1 at most: those of a busy time are not caught up on."""
        self.present: set[str] = set()
        """The requests that vLLM has, whether or not they are cached."""
        self._waiting: RequestState | None = None
        """The request that is chosen, and not scheduled yet."""

    def began(self, state: RequestState) -> None:
        """Have what a canary stores a second time compared with the first: it measures the tolerance."""
        if self.share and state.hints.canary is not None and not state.request.mm_features:
            state.verify.dtype = self._dtype

    def offer(self, state: RequestState, found: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """Return what to report to vLLM of a hit: ``found``, or nothing if its prompt is to be computed."""
        if not state.verify.counted:
            state.verify.counted = True
            self._due = min(1.0, self._due + self.share)
        ticket = state.lookup.ticket
        lookup = None if ticket is None or not self._chooses(state) else self._bridge.found(ticket)
        if lookup is None or stalled(state, lookup):
            return found
        if not lookup.final:  # It is compared in memory.
            return ASK_AGAIN
        self._due -= 1.0
        self._waiting = state
        state.verify.ticket, state.verify.dtype = self._lookups.take(state), self._dtype
        name, tokens = state.request.request_id, state.lookup.hit.tokens
        self._stats.add("verified_tokens", tokens)
        logger.info("request %s: computing %d tokens that are stored, to verify them", name, tokens)
        return NOTHING

    def _chooses(self, state: RequestState) -> bool:
        hit, request = state.lookup.hit, state.request
        return (
            self._due >= 1.0
            and self.present == {request.request_id}
            and request.num_tokens <= MAX_TOKENS
            and hit.chunks > (hit.last_tokens > 0)  # Another prompt's chunk is not computed.
            # Clients may name two images alike, which would put what is sound in quarantine.
            and not request.mm_features
            and state.stores
            and state.transfer.ticket is None
            and state.hints.expect is None
        )

    def hides_local(self, state: RequestState) -> bool:
        """Whether a request is chosen and not scheduled yet, and vLLM must not use its own cache for it.

        What that has may have been loaded. In the step in which the flag is set, vLLM would load nothing, but
        use its own cache: so it is set between two steps only.
        """
        if self._waiting is state:
            state.request.skip_reading_prefix_cache = False
        return self._waiting is state

    def end_step(self) -> None:
        """Have vLLM look up nothing in its own cache for the chosen request, in the next step."""
        if self._waiting is not None:
            self._waiting.request.skip_reading_prefix_cache = True

    def scheduled(self, state: RequestState) -> None:
        """Note that vLLM computes a request, or that it has ended."""
        if self._waiting is state:
            self._waiting = None

    def end(self, state: RequestState) -> None:
        """Release what keeps the chunks of a request. What has room is still compared."""
        self.scheduled(state)
        if state.verify.ticket is not None:
            self._bridge.cancel(state.verify.ticket)
            state.verify.ticket = None

    def repeat(self, state: RequestState) -> None:
        """Load a request that vLLM schedules again, after it was preempted."""
        if state.verify.ticket is not None and self._waiting is not state:
            self.end(state)
            state.verify = VerifyProgress(counted=True)
