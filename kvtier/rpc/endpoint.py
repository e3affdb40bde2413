"""Either side of a connection in an event loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.lowlevel

from kvtier.errors import ChannelClosed, ChannelError, KVTierError, ProtocolError, Rejected
from kvtier.logs import printable
from kvtier.rpc.calls import MAX_CALLS, Call, Calls, ReplyT, ResultT, Settle
from kvtier.rpc.frames import (
    Message,
    Ping,
    Pong,
    Refused,
    Reply,
    Request,
    VersionedT,
    check_welcome,
    encode_body,
)
from kvtier.rpc.wire import Wire

DRAIN_BYTES = 1 << 20
"""A side whose messages are not read handles no further ones while more than this is queued."""
TURN_MESSAGES = 64
"""Messages to handle before other tasks of the event loop get a turn."""
REFUSAL_SECONDS = 1.0
"""Timeout for sending the reason before a connection is closed because of an error."""

MessageT = TypeVar("MessageT", bound=Message)
Handle = Callable[[Any], Awaitable[None]]
HandleAtOnce = Callable[[Any], bool | None]
"""Handles a message without waiting. Returns ``True`` if it leaves the message to the :data:`Handle`."""


class Endpoint:
    """Sends requests and notifications, and receives those of the other side. Confined to one event loop.

    Messages are queued and sent in order, so that a cancelled caller never leaves half a frame behind.
    """

    def __init__(
        self,
        wire: Wire,
        decode: Callable[[bytes], Any],
        *,
        idle_timeout: float | None = None,
        max_calls: int = MAX_CALLS,
    ) -> None:
        """``idle_timeout``: seconds without a message, or without sending progress, that end :meth:`run`."""
        self.calls = Calls(max_calls)
        self.last_message_at = time.monotonic()
        """When the last message arrived, on the clock of :func:`time.monotonic`."""
        self.error: ChannelError | None = None
        """Why the connection has ended; ``None`` while it is open."""
        self._waiting_since = math.inf
        """Since when the receiving task waits, on the same clock; infinity while it handles messages."""
        self._wire = wire
        self._decode = decode
        self._idle_timeout = idle_timeout
        self._received: deque[bytes] = deque()
        self._corked = False
        """Whether sending is deferred to the end of the received batch."""
        self._unsent = anyio.Event()
        self._sent = anyio.Event()
        self._running: anyio.CancelScope | None = None

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self.error is not None

    # Send. Nothing here waits for the other side but what is a coroutine.

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message, or queue what cannot be sent at once. Raises :class:`ChannelError`.

        Ends the connection if too much is queued.
        """
        if self.error is not None:
            raise ChannelClosed("the connection is closed")
        body = encode_body(message)
        try:
            self._wire.write(body, fds)
        except ChannelClosed as error:
            self.end(error)
            raise
        if not self._corked:
            self._flush()

    def send_or_end(self, message: Message) -> None:
        """:meth:`send` for a task that nobody waits for: an error ends the connection."""
        try:
            self.send(message)
        except ChannelError as error:
            self.end(error)

    def call(
        self,
        request: Callable[[int], Request],
        reply_type: type[ReplyT],
        settle: Settle[ReplyT, ResultT],
        *,
        on_interim: Callable[[Any], None] | None = None,
        give_back: Callable[[ResultT], None] | None = None,
    ) -> Call[ResultT]:
        """Send a request, made from its ticket. Raises :class:`ChannelError`.

        The call fails with an error of that type when the connection ends. ``give_back`` gets a result that
        the caller does not, because it has given up.
        """
        call = self.calls.add(reply_type.__name__, reply_type, settle, on_interim, give_back)
        try:
            self.send(request(call.ticket))
        except BaseException:
            self.calls.remove(call)
            raise
        return call

    def ping(self) -> Call[bool]:
        """Send a ping. Raises :class:`ChannelError`."""
        return self.call(Ping, Pong, lambda _pong: True)

    async def drain(self) -> None:
        """Wait while much is queued. Raises :class:`ChannelClosed` if the other side reads nothing.

        Callable from several tasks.
        """
        while self._wire.unsent > DRAIN_BYTES and self.error is None:
            self._flush()
            unsent = self._wire.unsent
            if self._sent.is_set():
                self._sent = anyio.Event()
            with anyio.move_on_after(self._idle_timeout) as scope:
                await self._sent.wait()
            if scope.cancelled_caught and self._wire.unsent >= unsent:
                raise ChannelClosed(f"the other side has read nothing for {self._idle_timeout:g} s")

    def uncork(self) -> None:
        """Send at once, until the received batch is handled. For a handler that is about to wait."""
        self._corked = False
        self._flush()

    def _flush(self) -> None:
        self._wire.flush_now()
        if self._wire.unsent:
            self._unsent.set()

    # Receive.

    async def receive(self, seconds: float) -> Any:  # noqa: ANN401 - what ``decode`` returns
        """Return the next message, before :meth:`run`. Raises :class:`ChannelError`, and on timeout."""
        with anyio.move_on_after(seconds):
            await self._wire.flush()
            while not self._received:
                self._received.extend(await self._wire.receive())
            return self._rejecting(self._decode(self._received.popleft()))
        raise ChannelClosed(f"no message within {seconds:g} s")

    async def greet(
        self, hello: Message, welcome: type[VersionedT], version: int, seconds: float
    ) -> VersionedT:
        """Send ``hello``, and return the server's welcome. Raises :class:`ChannelError`."""
        self.send(hello)
        reply: Any = await self.receive(seconds)
        return check_welcome(reply, welcome, version)

    async def relay(self, hello: Message, far: Wire) -> NoReturn:
        """Pass on ``hello`` and all further frames to ``far``, and its frames back, in place of :meth:`run`.

        After :meth:`receive`. Does not look into the frames. A side that does not read holds up the other
        one, and nothing piles up. Raises :class:`ChannelError` when either connection ends. Closes neither.
        """
        failed: list[ChannelError] = []

        async def copy(source: Wire, target: Wire, bodies: Sequence[bytes]) -> None:
            try:
                while True:
                    for body in bodies:
                        target.write(body)
                    await target.flush()
                    await anyio.lowlevel.checkpoint()
                    bodies = await source.receive()
            except ChannelError as error:
                failed.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(copy, self._wire, far, [encode_body(hello), *self._received])
            tasks.start_soon(copy, far, self._wire, ())
        raise failed[0].with_traceback(None)

    async def run(
        self,
        handle: Handle | None = None,
        *,
        at_once: HandleAtOnce | None = None,
        refuses: bool = True,
        drains: bool = True,
    ) -> ChannelError:
        """Send and receive until the connection ends. Return why; every call has failed by then.

        ``handle`` gets what is neither a reply nor a ping, one message after the other. A
        :class:`ProtocolError` of it is sent to the other side as :class:`Refused`, and then the connection is
        closed. Without ``refuses``, both are left to the caller. Without ``drains``, messages are handled
        even while much is queued: for two sides that both send unasked, and might wait for each other.

        ``at_once`` gets messages first. The event loop calls it as soon as it has read from a socket, which
        saves a task switch and five system calls for each message.
        """

        async def until_failure(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except ChannelError as error:
                self.end(error)

        try:
            async with anyio.create_task_group() as tasks:
                self._running = tasks.cancel_scope
                if self.error is None:
                    receive = partial(self._receive_all, handle, at_once, drains)
                    tasks.start_soon(until_failure, receive)
                    tasks.start_soon(until_failure, self._send_all)
                    if self._idle_timeout is not None:
                        tasks.start_soon(until_failure, partial(self._end_if_idle, self._idle_timeout))
            if refuses and isinstance(self.error, ProtocolError):
                await self.refuse(self.error)
        finally:
            self._running = None
            self.end(_lost())
            if refuses:
                self._wire.close()
        assert self.error is not None
        return self.error

    async def _receive_all(self, handle: Handle | None, at_once: HandleAtOnce | None, drains: bool) -> None:
        bodies: Sequence[bytes] = tuple(self._received)
        while True:
            self._corked = True
            try:
                await self._handle_all(bodies, handle, at_once, drains)
            finally:
                self._corked = False
            self._flush()
            if drains and handle is not None:
                # A side that only gets replies reads on, or both might wait for each other.
                await self.drain()
            # If there is always more to read, receiving never yields.
            await anyio.lowlevel.checkpoint()
            self._waiting_since = time.monotonic()
            if at_once is None:
                bodies = await self._wire.receive()
            else:
                bodies = await self._wire.receive_rest(partial(self._handle_at_once, at_once, drains))
            self._waiting_since = math.inf

    def _handle_at_once(
        self, at_once: HandleAtOnce, drains: bool, bodies: Sequence[bytes]
    ) -> Sequence[bytes]:
        """Handle messages from the event loop; return those that need a task, or that are too many."""
        self._corked = True
        try:
            for index, body in enumerate(bodies):
                if index == TURN_MESSAGES or (drains and self._wire.unsent > DRAIN_BYTES):
                    return bodies[index:]
                message = self._rejecting(self._decode(body))
                if not self._answers(message) and at_once(message):
                    return bodies[index:]
        finally:
            self._corked = False
        self._flush()
        return ()

    async def _end_if_idle(self, seconds: float) -> None:
        # Beside the receiving task, which could lose a message if its wait was cancelled.
        left = seconds
        while left > 0:
            await anyio.sleep(min(left, seconds))
            left = max(self.last_message_at, self._waiting_since) + seconds - time.monotonic()
        raise ChannelClosed(f"no message for {seconds:g} s")

    async def _handle_all(
        self, bodies: Sequence[bytes], handle: Handle | None, at_once: HandleAtOnce | None, drains: bool
    ) -> None:
        for index, body in enumerate(bodies, 1):
            message = self._rejecting(self._decode(body))
            if not self._answers(message):
                if at_once is None or at_once(message):
                    if handle is None:
                        raise ProtocolError(f"unexpected {type(message).__name__}")
                    await handle(message)
                if drains and self._wire.unsent > DRAIN_BYTES:  # Long answers to short requests.
                    await self.drain()
            if not index % TURN_MESSAGES:
                await anyio.lowlevel.checkpoint()

    def _answers(self, message: Message) -> bool:
        """Handle a reply or a ping; return whether the message is one of them."""
        self.last_message_at = time.monotonic()
        if isinstance(message, Reply):
            if not self.calls.settle(message):
                raise ProtocolError(f"{type(message).__name__} answers a request that was not sent")
            return True
        if isinstance(message, Ping):
            self.send(Pong(message.ticket))
            return True
        return False

    @staticmethod
    def _rejecting(message: MessageT) -> MessageT:
        if isinstance(message, Refused):
            raise Rejected(printable(message.reason))
        return message

    async def _send_all(self) -> None:
        while True:
            await self._unsent.wait()
            self._unsent = anyio.Event()
            await self._wire.flush()
            self._sent.set()

    # End.

    def close(self) -> None:
        """Close the connection; every call fails. Idempotent."""
        self.end(_lost())
        if self._running is None:
            self._wire.close()

    def end(self, error: ChannelError) -> None:
        """Make :meth:`run` return ``error``. Every call fails at once, and no message is sent. Idempotent."""
        if self.error is None:
            self.error = error.with_traceback(None)  # It would refer to this endpoint.
            self.calls.fail(error)
            self._sent.set()
            if self._running is not None:
                self._running.cancel()

    async def refuse(self, error: KVTierError, *, lingers: bool = False) -> None:
        """Send the reason as :class:`Refused`. Call it before or after :meth:`run`.

        With ``lingers``, then wait until the other side closes the connection: until then it may still use
        memory that it was granted.
        """
        with anyio.move_on_after(None if lingers else REFUSAL_SECONDS), suppress(ChannelClosed):
            self._wire.write(encode_body(Refused(str(error))))
            await self._wire.flush()
        with suppress(ChannelClosed):
            while lingers:
                with suppress(ProtocolError):
                    await self._wire.receive()
                await anyio.lowlevel.checkpoint()


def _lost() -> ChannelClosed:
    return ChannelClosed("the connection was lost")
