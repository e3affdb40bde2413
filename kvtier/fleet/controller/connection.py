"""The controller's end of the WebSocket that an instance opens: see :mod:`kvtier.fleet.member.protocol`.

An error of one instance ends only its connection, with the reason if it still reads. Messages are handled one
after the other, large ones in slices, and are not queued before: an instance that sends much has to wait.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from functools import partial

import anyio
import anyio.lowlevel
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from kvtier.errors import KVTierError, LayoutError, ProtocolError
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import (
    MAX_KEYS,
    VERSION,
    Changed,
    Done,
    FromInstance,
    Hello,
    Report,
    WhoHolds,
    WhoServes,
    decode_from_instance,
)
from kvtier.memory.keys import KEY_BYTES, count_keys, split_keys
from kvtier.rpc.endpoint import REFUSAL_SECONDS, Endpoint
from kvtier.rpc.frames import MAX_FRAME_BYTES, check_hello
from kvtier.rpc.websocket import ServerWire

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0
"""Timeout for the first message of an instance."""
MAX_UNSENT_BYTES = 32 << 20
"""Maximum size of the messages queued for one instance. Beyond it the instance counts as dead."""
MAX_SMALL_BYTES = 256 << 10
"""Maximum size of a message without keys or tokens: decoding a list that fills a frame takes too long."""
SLICE_BYTES = 8192 * KEY_BYTES
"""Keys indexed before yielding to the event loop: less than a millisecond, or 8 without the native core."""

_LARGE_TAGS = {kind.__struct_config__.tag for kind in (Changed, WhoHolds, Done)}


async def serve(registry: Registry, websocket: WebSocket) -> None:
    """Serve one instance over an accepted WebSocket until the connection ends. Does not raise."""
    timeout = registry.idle_timeout
    endpoint = Endpoint(ServerWire(websocket, MAX_UNSENT_BYTES, timeout), _decode, idle_timeout=timeout)
    member: Member | None = None
    error: KVTierError
    try:
        hello = check_hello(await endpoint.receive(HELLO_SECONDS), Hello, VERSION)
        member = await registry.admit(hello, endpoint)
        # Both sides send unasked, so neither may wait until the other one reads.
        error = await endpoint.run(partial(_handle, registry, member), refuses=False, drains=False)
    except KVTierError as refusal:
        error = refusal
    finally:
        if member is not None:
            registry.leave(member, "its connection has ended")
    if member is not None:
        name = f"instance {member.id}"
    else:
        name = "an unknown client" if websocket.client is None else f"a client at {websocket.client.host}"
    if WebSocketState.DISCONNECTED in (websocket.client_state, websocket.application_state):
        logger.debug("the connection of %s has ended: %s", name, error)
        return
    logger.info("the connection of %s is closed: %s", name, error)
    await endpoint.refuse(error)
    with anyio.move_on_after(REFUSAL_SECONDS), suppress(WebSocketDisconnect, RuntimeError):
        await websocket.close()


async def _handle(registry: Registry, member: Member, message: Report | WhoHolds | WhoServes | Hello) -> None:
    """Handle a message of a registered instance. Raises :class:`ProtocolError` if it is invalid."""
    match message:
        case Changed():
            await _index(registry, member, message)
        case WhoHolds():
            _check_count(message.keys)
            member.endpoint.send(registry.held_by(member, message, split_keys(message.keys)))
        case WhoServes():
            member.endpoint.send(registry.served_at(message))
        case Hello():
            raise ProtocolError("unexpected Hello")
        case _:
            registry.report(member, message)


async def _index(registry: Registry, member: Member, changed: Changed) -> None:
    if not 0 <= changed.tier < len(member.places):
        raise ProtocolError(
            f"the instance reports on tier {changed.tier}, but has {len(member.places)} tiers"
        )
    _check_count(changed.removed)
    _check_count(changed.stored)
    is_small = len(changed.stored) + len(changed.removed) < SLICE_BYTES // 4
    # A thousand instances that report all their chunks at once would leave requests no turn for seconds.
    async with nullcontext() if is_small else registry.indexing:
        for index, joined in ((registry.removed, changed.removed), (registry.stored, changed.stored)):
            for start in range(0, len(joined), SLICE_BYTES):
                index(member, changed.tier, joined[start : start + SLICE_BYTES])
                if not is_small:
                    await anyio.lowlevel.checkpoint()


def _decode(body: bytes) -> FromInstance:
    # A message is an array of few elements, the first of which is its tag.
    large = body[0] >> 4 == 0x9 and body[1:2] and body[1] in _LARGE_TAGS
    limit = MAX_FRAME_BYTES if large else MAX_SMALL_BYTES
    if len(body) > limit:
        raise ProtocolError(f"a message of {len(body)} bytes is over {limit}")
    try:
        return decode_from_instance(body)
    except (LayoutError, ArithmeticError) as error:
        raise ProtocolError(f"the layout of a model is invalid: {error}") from error


def _check_count(joined: bytes) -> None:
    if (count := count_keys(joined)) > MAX_KEYS:
        raise ProtocolError(f"the instance names {count} chunks in one message, more than {MAX_KEYS}")
