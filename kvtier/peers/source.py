"""One connected peer, from ``Welcome`` until its control connection ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
from anyio import CancelScope

from kvtier.backends.base import Outcome
from kvtier.errors import ChannelClosed, ChannelError, PeerError, ProtocolError
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.peers.conversation import Conversation, answer_of
from kvtier.peers.dialling import ControlConnection, PeerDialer
from kvtier.peers.pace import Pace
from kvtier.peers.promises import Promise, Promises, usable_seconds
from kvtier.peers.protocol import (
    NO_GRANT,
    Await,
    Contained,
    Contains,
    Granted,
    Lookup,
    Ping,
    Pong,
    Readable,
    Release,
    Released,
    Welcome,
)
from kvtier.sockets.channel import Channel
from kvtier.transports.base import Link, Transport

MAX_NUMBER = (1 << 63) - 1
MAX_PUSHES = 8
"""Concurrent batches over all prompts: some are written while others are reserved or verified."""
DISCONNECT_SECONDS = 6.0
"""An unresponsive peer is disconnected after this long. Without it, a cut network is never detected."""

ResultT = TypeVar("ResultT")
Read = tuple[Promise, memoryview]
"""A promise, and the view to read into or write from."""


class Timeouts:
    """Timeouts in seconds for a peer that sends nothing."""

    def __init__(self, deadline: float) -> None:
        self.ping = min(1.0, deadline / 5)
        """Idle time after which the peer is pinged."""
        self.idle_timeout = min(2.0, deadline / 4)
        """Timeout of a ping, after which reads in flight are retried at other peers."""
        self.disconnect = DISCONNECT_SECONDS


class Source:
    """Requests to one connected peer, its promises, and transfers to and from it.

    Runs in :meth:`run`. When that ends, promises are dropped, and reads in flight are ``FAILED`` at once.
    """

    def __init__(
        self,
        dialer: PeerDialer,
        control: ControlConnection,
        transport: Transport,
        pace: Pace,
        timeouts: Timeouts,
        on_unresponsive: Callable[[bool], None],
    ) -> None:
        self.welcome: Welcome = control.welcome
        self.pace = pace
        self.conversation = Conversation(Channel(control.sock))
        self.promises = Promises(self.conversation.release)
        self.one_sided = transport.one_sided
        self.pushing = anyio.Semaphore(MAX_PUSHES)
        """Acquired for each batch that is pushed to this peer."""
        self.ended = anyio.Event()
        """Set when the connection has ended: no further requests or transfers."""
        self.unresponsive = False
        """Whether a ping has timed out."""
        self._on_unresponsive = on_unresponsive
        self._timeouts = timeouts
        self._transport = transport
        self._dial = partial(dialer.dial_data, control)
        self._usable_seconds = usable_seconds(control.welcome.lease)
        self._link: Link | None = None
        self._linking = anyio.Lock()
        self._transfers: set[CancelScope] = set()
        self._drained = anyio.Event()

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""
        return self.conversation.over

    @property
    def linked(self) -> bool:
        """Whether the data link is open."""
        return self._link is not None

    async def run(self) -> ChannelError:
        """Run until the connection ends, close everything, and return the cause."""
        cause: ChannelError = ChannelClosed(f"no answer for {self._timeouts.disconnect:g} s")
        try:
            async with anyio.create_task_group() as tasks:

                async def converse() -> None:
                    nonlocal cause
                    cause = await self.conversation.run()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(converse)
                await self._heartbeat()
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
            with CancelScope(shield=True):
                await self._close()
        return cause

    # Requests. The caller's cancel scopes set the timeout. All raise ChannelError.

    async def look_up(self, keys: Sequence[ChunkKey], *, prefix: bool) -> list[int]:
        """Lease those of ``keys`` that the peer holds, and return their positions."""
        sent_at = time.monotonic()

        def settle(granted: Granted, wanted: bool) -> list[int]:
            promises = self._promised(granted, keys, prefix=prefix, sent_at=sent_at)
            if wanted:
                self.promises.add(promises)
            else:
                self.conversation.release(promises)
            return granted.positions

        joined_keys = join_keys(keys)
        return await answer_of(
            self.conversation.ask(lambda ticket: Lookup(ticket, joined_keys, prefix), Granted, settle)
        )

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return whether the peer holds each key. Leases nothing."""

        def settle(contained: Contained, _wanted: bool) -> list[bool]:
            expect_length(contained.held, len(keys))
            return contained.held

        joined_keys = join_keys(keys)
        return await answer_of(
            self.conversation.ask(lambda ticket: Contains(ticket, joined_keys), Contained, settle)
        )

    async def readable(self, promises: Sequence[Promise]) -> set[Promise]:
        """Wait until the peer has these chunks in memory. Return those that became readable."""

        def settle(group: Sequence[Promise], readable: Readable, _wanted: bool) -> list[bool]:
            expect_length(readable.readable, len(group))
            return readable.readable

        grants = _by_grant(promises)
        answers = [
            self.conversation.ask(
                partial(_await, grant=grant, numbers=[promise.number for promise in group]),
                Readable,
                partial(settle, group),
            )
            for grant, group in grants.items()
        ]
        ready: set[Promise] = set()
        for group, answer in zip(grants.values(), await _all_answers(answers), strict=True):
            ready.update(promise for promise, ok in zip(group, answer, strict=True) if ok)
        return ready

    async def confirm(self, promises: Sequence[Promise]) -> set[Promise]:
        """Release these promises. Return those that were valid until now."""
        grants = _by_grant(promises)
        answers = [
            self.conversation.ask(
                partial(_release, grant=grant, numbers=[promise.number for promise in group]),
                Released,
                lambda released, _wanted: released.valid,
            )
            for grant, group in grants.items()
        ]
        valid = await _all_answers(answers)
        return {promise for group, ok in zip(grants.values(), valid, strict=True) if ok for promise in group}

    def release(self, promises: Iterable[Promise]) -> None:
        """Release these promises without waiting for the response."""
        self.conversation.release(promises)

    # Transfers.

    async def read(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        """Read promised chunks into views. Ends at once if the peer is unresponsive or disconnects."""
        return await self._transfer(
            len(reads), lambda link: link.read([(promise.span, view) for promise, view in reads])
        )

    async def write(self, writes: Sequence[Read]) -> Sequence[Outcome]:
        """Write views into reserved room. Ends like :meth:`read`."""
        return await self._transfer(
            len(writes), lambda link: link.write([(view, promise.span) for promise, view in writes])
        )

    async def _transfer(
        self, count: int, transfer: Callable[[Link], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * count
        if self.over or self.unresponsive:
            return outcomes
        with CancelScope() as scope:
            self._transfers.add(scope)
            try:
                outcomes = await transfer(await self._open_link())
            finally:
                self._transfers.discard(scope)
                if not self._transfers:
                    self._drained.set()
        return outcomes

    async def prepare(self) -> None:
        """Open the data link ahead of the first transfer, if possible."""
        with suppress(OSError, PeerError):  # The next transfer retries, and reports the error.
            await self._open_link()

    async def _open_link(self) -> Link:
        async with self._linking:
            if self._link is None:
                self._link = await self._transport.connect(self.welcome.endpoint, self._dial)
            return self._link

    def _promised(
        self, granted: Granted, keys: Sequence[ChunkKey], *, prefix: bool, sent_at: float
    ) -> list[Promise]:
        """Validate a response. Raises :class:`kvtier.errors.ProtocolError`."""
        count = len(granted.positions)
        expect_length(granted.offsets, count)
        expect_length(granted.lengths, count)
        if not 0 <= granted.ready <= count or (count and not NO_GRANT < granted.grant <= MAX_NUMBER):
            raise ProtocolError("its grant is inconsistent")
        if len(set(granted.positions)) < count or any(not 0 <= at < len(keys) for at in granted.positions):
            raise ProtocolError("its grant lists chunks that were not requested")
        if prefix and count and max(granted.positions) >= count:
            raise ProtocolError("its grant has a gap in the prefix")
        ends = sent_at + self._usable_seconds
        promises = []
        for number, (position, offset, length) in enumerate(
            zip(granted.positions, granted.offsets, granted.lengths, strict=True)
        ):
            if offset < 0 or length <= 0 or offset + length > MAX_NUMBER:
                raise ProtocolError("its grant has an invalid offset or length")
            ready = number < granted.ready
            promises.append(Promise(keys[position], granted.grant, number, offset, length, ready, ends))
        return promises

    # Heartbeat.

    async def _heartbeat(self) -> None:
        """Ping the peer when it is idle. Return when it has not answered in time."""
        while await self._ping():
            await self._wait_idle(self._timeouts.ping)

    async def _wait_idle(self, seconds: float) -> None:
        idle = 0.0
        while idle < seconds:
            await anyio.sleep(seconds - idle)
            idle = time.monotonic() - self.conversation.heard_at

    async def _ping(self) -> bool:
        """Ping once; return whether it is answered in time. Sets :attr:`unresponsive` while it is late."""
        sent_at = time.monotonic()
        try:
            pong = self._send_ping()
        except PeerError:
            return False
        for _ in range(4):
            # In parts, so that a stall of this event loop does not count against the peer.
            await asyncio.wait([pong], timeout=self._timeouts.idle_timeout / 4)
        if not pong.done():
            self._become_unresponsive()
            await asyncio.wait([pong], timeout=self._timeouts.disconnect - self._timeouts.idle_timeout)
        if not pong.done() or pong.result() is None:
            pong.cancel()
            return False
        self.pace.note_round_trip(time.monotonic() - sent_at)
        if self.unresponsive:
            self.unresponsive = False
            self._on_unresponsive(False)
        return True

    async def probe(self, seconds: float) -> bool:
        """Return whether a ping is answered in time. Raises :class:`PeerError` if the connection is lost."""
        sent_at = time.monotonic()
        with anyio.move_on_after(seconds):
            await answer_of(self._send_ping())
            self.pace.note_round_trip(time.monotonic() - sent_at)
            return True
        return False

    def _send_ping(self) -> asyncio.Future[bool | None]:
        return self.conversation.ask(Ping, Pong, lambda _pong, _wanted: True)

    def _become_unresponsive(self) -> None:
        self.unresponsive = True
        self._on_unresponsive(True)
        for scope in self._transfers:
            scope.cancel()

    async def _close(self) -> None:
        """Cancel all transfers and wait for them before closing the link."""
        self.conversation.close()
        self.promises.clear()
        while self._transfers:
            self._drained = anyio.Event()
            for scope in self._transfers:
                scope.cancel()
            await self._drained.wait()
        if self._link is not None:
            await self._link.close()


def _await(ticket: int, *, grant: int, numbers: list[int]) -> Await:
    return Await(ticket, grant, numbers)


def _release(ticket: int, *, grant: int, numbers: list[int]) -> Release:
    return Release(ticket, grant, numbers)


def _by_grant(promises: Iterable[Promise]) -> dict[int, list[Promise]]:
    grants: dict[int, list[Promise]] = {}
    for promise in promises:
        grants.setdefault(promise.grant, []).append(promise)
    return grants


def expect_length(answers: Sequence[object], length: int) -> None:
    """Raise :class:`kvtier.errors.ProtocolError` if a response has the wrong number of entries."""
    if len(answers) != length:
        raise ProtocolError(f"its response has {len(answers)} entries, expected {length}")


async def _all_answers(futures: Sequence[asyncio.Future[ResultT | None]]) -> list[ResultT]:
    try:
        return [await answer_of(future) for future in futures]
    finally:
        for future in futures:
            future.cancel()
