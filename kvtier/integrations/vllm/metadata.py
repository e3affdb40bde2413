"""Connector metadata that the scheduler sends to the workers for one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


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
    """Why the load fails. Each worker adds its own reasons."""
    adapter: tuple[int, str] | None = None
    """For saves: vLLM's number of the LoRA adapter, and the identity of what the keys expect it to be."""
    trace: bytes = b""
    """The trace that it belongs to; empty if it is not traced."""

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


Tables = Sequence[Sequence[int]]
"""The block ids of each of vLLM's KV-cache groups."""


def written_blocks(output: SchedulerOutput, model: ModelLayout) -> list[int]:
    """Return the blocks that are new to the requests of a step: it changes no other KV that may be saved.

    A worker knows a request's blocks from these fields alone. What a request had before is either final, or
    was in the list of an earlier step. So preempted and aborted requests, blocks that have left a window and
    copies on write need no rules of their own. Blocks that a connector loads into are not included.
    """
    cached = output.scheduled_cached_reqs
    known = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    return list(
        chain(
            *(_beyond(model, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs),
            *(
                _beyond(model, tables, computed) if request in cached.resumed_req_ids else chain(*tables)
                for request, tables, computed in known
                if tables
            ),
            output.new_block_ids_to_zero or (),
            (copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()),
        )
    )


def _beyond(model: ModelLayout, tables: Tables, computed: int) -> Iterator[int]:
    """Yield the blocks after ``computed`` tokens: those before are shared with other requests, or loaded."""
    groups = dict(zip(model.group_ids, model.layout.groups, strict=True))
    for number, ids in enumerate(tables):
        group = groups.get(number)
        # A state advances in place. Of groups that are not stored, the block size is unknown here.
        first = 0 if group is None or group.state else computed // group.block_tokens
        yield from ids[first:]
