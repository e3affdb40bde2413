"""What the scheduler's connector tells the workers' for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtier.integrations.vllm.copies import ChunkCopy


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


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Everything for one step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    computes: bool = True
    """Whether any token is computed in this step."""
