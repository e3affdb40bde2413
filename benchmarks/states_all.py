"""A connector that stores every state that vLLM keeps, for ``benchmarks/states.py``."""

from __future__ import annotations

from kvtier.integrations.vllm.connector import KVTierConnector
from kvtier.integrations.vllm.request import RequestState
from kvtier.integrations.vllm.scheduler import SchedulerSide


class AllStates(KVTierConnector):
    """kvtier's connector without its admission of states."""

    def _open_part(self, *arguments: object, **more: object) -> SchedulerSide:
        side = super()._open_part(*arguments, **more)  # type: ignore[arg-type]
        states = side._states
        assert states is not None
        every = states._admits

        def admits(state: RequestState, chunks: int) -> bool:
            return chunks not in state.early.saved_states or every(state, chunks)

        states._admits = admits  # type: ignore[method-assign]
        return side
