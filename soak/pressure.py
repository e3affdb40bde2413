"""Another engine, which wants more room at a cache process than there is."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge
from kvtier.errors import ChannelError
from kvtier.memory.keys import chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from soak.stack import CHUNK_TOKENS, RAM_BYTES

LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(CHUNK_TOKENS, (1 << 20,)),))
CHUNKS = 2 * RAM_BYTES >> 20
ANSWER_SECONDS = 10.0


def reserve_too_much(socket: Path) -> int:
    """Reserve more than there is, and give it back; return how many chunks had room.

    What a stopped engine holds is reclaimed then. Raises :class:`ChannelError`.
    """
    namespace = secrets.token_bytes(32)
    name, root = namespace.hex(), root_key(namespace)
    hello = protocol.Hello(protocol.VERSION, name, "scheduler", 0, LAYOUT, namespace)
    keys = chunk_keys(root, range(CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)
    scheduler = SchedulerBridge(hello, socket)
    try:
        scheduler.connect()
        call = scheduler.reserve([protocol.Run(root, join_keys(keys), CHUNK_TOKENS)])
        reserved = scheduler.await_reply(call, ANSWER_SECONDS)
        if reserved is None:
            raise ChannelError("no answer to a reservation")
        scheduler.abandon(reserved.granted)
        return len(reserved.granted)
    finally:
        scheduler.close()


class Held(NamedTuple):
    """What engines hold."""

    leases: int
    reserved_bytes: int
    """Without those that are only kept out of use."""


def held_by_engines(status: dict[str, Any]) -> Held:
    """Return what all engines of a cache process hold."""
    reserved = status["reservations"]
    return Held(
        sum(engine["leases"] for engine in status["engines"]), reserved["bytes"] - reserved["void_bytes"]
    )
