"""Health check of a pool: version, memory use and eviction policy, or the problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.backends.redis.control import Control, ControlFailed
from kvtier.backends.redis.errors import describe_control_failure, describe_refusal
from kvtier.backends.redis.resp import ErrorReply
from kvtier.backends.redis.topology import Topology
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.errors import TierError
from kvtier.units import format_size


async def check(product: str, control: Control, topology: Topology, seconds: float) -> str:
    """Query every primary and return a one-line summary. Raises :class:`TierError`."""
    deadline = Deadline(seconds)
    topology.invalidate()
    try:
        placement = await topology.placement(deadline)
        answers = [
            (endpoint, await control.info(endpoint, deadline.remaining())) for endpoint in placement.endpoints
        ]
    except ControlFailed as failed:
        raise TierError(*describe_control_failure(failed)) from failed
    except TimeoutError as error:
        raise TierError(f"no answer within {seconds:g} s") from error
    for endpoint, info in answers:
        if info["role"] != "master":
            raise TierError(*describe_refusal(ErrorReply("READONLY", ""), endpoint))
        if info.get("cluster_enabled") and placement.by_slot is None:
            raise TierError(*describe_refusal(ErrorReply("MOVED", ""), endpoint))
    if placement.by_slot is not None and (unassigned := placement.by_slot.count(None)):
        raise TierError(
            f"{unassigned} of {len(placement.by_slot)} hash slots of the cluster have no server, and their "
            "chunks are misses",
            "check CLUSTER INFO",
        )
    return _summary(product, [info for _, info in answers])


def _summary(product: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """Summarize ``INFO``. Version and eviction policy are those of the first server."""
    first = answers[0]
    servers = f" in a cluster of {len(answers)} primaries" if len(answers) > 1 else ""
    used = format_size(sum(_number(info, "used_memory") for info in answers))
    limits = [_number(info, "maxmemory") for info in answers]
    policy = first.get("maxmemory_policy", "unknown")
    # For old clients, Valkey also reports the Redis version that it is compatible with.
    version = first.get("valkey_version") or first.get("redis_version", "of unknown version")
    if not all(limits):
        return f"{product} {version}{servers}, {used} used, no maxmemory: memory use is unlimited"
    memory = f"{product} {version}{servers}, {used} of {format_size(sum(limits))} used"
    if policy == "noeviction":
        return f"{memory}, maxmemory-policy noeviction: rejects chunks when full (allkeys-lru evicts)"
    return f"{memory}, maxmemory-policy {policy}"


def _number(info: Mapping[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0
