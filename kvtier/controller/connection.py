"""The controller's end of the WebSocket that an instance opens: see :mod:`kvtier.agent.protocol`.

Whatever is wrong with one instance ends its connection, with the reason in words where it still reads, and
nothing else. Messages are taken in one after the other, large ones in slices: nothing is queued on their way
in, so an instance that says much waits until it is its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
import anyio.lowlevel
from anyio import CancelScope
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvtier.agent.protocol import (
    MAX_KEYS,
    Changed,
    Done,
    Failed,
    FromInstance,
    Heartbeat,
    Hello,
    Lost,
    Progress,
    Refused,
    Serves,
    UpToDate,
    WhoHolds,
    decode_from_instance,
)
from kvtier.controller.errors import MemberGone, RefusedInstance
from kvtier.controller.member import Member
from kvtier.controller.registry import Registry
from kvtier.errors import ChannelClosed, LayoutError, ProtocolError
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.sockets.frames import MAX_FRAME_BYTES, encode_body

logger = logging.getLogger("kvtier")

HELLO_SECONDS = 10.0
"""How long one that has connected may take to say who it is."""
REFUSAL_SECONDS = 1.0
"""How long it may take to say why a connection ends, and to close it."""
MAX_SMALL_BYTES = 256 << 10
"""Of a message that carries no keys or tokens: decoding a list that is as long as a frame takes too long."""
SLICE_KEYS = 4096
"""Taken in without letting others have a turn: some milliseconds."""

_LARGE_TAGS = {kind.__struct_config__.tag for kind in (Changed, WhoHolds, Done)}


async def serve(registry: Registry, websocket: WebSocket) -> None:
    """Talk to one instance over a WebSocket that was accepted, until it ends. Raises nothing."""
    await _Connection(registry, websocket).run()


class _Connection:
    def __init__(self, registry: Registry, websocket: WebSocket) -> None:
        self._registry = registry
        self._websocket = websocket
        self._member: Member | None = None
        self._scope = CancelScope()

    async def run(self) -> None:
        refusal: str | None = None
        try:
            with self._scope:
                await self._converse()
        except (ProtocolError, RefusedInstance) as error:
            refusal = str(error)
        except ChannelClosed as error:
            logger.debug("the connection of %s has ended: %s", self._name, error)
            return
        if refusal is None and self._member is not None:
            refusal = self._member.over
        await self._refuse(refusal or "the controller has ended the connection")

    @property
    def _name(self) -> str:
        if self._member is not None:
            return f"instance {self._member.id}"
        client = self._websocket.client
        return "a stranger" if client is None else f"somebody at {client.host}"

    async def _refuse(self, why: str) -> None:
        logger.info("the connection of %s is ended: %s", self._name, why)
        # One that has stopped to read may not even take in that it is closed.
        with anyio.move_on_after(REFUSAL_SECONDS), suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.send_bytes(encode_body(Refused(why)))
            await self._websocket.close()

    async def _converse(self) -> None:
        hello = await self._receive(HELLO_SECONDS)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"it says {type(hello).__name__} before Hello")
        member = self._member = await self._registry.admit(hello, self._scope.cancel)
        why = "its connection has ended"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, member)
                try:
                    await self._listen(member)
                except (ChannelClosed, ProtocolError, RefusedInstance) as error:
                    failure = error
                    why = str(error)
                tasks.cancel_scope.cancel()
        finally:
            self._registry.leave(member, why)
        raise failure

    async def _listen(self, member: Member) -> None:
        while True:
            message = await self._receive(self._registry.idle_timeout)
            member.heard()
            with suppress(MemberGone):  # Then this is cancelled.
                await self._take_in(member, message)
            # Many messages may be there already, and nobody else would get a turn.
            await anyio.lowlevel.checkpoint()

    async def _take_in(self, member: Member, message: FromInstance) -> None:
        registry = self._registry
        match message:
            case Changed():
                await self._take_in_keys(member, message)
            case WhoHolds():
                member.say(registry.held_by(member, message, _split(message.keys)))
            case Heartbeat():
                registry.beat(member, message)
            case Serves():
                registry.serves(member, message.models)
            case UpToDate():
                registry.in_step(member)
            case Lost():
                registry.lost(member)
            case Progress() | Done() | Failed():
                member.answer(message)
            case Hello():
                raise ProtocolError("it says Hello twice")

    async def _take_in_keys(self, member: Member, changed: Changed) -> None:
        if not 0 <= changed.tier < len(member.places):
            raise ProtocolError(f"it tells of tier {changed.tier}, and has {len(member.places)} of them")
        removed, stored = _split(changed.removed), _split(changed.stored)
        steps: list[tuple[Callable[[Member, int, Sequence[ChunkKey]], None], list[ChunkKey]]] = [
            (self._registry.removed, removed),
            (self._registry.stored, stored),
        ]
        for take_in, keys in steps:
            for start in range(0, len(keys), SLICE_KEYS):
                take_in(member, changed.tier, keys[start : start + SLICE_KEYS])
                if start + SLICE_KEYS < len(keys):
                    await anyio.lowlevel.checkpoint()

    async def _receive(self, seconds: float) -> FromInstance:
        """The next message.

        Raises ``ChannelClosed``, ``ProtocolError`` for what is none, and ``RefusedInstance`` for silence.
        """
        with anyio.move_on_after(seconds) as scope:
            event = await self._websocket.receive()
        if scope.cancelled_caught:
            raise RefusedInstance(f"it has said nothing for {seconds:g} s")
        if event["type"] != "websocket.receive":
            raise ChannelClosed("it has closed the connection")
        body = event.get("bytes")
        if not body:
            raise ProtocolError("it sends text or nothing, where a binary message is due")
        return _decode(body)

    async def _send(self, member: Member) -> None:
        """Send what is to be said. An instance that takes nothing in is as good as gone."""
        while True:
            body = await member.next_body()
            try:
                with anyio.fail_after(self._registry.idle_timeout):
                    await self._websocket.send_bytes(body)
            except TimeoutError:
                member.end(f"it has taken nothing in for {self._registry.idle_timeout:g} s")
            except (WebSocketDisconnect, RuntimeError):
                member.end("it has closed the connection")


def _decode(body: bytes) -> FromInstance:
    # A message is an array of few elements, the first of which is its tag.
    large = body[0] >> 4 == 0x9 and body[1:2] and body[1] in _LARGE_TAGS
    limit = MAX_FRAME_BYTES if large else MAX_SMALL_BYTES
    if len(body) > limit:
        raise ProtocolError(f"a message of {len(body)} bytes is over {limit}")
    try:
        return decode_from_instance(body)
    except (LayoutError, ArithmeticError) as error:
        raise ProtocolError(f"a model's layout makes no sense: {error}") from error


def _split(joined: bytes) -> list[ChunkKey]:
    try:
        keys = split_keys(joined)
    except ValueError as error:
        raise ProtocolError(f"it tells of what are no keys: {error}") from error
    if len(keys) > MAX_KEYS:
        raise ProtocolError(f"it names {len(keys)} chunks in one message, more than {MAX_KEYS}")
    return keys
