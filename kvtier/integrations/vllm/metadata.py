"""What the scheduler's connector tells the workers' for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(slots=True)
class ChunkCopy:
    """One chunk between arena, or staging buffer, and KV memory.

    ``offset`` is where the chunk object begins in the arena or, with ``staging``, the number of a buffer,
    where each rank's slice begins there. ``blocks`` has, for each KV-cache group, one block for each stored
    page; :data:`NULL_BLOCK` for pages that are not to be loaded.
    """

    lease: int
    offset: int
    tokens: int
    blocks: tuple[list[int], ...]
    staging: int = 0


@dataclass(slots=True)
class Job:
    """The chunks of one request to be loaded, or saved, in this step."""

    request_id: str
    epoch: int
    chunks: list[ChunkCopy]
    last: bool = False
    """Whether vLLM holds a finished request's blocks until this is saved."""

    @property
    def leases(self) -> list[int]:
        """The leases, or reservations, of all chunks."""
        return [chunk.lease for chunk in self.chunks]

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Everything for one step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
