"""How fast the engine computes prompts, measured from the steps of its requests."""

from __future__ import annotations

import time

from kvtier.integrations.vllm.request import RequestState
from kvtier.tiers.throughput import Throughput


class PrefillSpeed:
    """The recent speed, under the load that the engine has. Not thread-safe."""

    def __init__(self) -> None:
        self._throughput = Throughput()

    def observe(self, state: RequestState) -> None:
        """Follow a request, in each step that it is scheduled for, and at its end."""
        request = state.request
        if state.computing_since is None:
            state.computing_since, state.computed_before = time.monotonic(), request.num_computed_tokens
        elif state.computing_since and request.num_tokens > request.num_prompt_tokens:
            # The first token is there. Later steps of the request compute single tokens.
            if not request.num_preemptions:
                tokens = request.num_prompt_tokens - state.computed_before
                self._throughput.record(tokens, time.monotonic() - state.computing_since)
            state.computing_since = 0.0

    def expected(self, tokens: int) -> float:
        """Return how many seconds a prompt of so many tokens takes; 0 if unknown."""
        return self._throughput.expected(tokens) or 0.0
