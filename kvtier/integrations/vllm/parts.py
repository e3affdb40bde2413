"""Parts of an engine whose ranks do not all hold the same layers, or are not all on one host.

A part is a pipeline stage, or as much of it as one host has. Its chunks are objects of their own, in a
namespace of its own and in the cache process of its host: parts store and lose chunks independently. A prefix
can be loaded if every part has it (``multi_part.py``). Most engines are one part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

from kvtier.errors import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Shape(NamedTuple):
    """How an engine's ranks divide a model, from the innermost dimension to the outermost (vLLM's order)."""

    tp: int
    """Tensor parallelism: ranks have other heads, or the same ones if there are too few."""
    pcp: int
    """Prefill context parallelism: ranks have the same KV, unless ``dcp`` divides it."""
    pp: int
    """Pipeline stages, each with other layers."""
    dcp: int
    """Decode context parallelism: ranks among which tokens are divided, ``interleave`` at a time."""
    interleave: int
    hosts: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Shape:
        """Return the shape of one engine: of one replica, with data parallelism."""
        parallel = vllm_config.parallel_config
        return cls(
            parallel.tensor_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
            getattr(parallel, "pipeline_parallel_size", 1),
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "cp_kv_cache_interleave_size", 1),
            getattr(parallel, "nnodes_within_dp", 1),
        )

    @property
    def stage_ranks(self) -> int:
        """The ranks of one pipeline stage."""
        return self.tp * self.pcp

    @property
    def ranks(self) -> int:
        """The ranks of the engine."""
        return self.stage_ranks * self.pp

    @property
    def part_ranks(self) -> int:
        """The ranks of one part."""
        # As many consecutive ones as are all of one stage and on one host.
        return math.gcd(self.stage_ranks, self.ranks // self.hosts)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.ranks // self.part_ranks

    def tp_rank(self, rank: int) -> int:
        """Return a rank's number within its tensor-parallel group."""
        return rank % self.tp

    def dcp_rank(self, rank: int) -> int:
        """Return which of the divided tokens a rank has (``initialize_model_parallel`` in vLLM)."""
        pcp_rank = rank // self.tp % self.pcp
        return (self.tp_rank(rank) * self.pcp + pcp_rank) % self.dcp


class Part(NamedTuple):
    """Consecutive ranks of an engine that store chunks together."""

    number: int
    shape: Shape

    @property
    def ranks(self) -> range:
        """Its ranks, as the engine counts them."""
        first = self.number * self.shape.part_ranks
        return range(first, first + self.shape.part_ranks)

    def __str__(self) -> str:
        """Describe what its chunks mean, for the layout; empty for an engine without such parallelism."""
        shape = self.shape
        sizes = {"pp": shape.pp, "pcp": shape.pcp, "dcp": shape.dcp}
        used = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if shape.dcp > 1:
            used.append(f"interleave {shape.interleave}")
        if shape.parts > 1:
            used.append(f"tp {shape.tp}, part {self.number + 1} of {shape.parts}")
        return ", ".join(used)


def part_of(vllm_config: VllmConfig, rank: int) -> Part:
    """Return the part that a rank belongs to. Raises :class:`LayoutError` if the shape is unsupported."""
    shape = Shape.of(vllm_config)
    if shape.ranks % shape.hosts:
        raise LayoutError(f"{shape.ranks} ranks on {shape.hosts} hosts: kvtier needs as many on each host")
    if shape.hosts > 1 and shape.pcp > 1 and shape.dcp == 1:
        # vLLM passes on the metadata of one of several such ranks only.
        raise LayoutError(
            f"prefill_context_parallel_size is {shape.pcp} on {shape.hosts} hosts: kvtier supports that with "
            "decode_context_parallel_size above 1, or on one host"
        )
    return Part(rank % shape.ranks // shape.part_ranks, shape)


def engine_rank() -> int:
    """Return this worker's rank within its engine."""
    stage, context, tensor = get_pp_group(), get_pcp_group(), get_tp_group()
    part = stage.rank_in_group * context.world_size + context.rank_in_group
    return int(part * tensor.world_size + tensor.rank_in_group)
