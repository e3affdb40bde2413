"""One connected peer, from ``Welcome`` until its control connection ends."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
from anyio import CancelScope

from kvtier.backends.base import Outcome
from kvtier.errors import ChannelClosed, ChannelError, ProtocolError
from kvtier.memory.header import IDENTITY
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.observability.traces.spans import current
from kvtier.peers.dialing import ControlConnection, PeerDialer
from kvtier.peers.protocol import (
    Await,
    Contained,
    Contains,
    Granted,
    Lookup,
    Readable,
    Release,
    Released,
    Welcome,
    decode_from_server,
)
from kvtier.peers.remote_leases import RemoteLease, RemoteLeases, leases_of, usable_seconds
from kvtier.peers.throughput import PeerThroughput
from kvtier.rpc.calls import ReplyT, ResultT
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Request
from kvtier.rpc.keep_alive import KeepAlive, Timeouts
from kvtier.rpc.wire import SocketWire
from kvtier.transports.base import Link, Transport

MAX_PUSHES = 8
"""Concurrent batches over all prompts: some are written while others are reserved or verified."""
DISCONNECT_SECONDS = 6.0
"""An unresponsive peer is disconnected after this long."""

EntryT = TypeVar("EntryT")

Read = tuple[RemoteLease, memoryview]
"""A lease, and the view to read into or write from."""
Written = tuple[Sequence[Outcome], Sequence[bytes | None]]
"""The outcomes of writes, and the checksums of the views that the transport has hashed."""


def timeouts_of(deadline: float) -> Timeouts:
    """Return the timeouts that leave time to retry reads at other peers within ``deadline`` seconds."""
    return Timeouts(min(1.0, deadline / 5), min(2.0, deadline / 4), DISCONNECT_SECONDS)


class Source:
    """Requests to one connected peer, its leases, and transfers to and from it.

    Runs in :meth:`run`. When that ends, leases are dropped, and reads in flight are ``FAILED`` at once.
    """

    def __init__(
        self,
        dialer: PeerDialer,
        control: ControlConnection,
        transport: Transport,
        throughput: PeerThroughput,
        timeouts: Timeouts,
        on_unresponsive: Callable[[bool], None],
    ) -> None:
        self.welcome: Welcome = control.welcome
        self.endpoint = Endpoint(SocketWire(control.sock), decode_from_server)
        self.leases = RemoteLeases(self.release)
        self.one_sided = transport.one_sided
        self.pushing = anyio.Semaphore(MAX_PUSHES)
        """Acquired for each batch that is pushed to this peer."""
        self.ended = anyio.Event()
        """Set when the connection has ended: no further requests or transfers."""
        self.keep_alive = KeepAlive(
            self.endpoint,
            timeouts,
            on_unresponsive=self._set_unresponsive,
            on_round_trip=throughput.note_round_trip,
        )
        self._on_unresponsive = on_unresponsive
        self._timeouts = timeouts
        self._transport = transport
        self._dial = partial(dialer.dial_data, control)
        self._usable_seconds = usable_seconds(control.welcome.lease)
        self._link: Link | None = None
        self._linking = anyio.Lock()
        self._unsent: dict[int, list[int]] = {}
        """Numbers of leases to release, by grant."""
        self._released = anyio.Event()
        self._transfers: set[CancelScope] = set()
        self._drained = anyio.Event()

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""
        return self.endpoint.closed

    @property
    def unresponsive(self) -> bool:
        """Whether a ping has timed out."""
        return self.keep_alive.unresponsive

    @property
    def linked(self) -> bool:
        """Whether the data link is open."""
        return self._link is not None

    async def run(self) -> ChannelError:
        """Run until the connection ends, close everything, and return the cause."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_releases)
                tasks.start_soon(self._run_keep_alive)
                cause = await self.endpoint.run(at_once=lambda _message: True)
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
            # Transfers use the callers' memory until they have ended, also if this is cancelled.
            with CancelScope(shield=True):
                await self._close()
        return cause

    async def _run_keep_alive(self) -> None:
        await self.keep_alive.run()
        self.endpoint.end(ChannelClosed(f"no answer for {self._timeouts.disconnect:g} s"))

    # Requests. The caller's cancel scopes set the timeout. All raise ChannelError.

    async def look_up(self, keys: Sequence[ChunkKey], *, prefix: bool) -> list[int]:
        """Lease those of ``keys`` that the peer holds, and return their positions."""
        sent_at = time.monotonic()

        def settle(granted: Granted) -> dict[int, RemoteLease]:
            leases = self._leases_of(granted, keys, prefix=prefix, sent_at=sent_at)
            return dict(zip(granted.positions, leases, strict=True))

        request = partial(Lookup, keys=join_keys(keys), prefix=prefix, trace=current.get())
        granted = await self.endpoint.call(
            request, Granted, settle, give_back=lambda unused: self.release(unused.values())
        ).reply()
        self.leases.add(granted.values())
        return list(granted)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return whether the peer holds each key. Leases nothing."""
        return await self.endpoint.call(
            partial(Contains, keys=join_keys(keys)),
            Contained,
            lambda contained: expect_length(contained.held, len(keys)),
        ).reply()

    async def readable(self, leases: Sequence[RemoteLease], codec: int = IDENTITY) -> set[RemoteLease]:
        """Wait until the peer has these chunks in memory. Return those that became readable.

        With a ``codec``, the peer encodes them, unless that would make one hardly smaller.
        """

        def settle(group: Sequence[RemoteLease], answer: Readable) -> list[bool]:
            if answer.encoded and codec == IDENTITY:
                raise ProtocolError("the peer has encoded chunks that were requested as they are")
            encoded = expect_length(answer.encoded or [(0, 0)] * len(group), len(group))
            for lease, (offset, length) in zip(group, encoded, strict=True):
                if length:
                    lease.note_encoded(offset, length)
            return expect_length(answer.readable, len(group))

        replies = await self.ask_each_grant(
            leases, lambda _group: partial(Await, codec=codec), Readable, settle
        )
        return {lease for group, ready in replies for lease, ok in zip(group, ready, strict=True) if ok}

    async def confirm(self, leases: Sequence[RemoteLease]) -> set[RemoteLease]:
        """Release these leases. Return those that were valid until now."""
        replies = await self.ask_each_grant(
            leases, lambda _group: Release, Released, lambda _group, released: released.valid
        )
        return {lease for group, valid in replies if valid for lease in group}

    async def ask_each_grant(
        self,
        leases: Iterable[RemoteLease],
        request_of: Callable[[Sequence[RemoteLease]], Callable[..., Request]],
        reply_type: type[ReplyT],
        settle: Callable[[Sequence[RemoteLease], ReplyT], ResultT],
    ) -> list[tuple[Sequence[RemoteLease], ResultT]]:
        """Send a request for the leases of each grant. Return these, each with the result."""
        grants: dict[int, list[RemoteLease]] = {}
        for lease in leases:
            grants.setdefault(lease.grant, []).append(lease)
        calls = [
            self.endpoint.call(
                partial(request_of(group), grant=grant, chunks=[lease.number for lease in group]),
                reply_type,
                partial(settle, group),
            )
            for grant, group in grants.items()
        ]
        try:
            return [(group, await call.reply()) for group, call in zip(grants.values(), calls, strict=True)]
        finally:
            for call in calls:
                call.abandon()

    def release(self, leases: Iterable[RemoteLease]) -> None:
        """Release these leases soon, with one message per grant, without waiting for the response."""
        if self.over:
            return  # The end of the connection has ended the grants as well.
        for lease in leases:
            self._unsent.setdefault(lease.grant, []).append(lease.number)
        self._released.set()

    async def _send_releases(self) -> None:
        while True:
            await self._released.wait()
            self._released = anyio.Event()
            unsent, self._unsent = self._unsent, {}
            try:
                for grant, numbers in unsent.items():
                    release = partial(Release, grant=grant, chunks=numbers)
                    self.endpoint.call(release, Released, lambda _released: None)
            except ChannelError as error:
                self.endpoint.end(error)

    # Transfers.

    async def read(self, reads: Sequence[Read], *, hashes: bool = False) -> Sequence[Outcome]:
        """Read leased chunks into views, with ``hashes`` as :meth:`Link.read_hashed`.

        Ends at once if the peer is unresponsive or disconnects.
        """
        failed: Sequence[Outcome] = [Outcome.FAILED] * len(reads)
        items = [(lease.span, view) for lease, view in reads]
        return await self._transfer(
            failed, lambda link: link.read_hashed(items) if hashes else link.read(items)
        )

    async def write(self, writes: Sequence[Read]) -> Sequence[Outcome]:
        """Write views into reserved room. Ends like :meth:`read`."""
        failed: Sequence[Outcome] = [Outcome.FAILED] * len(writes)
        items = [(view, lease.span) for lease, view in writes]
        return await self._transfer(failed, lambda link: link.write(items))

    async def write_hashed(self, writes: Sequence[Read]) -> Written:
        """Like :meth:`write`. Return also the checksums that the transport has computed."""
        failed: Written = [Outcome.FAILED] * len(writes), [None] * len(writes)
        return await self._transfer(
            failed, lambda link: link.write_hashed([(view, lease.span) for lease, view in writes])
        )

    async def _transfer(self, failed: ResultT, transfer: Callable[[Link], Awaitable[ResultT]]) -> ResultT:
        result = failed
        if self.over or self.unresponsive:
            return result
        with CancelScope() as scope:
            self._transfers.add(scope)
            try:
                result = await transfer(await self._open_link())
            finally:
                self._transfers.discard(scope)
                if not self._transfers:
                    self._drained.set()
        return result

    async def prepare(self) -> None:
        """Open the data link ahead of the first transfer, if possible."""
        with suppress(OSError, ChannelError):  # The next transfer retries, and reports the error.
            await self._open_link()

    async def _open_link(self) -> Link:
        # Concurrent transfers share one link: with nixl each starts a process, which takes a second.
        async with self._linking:
            if self._link is None:
                self._link = await self._transport.connect(self.welcome.endpoint, self._dial)
            return self._link

    def _leases_of(
        self, granted: Granted, keys: Sequence[ChunkKey], *, prefix: bool, sent_at: float
    ) -> list[RemoteLease]:
        """Validate a response. Raises :class:`kvtier.errors.ProtocolError`."""
        count = len(granted.positions)
        expect_length(granted.offsets, count)
        expect_length(granted.lengths, count)
        if not 0 <= granted.ready <= count:
            raise ProtocolError("the peer's grant is inconsistent")
        if len(set(granted.positions)) < count or any(not 0 <= at < len(keys) for at in granted.positions):
            raise ProtocolError("the peer's grant lists chunks that were not requested")
        if prefix and count and max(granted.positions) >= count:
            raise ProtocolError("the peer's grant has a gap in the prefix")
        return leases_of(
            granted.grant,
            [keys[position] for position in granted.positions],
            granted.offsets,
            granted.lengths,
            # The grant began after the request was sent, on a clock unknown here: it ends no earlier.
            sent_at + self._usable_seconds,
            ready=granted.ready,
        )

    # End.

    def _set_unresponsive(self, unresponsive: bool) -> None:
        self._on_unresponsive(unresponsive)
        if unresponsive:
            for scope in self._transfers:
                scope.cancel()

    async def _close(self) -> None:
        """Cancel all transfers and wait for them before closing the link."""
        self.endpoint.close()
        self.leases.clear()
        while self._transfers:
            self._drained = anyio.Event()
            for scope in self._transfers:
                scope.cancel()
            await self._drained.wait()
        if self._link is not None:
            await self._link.close()


def expect_length(answers: list[EntryT], length: int) -> list[EntryT]:
    """Return the entries of a response. Raises :class:`kvtier.errors.ProtocolError` for another number."""
    if len(answers) != length:
        raise ProtocolError(f"the peer's response has {len(answers)} entries, expected {length}")
    return answers
