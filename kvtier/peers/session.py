"""Server side of one control connection.

Requests are answered in order, except ``Await`` and ``Commit``, which are tasks of their own. Everything that
was granted over a connection ends with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from kvtier.errors import ChannelError, ProtocolError
from kvtier.memory.keys import split_keys
from kvtier.observability.traces.spans import NO_TRACER, Tracer, child, following
from kvtier.peers import protocol
from kvtier.peers.grants import GrantBook
from kvtier.peers.link_codec import GrantEncoder
from kvtier.peers.lookup import PeerLookup, PendingGrant
from kvtier.peers.reservations import Reservations
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.wire import Wire

IDLE_TIMEOUT_SECONDS = 60.0
"""A peer that sends or reads nothing for this long is disconnected. Clients ping far more often."""
MAX_AWAITS = 256
"""Unanswered awaits of one connection; further ones are answered with "not readable"."""
MAX_COMMITS = 64
"""Unanswered commits of one connection. No other request is handled before one of them is answered."""
MAX_GRANTS = 16_384
"""Grants of one connection; beyond it, nothing is granted."""


class Session:
    """Answers one peer."""

    def __init__(
        self,
        wire: Wire,
        lookup: PeerLookup,
        grants: GrantBook,
        reservations: Reservations,
        counts: Counter[str],
        tracer: Tracer = NO_TRACER,
        encoder: GrantEncoder | None = None,
    ) -> None:
        """``counts``: counts the requests by type. ``encoder``: encodes for peers that ask for it."""
        self._endpoint = Endpoint(wire, protocol.decode_from_client, idle_timeout=IDLE_TIMEOUT_SECONDS)
        self._lookup = lookup
        self._grants = grants
        self._reservations = reservations
        self._counts = counts
        self._tracer = tracer
        self._encoder = encoder
        self._commits = anyio.Semaphore(MAX_COMMITS)
        self._awaits = 0
        self._tasks: TaskGroup

    async def serve(self) -> ChannelError:
        """Answer until the connection ends, and return why. The caller closes it."""
        try:
            async with anyio.create_task_group() as self._tasks:
                error = await self._endpoint.run(self._respond, at_once=self._respond_at_once, refuses=False)
                self._tasks.cancel_scope.cancel()
        finally:
            # Also if cancelled: a peer that may still write is cut off before its memory is used again.
            await self._reservations.end(self)
        if isinstance(error, ProtocolError):
            await self._endpoint.refuse(error)
        return error

    def _respond_at_once(self, message: protocol.FromClient) -> bool:
        """Answer a message. Return ``True`` if that must be left to :meth:`_respond`."""
        self._counts[type(message).__name__] += 1
        match message:
            case protocol.Await():
                self._accept_await(message)
            case protocol.Release():
                self._check_numbers(message.grant, message.chunks)
                valid = self._reservations.release(self, message.grant, message.chunks)
                self._endpoint.send(protocol.Released(message.ticket, valid))
            case protocol.Announce():
                accepted = self._reservations.announce(self, message)
                self._endpoint.send(protocol.Announced(message.ticket, accepted))
            case protocol.Withdraw():
                self._reservations.withdraw(self, message.number)
            case protocol.Reserve():
                if self._grants.count(self) >= MAX_GRANTS:
                    raise ProtocolError(f"the client has {MAX_GRANTS:,} grants, the limit, and requests more")
                self._endpoint.send(self._reservations.reserve(self, message))
            case protocol.Commit():
                self._check_numbers(message.grant, message.chunks)
                self._reservations.check(message)
                try:
                    self._commits.acquire_nowait()
                except anyio.WouldBlock:
                    return True
                self._tasks.start_soon(self._commit, message)
            case protocol.Stage():
                self._endpoint.send(self._reservations.stage(message))
            case _:
                return True
        return False

    async def _respond(self, message: protocol.FromClient) -> None:
        match message:
            case protocol.Lookup():
                await self._look_up(message)
            case protocol.Contains():
                # It may yield, and answers to earlier requests must not wait for that.
                self._endpoint.uncork()
                held = await self._lookup.held(split_keys(message.keys))
                self._endpoint.send(protocol.Contained(message.ticket, held))
            case protocol.Commit():
                self._endpoint.uncork()
                # Waiting here stops the connection's requests: a flood of commits holds no further memory.
                await self._commits.acquire()
                self._tasks.start_soon(self._commit, message)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    async def _commit(self, request: protocol.Commit) -> None:
        trace, began = self._tracer.received(request.trace), time.monotonic()
        try:
            valid = await self._reservations.commit(self, request)
            missed = valid.count(False)
            self._tracer.record("kvtier.peer.receive", trace, began, chunks=sum(valid), missed_chunks=missed)
            self._endpoint.send_or_end(protocol.Committed(request.ticket, valid))
        finally:
            self._commits.release()

    async def _look_up(self, request: protocol.Lookup) -> None:
        keys = split_keys(request.keys)
        if self._grants.count(self) >= MAX_GRANTS:
            keys = []
        self._endpoint.uncork()
        trace, began = self._tracer.received(request.trace), time.monotonic()
        within = child(trace)
        with following(within):
            positions, chunks = await self._lookup.find(
                keys, prefix=request.prefix, max_bytes=self._grants.limit
            )
        grant = self._grants.grant(self, [chunk.lease for chunk in chunks])
        count = 0 if grant is None else len(grant.leases)
        for chunk in chunks[count:]:
            chunk.lease.release()
        if grant is None:
            self._endpoint.send(protocol.Granted(request.ticket, protocol.NO_GRANT, [], [], [], 0))
            return
        del chunks[count:], positions[count:]
        late = self._lookup.late(chunks)
        offsets = [chunk.lease.offset for chunk in chunks]
        lengths = [chunk.lease.length for chunk in chunks]
        if late:
            pending = PendingGrant(self._lookup, grant, {index: chunks[index] for index in late})
            self._tasks.start_soon(pending.run)
        if trace:
            on_end, granted_bytes = grant.on_end, sum(lengths)

            def end() -> None:
                self._tracer.record(
                    "kvtier.peer.serve", trace, began, within, chunks=count, bytes=granted_bytes
                )
                if on_end is not None:
                    on_end()

            grant.on_end = end
        ready = late[0] if late else count
        self._endpoint.send(
            protocol.Granted(request.ticket, grant.number, positions, offsets, lengths, ready)
        )

    def _accept_await(self, request: protocol.Await) -> None:
        self._check_numbers(request.grant, request.chunks)
        if self._awaits >= MAX_AWAITS:
            self._endpoint.send(protocol.Readable(request.ticket, [False] * len(request.chunks)))
            return
        self._awaits += 1
        self._tasks.start_soon(self._answer_await, request)

    async def _answer_await(self, request: protocol.Await) -> None:
        try:
            grant = self._grants.find(self, request.grant)
            if grant is not None and grant.until_ready is not None:
                await grant.until_ready(request.chunks)
                grant = self._grants.find(self, request.grant)
            if grant is not None and self._encoder is not None and request.codec == self._encoder.code:
                await self._encoder.encode(grant, request.chunks)
                grant = self._grants.find(self, request.grant)
            readable = [grant is not None and grant.is_accessible(index) for index in request.chunks]
            places = grant.encoded if grant is not None else {}
            encoded = [places.get(index, (0, 0)) for index in request.chunks] if places else []
            self._endpoint.send_or_end(protocol.Readable(request.ticket, readable, encoded))
        finally:
            self._awaits -= 1

    def _check_numbers(self, number: int, chunks: Sequence[int]) -> None:
        grant = self._grants.find(self, number)
        if grant is not None and len(chunks) > len(grant.leases):
            raise ProtocolError("the client names more chunks than it was granted")
