"""Loads in progress, on the scheduler's side: each chunk is passed on to the workers once it is in memory.

vLLM allocates the blocks of the whole expected hit, and waits until the workers have reported the load, as
done or as failed. In each step, the workers receive the chunks that have arrived since the last one. vLLM
steps at least every few milliseconds while a request waits for a load.

If a chunk does not arrive, the load fails, which frees its blocks. The leases of the others are kept: vLLM
asks for the request's hit again, which is now shorter, and complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.bridge.client import LookupState, SchedulerBridge
from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.lookups import hit_of, stalled
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.request import NO_HIT, Hit, RequestState
from kvtier.integrations.vllm.saves import Blocks, chunk_blocks, state_blocks
from kvtier.integrations.vllm.traces import LOAD
from kvtier.memory.layout import STATE_TOKENS

NO_TICKET = 0
LOST = "lost the connection to the cache process"


@dataclass(slots=True)
class Load:
    """The load of one request, until the workers have reported it."""

    state: RequestState
    epoch: int
    ticket: int = NO_TICKET
    """Of the lookup, whose leases are those of the load."""
    hit: Hit = NO_HIT
    blocks: Blocks = ()
    sent: int = 0
    """How many leading leases need no further job: their chunks were sent, or are in vLLM's own cache."""
    stop: int = 0
    """The number of leases of the hit, including that of the state."""
    failure: str = ""
    """Why it will fail, or has failed."""
    ended: bool = False
    """Whether the last job was returned."""
    short: bool = False
    """Whether it has failed because chunks did not arrive. The others can be loaded again."""


class Loads:
    """The loads of an engine. Not thread-safe; nothing blocks."""

    def __init__(self, model: ModelLayout, bridge: SchedulerBridge) -> None:
        self._layout = model.layout
        self._bridge = bridge
        self._loads: dict[str, Load] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def begin(self, state: RequestState, ticket: int, hit: Hit, blocks: Blocks) -> None:
        """Start to load a hit into blocks, from what a lookup has leased.

        All of its leases are kept: if the load has to be repeated, vLLM may have evicted what it had.
        """
        first = state.lookup.local_tokens // self._layout.chunk_tokens
        stop = hit.chunks + self._layout.has_states
        load = Load(state, self._bridge.epoch, ticket, hit, blocks, first, stop)
        self._loads[state.request.request_id] = load

    def fail(self, state: RequestState, reason: str) -> None:
        """Report a load that cannot begin as failed: the engine waits for it."""
        self._loads[state.request.request_id] = Load(state, self._bridge.epoch, failure=reason)

    def fail_all(self, reason: str) -> None:
        """Report all loads as failed, and release their leases."""
        for load in self._loads.values():
            load.failure = reason
            self._bridge.cancel(load.ticket)

    def stop(self, request_id: str) -> None:
        """Load no more for a cancelled request. vLLM keeps its blocks until the workers report the load."""
        if (load := self._loads.get(request_id)) is not None:
            load.stop = load.sent

    def step(self) -> list[Job]:
        """Return what the workers can load in the next step."""
        return [] if not self._loads else list(self._jobs())

    def _jobs(self) -> Iterator[Job]:
        for request_id, load in self._loads.items():
            if load.ended:
                continue
            chunks = self._arrived(load)
            load.ended = bool(load.failure) or load.sent == load.stop
            if chunks or load.ended:
                more, trace = not load.ended, load.state.trace.within(LOAD)
                yield Job(request_id, load.epoch, chunks, more=more, failure=load.failure, trace=trace)

    def _arrived(self, load: Load) -> list[ChunkCopy]:
        """Return the chunks that have arrived since the last call, or set :attr:`Load.failure`."""
        if load.state.is_mixed:
            load.failure = load.failure or "its adapter was loaded again"
        if load.failure or load.sent == load.stop:
            return []
        lookup = self._bridge.found(load.ticket)
        if lookup is None:
            load.failure = LOST
            return []
        stop = load.stop
        if lookup.final:
            found = hit_of(lookup, load.state, self._layout)
            # Of a chunk that is used in part, fewer tokens may need blocks of a window that it does not have.
            if found.tokens < load.hit.tokens or (load.hit.last_tokens and found.tokens > load.hit.tokens):
                load.short = True
                load.failure = f"only {found.tokens} of {load.hit.tokens} tokens have arrived"
                return []
            if load.hit.last_tokens:
                load.hit = found
        elif not self._bridge.responsive:
            load.failure = "the cache process does not answer"
            return []
        elif stalled(load.state, lookup):
            load.failure = f"no chunk has arrived for {load.state.lookup.timeout:.1f} s"
            return []
        else:
            # The last lease comes with the final answer, so a chunk in part is compared before it is sent.
            stop = min(stop, len(lookup.leases))
        chunks = [self._copy(load, lookup, index) for index in range(load.sent, stop)]
        load.sent = max(load.sent, stop)
        return chunks

    def _copy(self, load: Load, lookup: LookupState, index: int) -> ChunkCopy:
        lease, offset = lookup.leases[index], lookup.offsets[index]
        if index == load.hit.chunks:
            pages = state_blocks(self._layout, load.blocks, load.hit.tokens)
            return ChunkCopy(lease, offset, STATE_TOKENS, pages)
        tokens = load.hit.stored_tokens(index, self._layout.chunk_tokens)
        pages = chunk_blocks(self._layout, load.blocks, index, tokens, load.state.lookup.local_tokens)
        staging = lookup.found.staging if lookup.sources[index] == self._bridge.staging_source else 0
        return ChunkCopy(lease, offset, tokens, pages, staging)

    def is_short(self, request_id: str) -> bool:
        """Return whether the load of a request has failed because some of its chunks did not arrive."""
        load = self._loads.get(request_id)
        return load is not None and load.short

    def finish(self, request_id: str, *, again: bool = False) -> Load | None:
        """End a load that the workers have reported, and release its leases.

        ``again``: keep them for another load of what has arrived, and return the load, if they still exist.
        """
        load = self._loads.pop(request_id, None)
        if load is None:
            return None
        if again and self._bridge.found(load.ticket) is not None:
            return load
        self._bridge.cancel(load.ticket)
        return None
