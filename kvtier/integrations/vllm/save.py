"""What to store of one request, and the room for it."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.bridge.client import Slots
from kvtier.bridge.protocol import Run
from kvtier.integrations.vllm.request import RequestState
from kvtier.memory.keys import ChunkKey, join_keys


@dataclass(slots=True, eq=False)
class Save:
    """Consecutive chunks of one request to store, or one state."""

    state: RequestState
    first: int
    keys: list[ChunkKey]
    sizes: list[int]
    """Number of tokens of each chunk."""
    preemptions: int
    """The request's preemption count: after a further preemption it has lost its blocks."""
    kv_transfer: int
    """Ticket of the KV transfer for which to reserve room in the staging buffer as well; 0 for none."""
    is_state: bool = False
    state_blocks: tuple[list[int], ...] | None = None
    """The blocks of a state, in the one step in which they are valid."""
    early: bool = False
    """Whether room is reserved in advance: what to store does not exist yet."""
    fresh: bool = True
    """Whether what to store exists since this step, if it is not :attr:`early`."""
    continued: bytes = b""
    """For a state: the last chunk of the hit that the request continued."""
    void: bool = False
    epoch: int = 0
    """The cache process that the reservation was requested from."""
    connection: int = 0
    """Over which of the connections: reservations are void when it is lost."""
    slots: list[Slots] | None = None
    """The granted room, for each of :attr:`runs`."""

    @property
    def leases(self) -> list[int]:
        """The reservations of the granted room."""
        return [slot.lease for room in self.slots or () for slot in room if slot is not None]

    @property
    def runs(self) -> list[Run]:
        """The room to reserve: in the staging buffer, if any, then in the arena."""
        state, start = self.state, self.first * self.state.chunk_tokens
        parent, keys = state.parent(self.first), join_keys(self.keys)
        arena = Run(
            parent,
            keys,
            self.sizes[-1],
            hints=state.chunk_hints,
            block_hashes=state.block_hashes(start, start + sum(self.sizes)),
            continued=self.continued,
            awaited=state.kv_transfer is not None,
        )
        return [Run(parent, keys, self.sizes[-1], self.kv_transfer), arena] if self.kv_transfer else [arena]
