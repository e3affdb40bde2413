"""How a pool is, in words, for people: what answers there, how full it is, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.backends.redis.control import Control, ControlFailed
from kvtier.backends.redis.errors import control_failure_in_words, refusal_in_words
from kvtier.backends.redis.resp import ErrorReply
from kvtier.backends.redis.topology import Topology
from kvtier.errors import TierError
from kvtier.sockets.connection import Deadline
from kvtier.units import format_size


async def check(product: str, control: Control, topology: Topology, seconds: float) -> str:
    """What every primary says of itself, in one phrase. Raises :class:`TierError` in words."""
    deadline = Deadline(seconds)
    topology.forget()
    try:
        placement = await topology.placement(deadline)
        answers = [
            (endpoint, await control.info(endpoint, deadline.remaining())) for endpoint in placement.endpoints
        ]
    except ControlFailed as failed:
        raise TierError(control_failure_in_words(failed)) from failed
    except TimeoutError as error:
        raise TierError(f"it has not answered within {seconds:g} s") from error
    for endpoint, info in answers:
        if info["role"] != "master":
            raise TierError(refusal_in_words(ErrorReply("READONLY", ""), endpoint))
    return _summary(product, [info for _, info in answers])


def _summary(product: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """From ``INFO``: version, memory and what goes when it is full. Of the first, where they differ."""
    first = answers[0]
    servers = f" in a cluster of {len(answers)} primaries" if len(answers) > 1 else ""
    used = format_size(sum(_number(info, "used_memory") for info in answers))
    limits = [_number(info, "maxmemory") for info in answers]
    policy = first.get("maxmemory_policy", "unknown")
    # Valkey keeps the version of the Redis that it took over from for old clients.
    version = first.get("valkey_version") or first.get("redis_version", "of unknown version")
    if not all(limits):
        return f"{product} {version}{servers}, {used} used, no maxmemory: it may take all the memory there is"
    memory = f"{product} {version}{servers}, {used} of {format_size(sum(limits))} used"
    if policy == "noeviction":
        return f"{memory}, maxmemory-policy noeviction: once full it refuses chunks (allkeys-lru makes room)"
    return f"{memory}, maxmemory-policy {policy}"


def _number(info: Mapping[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0
