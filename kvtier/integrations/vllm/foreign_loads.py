"""What other connectors of vLLM's ``MultiConnector`` load, as far as saves depend on it.

A synchronous load is reported with the results of its step. Until then, no block of that step and of the
following ones is known to be right. If it has failed, vLLM computes its blocks again, over several steps, and
keeps them in its own cache meanwhile (``Scheduler._handle_invalid_blocks``): KV that is computed from them is
wrong, and must not be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.integrations.vllm.request import RequestState
    from kvtier.integrations.vllm.saves import BlocksOf


MAX_STEPS_IN_FLIGHT = 64
"""vLLM schedules at most one more step than it has pipeline stages before it processes the first one."""


class ForeignLoads:
    """Which blocks of the engine cannot be trusted. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        """``block_tokens``: of the first group. vLLM reports no invalid blocks of models with more."""
        self._block_tokens = block_tokens
        self._scheduled = self._processed = 0
        """The numbers of steps so far."""
        self._last_load = 0
        """The number of the last step with a synchronous load."""
        self._invalid: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether a load may have failed that is not reported yet: nothing may be copied in this step."""
        return self._last_load > max(self._processed, self._scheduled - MAX_STEPS_IN_FLIGHT)

    def copyable(self, blocks_of: BlocksOf) -> BlocksOf:
        """Return a function for the blocks that may be copied in this step: none while :attr:`pending`."""
        return (lambda _: None) if self.pending else blocks_of

    def schedule(self, loads: bool) -> None:
        """Count a step. ``loads``: whether any connector loads synchronously in it."""
        self._scheduled += 1
        if loads:
            self._last_load = self._scheduled

    def process(self) -> None:
        """Count a step whose results vLLM has processed."""
        self._processed = min(self._processed + 1, self._scheduled)

    def fail(self, blocks: Iterable[int]) -> None:
        """Note blocks whose load has failed."""
        self._invalid.update(blocks)

    def depending(
        self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState], blocks_of: BlocksOf
    ) -> list[RequestState]:
        """Return the requests of a step whose KV depends on invalid blocks.

        Blocks that the step computes become valid, unless they are computed from invalid ones.
        """
        if not self._invalid:
            return []
        depending: list[RequestState] = []
        computed: set[int] = set()
        for request_id, tokens in scheduled.items():
            table = (blocks_of(request_id) or ([],))[0]
            first = next((at for at, block in enumerate(table) if block in self._invalid), None)
            if first is None:
                continue
            state = requests.get(request_id)
            if state is None:  # What it has computed is unknown.
                self._invalid.update(table[first:])
                continue
            start = state.request.num_computed_tokens // self._block_tokens
            if first < start:
                depending.append(state)
                self._invalid.update(table[start:])
            else:
                self._invalid.update(table[first:])
                stop = (state.request.num_computed_tokens + tokens) // self._block_tokens
                computed.update(table[start:stop])
        self._invalid -= computed
        return depending
