"""One peer, from the moment that it said ``Welcome`` until its control connection ends."""

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
from kvtier.keys import ChunkKey, join_keys
from kvtier.peers.conversation import Conversation, answer_of
from kvtier.peers.dialling import Called, Caller
from kvtier.peers.pace import Pace
from kvtier.peers.promises import Promise, Promises, usable_seconds
from kvtier.peers.protocol import (
    NO_GRANT,
    Await,
    Contained,
    Contains,
    Granted,
    LookUp,
    Ping,
    Pong,
    Readable,
    Release,
    Released,
    Welcome,
)
from kvtier.sockets.channel import Channel
from kvtier.transports.base import Link, Transport

BIGGEST_NUMBER = (1 << 63) - 1
PUSHES_AT_ONCE = 8
"""Batches, whatever prompts they are of: some to be written, while others are reserved or verified."""
HANG_UP_SECONDS = 6.0
"""A peer that is silent for so long is taken for dead. One whose network was cut is found again only so."""

ResultT = TypeVar("ResultT")
Read = tuple[Promise, memoryview]
"""What is to be read into a view, or written from it."""


class Patience:
    """How long a peer may be silent before something is done about it, in seconds."""

    def __init__(self, deadline: float) -> None:
        self.ping = min(1.0, deadline / 5)
        """It is asked whether it is there, when nothing has come from it for so long."""
        self.silence = min(2.0, deadline / 4)
        """What is being read from it is tried elsewhere, when it has not answered that for so long."""
        self.hang_up = HANG_UP_SECONDS


