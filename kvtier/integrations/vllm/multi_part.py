"""Engines of several parts: what their workers report, and how the answers of all parts are combined.

A prefix is loaded as far as every part has it. Parts store, lose and evict their chunks independently; one
whose cache process cannot be reached only makes prompts miss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.utils.network_utils import get_ip

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.lookups import ASK_AGAIN, NOTHING
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.integrations.vllm.saves import Blocks
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.memory.layout import ChunkLayout
from kvtier.settings.peer import join_address, split_address

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtier.bridge.client import WorkerBridge

logger = logging.getLogger("vllm.kvtier")


@dataclass
class PartMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker reports to the scheduler about its part, before the first request."""

    part: int
    layout: ChunkLayout
    namespace: bytes
    epoch: int
    """Its cache process; 0 if it is not connected."""
    address: str
    """Where that cache process listens for other hosts, ``HOST:PORT``; empty if it does not."""


def part_metadata(model: ModelLayout, bridge: WorkerBridge) -> PartMetadata:
    """Return what a worker reports to the scheduler."""
    address = bridge.welcome.peer if bridge.welcome is not None else None
    if address is not None:
        host, port = split_address(address)
        if ip_address(host).is_unspecified:  # It listens on all interfaces.
            host = get_ip()
        address = join_address(host, port)
    return PartMetadata(model.part, model.layout, model.namespace, bridge.epoch, address or "")


def other_parts(
    model: ModelLayout, workers: Iterable[KVConnectorHandshakeMetadata], epoch: int
) -> list[tuple[ModelLayout, str]]:
    """Return the layouts of all parts but the scheduler's, and the address of each; empty for this host.

    ``workers`` includes what other connectors report: vLLM's ``MultiConnector`` gives each connector the
    metadata of the first that has any. ``epoch``: the scheduler's cache process.

    Raises :class:`UnsupportedEngine` if a part is unknown, or is on another host whose cache process does not
    listen.
    """
    workers = list(workers)
    by_part = {worker.part: worker for worker in workers if isinstance(worker, PartMetadata)}
    if not by_part and model.parts == 1:  # A single rank has nothing to report.
        return []
    if others := {type(worker).__name__ for worker in workers if not isinstance(worker, PartMetadata)}:
        raise UnsupportedEngine(
            f"MultiConnector has given kvtier the {', '.join(sorted(others))} of another connector, but this "
            f"engine has {model.parts} parts: list KVTierConnector first in `connectors`, or, beside a "
            "connector like NixlConnector that needs its own, use one host and no pipeline stages"
        )
    if 0 in by_part and by_part[0].epoch not in (0, epoch):
        logger.warning(
            "the workers and the scheduler of this engine use different cache processes, so nothing can be "
            "loaded: start an engine of several hosts with --nnodes, and set the same `socket` on all of them"
        )
    if missing := model.parts - len(by_part):
        raise UnsupportedEngine(f"vLLM reports no worker of {missing} of the engine's {model.parts} parts")
    return [
        (model._replace(layout=part.layout, namespace=part.namespace, part=number), _address(part, epoch))
        for number, part in sorted(by_part.items())
        if number
    ]


def _address(part: PartMetadata, epoch: int) -> str:
    if epoch == 0 or part.epoch in (0, epoch):
        return ""
    if not part.address:
        raise UnsupportedEngine(
            f"part {part.part + 1} of the engine is on another host, whose cache process does not listen for "
            "this one: set peer.listen and peer.secret on all hosts of the engine"
        )
    return part.address


@dataclass
class MultiPartMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers of each part do in one step."""

    steps: list[StepMetadata] = field(default_factory=list)


class SchedulerSides:
    """The scheduler's sides of the parts of an engine, where their answers are combined. Not thread-safe.

    Blocks as each of them does. Most engines have one part.
    """

    def __init__(self, sides: Sequence[SchedulerSide], layout: ChunkLayout) -> None:
        """``sides``: by number of their part; the first one reports events and metrics for all."""
        self.sides = sides
        self._layout = layout

    @property
    def first(self) -> SchedulerSide:
        """The side of the first part, which reports for all: others usually hold the same."""
        return self.sides[0]

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that all parts can load; ``None`` while an answer is pending."""
        if len(self.sides) == 1:
            return self.first.matched_tokens(request, local_tokens)
        found = [side.matched_tokens(request, local_tokens)[0] for side in self.sides]
        counts = [tokens for tokens in found if tokens is not None]
        if len(counts) < len(found):
            return ASK_AGAIN
        tokens = min(counts)
        if tokens < max(counts):
            if self._layout.has_states:  # A state cannot step back.
                return NOTHING
            # Within a chunk, a part with a longer one may lack blocks that attention needs there.
            tokens -= (local_tokens + tokens) % self._layout.chunk_tokens
        return (tokens, True) if tokens > 0 else NOTHING

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata | MultiPartMetadata:
        """Return the loads and saves of the next step; by part, if there are several."""
        steps = [side.build_metadata(output) for side in self.sides]
        return steps[0] if len(steps) == 1 else MultiPartMetadata(steps)

    def update_from_output(self, output: KVConnectorOutput) -> None:
        """Release the leases of loads that the workers have finished."""
        # Another part has the chunks that one lacks, and loads fewer of them again.
        short = set().union(*(side.short_loads(output) for side in self.sides))
        for side in self.sides:
            side.update_from_output(output, short)

    def finished(self, request: Request, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Plan the remaining saves of a finished request. vLLM keeps its blocks until those of every part."""
        answers = [side.finished(request, block_ids) for side in self.sides]
        held = any(holds for holds, _ in answers)
        if held:
            # vLLM waits for a report of every worker.
            for side, (holds, _) in zip(self.sides, answers, strict=True):
                if not holds:
                    side.report(request)
        return held, answers[0][1]
