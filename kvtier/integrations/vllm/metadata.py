"""Connector metadata that the scheduler sends to the workers for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtier.integrations.vllm.copies import ChunkCopy


@dataclass(slots=True)
class Job:
    """The chunks of one request to load or save in this step."""

    request_id: str
    epoch: int
    chunks: list[ChunkCopy]
    last: bool = False
    """Whether this is the last save of a finished request, after which vLLM frees its blocks."""
    more: bool = False
    """Whether other jobs of the same load follow. It is reported after the last one."""
    failure: str = ""
    """Why the load fails."""
    adapter: tuple[int, str] | None = None
    """For saves: vLLM's number of the LoRA adapter, and the identity of what the keys expect it to be."""

    @property
    def leases(self) -> list[int]:
        """The leases, or reservations, of all chunks."""
        return [chunk.lease for chunk in self.chunks]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """All loads and saves of one step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    computes: bool = True
    """Whether any token is computed in this step."""
    written: list[int] = field(default_factory=list)
    """The blocks that this step may change, if copies may be in flight during a step."""
