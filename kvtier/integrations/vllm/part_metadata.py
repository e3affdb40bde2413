"""What the workers of an engine report to its scheduler about the other parts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.utils.network_utils import get_ip

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.memory.layout import ChunkLayout
from kvtier.settings.peer import join_address, split_address

if TYPE_CHECKING:
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
        (
            model._replace(layout=part.layout, namespace=part.namespace, part=number),
            _address(part, epoch),
        )
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