class Source:
    """What one connected peer has promised, and the ways to ask it and to read it.

    Runs in :meth:`run`. When that ends, promises are forgotten and reads under way are ``FAILED`` at once.
    """

    def __init__(
        self,
        caller: Caller,
        called: Called,
        transport: Transport,
        pace: Pace,
        patience: Patience,
        on_silence: Callable[[bool], None],
    ) -> None:
        self.welcome: Welcome = called.welcome
        self.pace = pace
        self.conversation = Conversation(Channel(called.connected))
        self.promises = Promises(self.conversation.release)
        self.one_sided = transport.one_sided
        self.pushing = anyio.Semaphore(PUSHES_AT_ONCE)
        """One for each batch that is pushed there."""
        self.ended = anyio.Event()
        """Set when nothing can be asked or moved any longer."""
        self.silent = False
        """Whether a ping is unanswered for longer than it may be."""
        self._on_silence = on_silence
        self._patience = patience
        self._transport = transport
        self._dial = partial(caller.dial_like, called)
        self._usable_seconds = usable_seconds(called.welcome.lease)
        self._link: Link | None = None
        self._linking = anyio.Lock()
        self._transfers: set[CancelScope] = set()
        self._none_left = anyio.Event()

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""
        return self.conversation.over

    @property
    def linked(self) -> bool:
        """Whether there is a way for its bytes."""
        return self._link is not None

    async def run(self) -> ChannelError:
        """Converse until the connection ends, and say why it did. Closes everything."""
        cause: ChannelError = ChannelClosed(f"it has not answered for {self._patience.hang_up:g} s")
        try:
            async with anyio.create_task_group() as tasks:

                async def converse() -> None:
                    nonlocal cause
                    cause = await self.conversation.run()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(converse)
                await self._keep_awake()
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
            with CancelScope(shield=True):
                await self._hang_up()
        return cause

    # Asking: in time or not at all; the caller's scopes say how long. All raise ChannelError.

    async def look_up(self, keys: Sequence[ChunkKey], *, prefix: bool) -> list[int]:
        """Be promised those of ``keys`` that the peer holds; which these are, by their positions."""
        asked_at = time.monotonic()

        def settle(granted: Granted, wanted: bool) -> list[int]:
            promises = self._promised(granted, keys, prefix=prefix, asked_at=asked_at)
            if wanted:
                self.promises.add(promises)
            else:
                self.conversation.release(promises)
            return granted.positions

        joined = join_keys(keys)
        return await answer_of(
            self.conversation.ask(lambda ticket: LookUp(ticket, joined, prefix), Granted, settle)
        )

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` the peer holds. Nothing is promised."""

        def settle(contained: Contained, _wanted: bool) -> list[bool]:
            expect_length(contained.held, len(keys))
            return contained.held

        joined = join_keys(keys)
        return await answer_of(
            self.conversation.ask(lambda ticket: Contains(ticket, joined), Contained, settle)
        )

    async def readable(self, promises: Sequence[Promise]) -> set[Promise]:
        """Wait until the peer has these in its memory; those that it will have."""

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
        found: set[Promise] = set()
        for group, answer in zip(grants.values(), await _all_answers(answers), strict=True):
            found.update(promise for promise, there in zip(group, answer, strict=True) if there)
        return found

    async def confirm(self, promises: Sequence[Promise]) -> set[Promise]:
        """Release these, and learn which of them were granted until now."""
        grants = _by_grant(promises)
        answers = [
            self.conversation.ask(
                partial(_release, grant=grant, numbers=[promise.number for promise in group]),
                Released,
                lambda released, _wanted: released.stood,
            )
            for grant, group in grants.items()
        ]
        stood = await _all_answers(answers)
        return {
            promise for group, whole in zip(grants.values(), stood, strict=True) if whole for promise in group
        }

    def release(self, promises: Iterable[Promise]) -> None:
        """Tell the peer that these are not needed any longer; nobody waits for it."""
        self.conversation.release(promises)

    # Reading.

    async def read(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        """Fill each view with what was promised. Ends at once where the peer falls silent or is gone."""
        return await self._transfer(
            len(reads), lambda link: link.read([(promise.span, view) for promise, view in reads])
        )

    async def write(self, writes: Sequence[Read]) -> Sequence[Outcome]:
        """Put each view where room was promised. Ends like :meth:`read`."""
        return await self._transfer(
            len(writes), lambda link: link.write([(view, promise.span) for promise, view in writes])
        )

    async def _transfer(
        self, count: int, transfer: Callable[[Link], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [Outcome.FAILED] * count
        if self.over or self.silent:
            return outcomes
        with CancelScope() as scope:
            self._transfers.add(scope)
            try:
                outcomes = await transfer(await self._linked())
            finally:
                self._transfers.discard(scope)
                if not self._transfers:
                    self._none_left.set()
        return outcomes

    async def prepare(self) -> None:
        """Make the link before somebody waits for it, as far as that can be."""
        with suppress(OSError, PeerError):  # Who reads is told, and tries again.
            await self._linked()

    async def _linked(self) -> Link:
        async with self._linking:
            if self._link is None:
                self._link = await self._transport.connect(self.welcome.endpoint, self._dial)
            return self._link

    def _promised(
        self, granted: Granted, keys: Sequence[ChunkKey], *, prefix: bool, asked_at: float
    ) -> list[Promise]:
        """Raises :class:`kvtier.errors.ProtocolError` where it answers what was not asked, or nonsense."""
        count = len(granted.positions)
        expect_length(granted.offsets, count)
        expect_length(granted.lengths, count)
        if not 0 <= granted.ready <= count or (count and not NO_GRANT < granted.grant <= BIGGEST_NUMBER):
            raise ProtocolError("its promise does not fit together")
        if len(set(granted.positions)) < count or any(not 0 <= at < len(keys) for at in granted.positions):
            raise ProtocolError("it promises what was not asked for")
        if prefix and count and max(granted.positions) >= count:
            raise ProtocolError("it promises a prefix with a gap")
        ends = asked_at + self._usable_seconds
        promises = []
        for number, (position, offset, length) in enumerate(
            zip(granted.positions, granted.offsets, granted.lengths, strict=True)
        ):
            if offset < 0 or length <= 0 or offset + length > BIGGEST_NUMBER:
                raise ProtocolError("it promises bytes that cannot be")
            ready = number < granted.ready
            promises.append(Promise(keys[position], granted.grant, number, offset, length, ready, ends))
        return promises

    # Staying in touch.

    async def _keep_awake(self) -> None:
        """Ping the peer when it has been quiet; ends when it has been silent for too long."""
        while await self._ping():
            await self._quiet_for(self._patience.ping)

    async def _quiet_for(self, seconds: float) -> None:
        quiet = 0.0
        while quiet < seconds:
            await anyio.sleep(seconds - quiet)
            quiet = time.monotonic() - self.conversation.heard_at

    async def _ping(self) -> bool:
        """Whether it answers before it counts as dead. Sets :attr:`silent` while it takes long."""
        asked_at = time.monotonic()
        try:
            pong = self._ask_for_pong()
        except PeerError:
            return False
        for _ in range(4):
            # In parts: where this loop itself stood still, the peer is not to blame for that.
            await asyncio.wait([pong], timeout=self._patience.silence / 4)
        if not pong.done():
            self._fall_silent()
            await asyncio.wait([pong], timeout=self._patience.hang_up - self._patience.silence)
        if not pong.done() or pong.result() is None:
            pong.cancel()
            return False
        self.pace.note_round_trip(time.monotonic() - asked_at)
        if self.silent:
            self.silent = False
            self._on_silence(False)
        return True

    async def probe(self, seconds: float) -> bool:
        """Whether it answers a ping in time. Raises :class:`PeerError` where the connection is lost."""
        asked_at = time.monotonic()
        with anyio.move_on_after(seconds):
            await answer_of(self._ask_for_pong())
            self.pace.note_round_trip(time.monotonic() - asked_at)
            return True
        return False

    def _ask_for_pong(self) -> asyncio.Future[bool | None]:
        return self.conversation.ask(Ping, Pong, lambda _pong, _wanted: True)

    def _fall_silent(self) -> None:
        self.silent = True
        self._on_silence(True)
        for scope in self._transfers:
            scope.cancel()

    async def _hang_up(self) -> None:
        """Nobody may be reading when the link is closed."""
        self.conversation.close()
        self.promises.clear()
        while self._transfers:
            self._none_left = anyio.Event()
            for scope in self._transfers:
                scope.cancel()
            await self._none_left.wait()
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
    """Raises :class:`kvtier.errors.ProtocolError` where there are not as many answers as questions."""
    if len(answers) != length:
        raise ProtocolError(f"it gives {len(answers)} answers to {length} questions")


async def _all_answers(futures: Sequence[asyncio.Future[ResultT | None]]) -> list[ResultT]:
    try:
        return [await answer_of(future) for future in futures]
    finally:
        for future in futures:
            future.cancel()
