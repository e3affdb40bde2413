"""Requests that await a reply, by ticket. Without I/O, for synchronous and asynchronous callers alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio

from kvtier.errors import ChannelError, KVTierError, ProtocolError
from kvtier.rpc.frames import Interim, Reply

MAX_CALLS = 4096
"""Default limit of unanswered requests. A side that leaves more unanswered is overloaded or dead."""

ReplyT = TypeVar("ReplyT", bound=Reply)
ResultT = TypeVar("ResultT")

Settle = Callable[[ReplyT], ResultT]
"""Validates a reply and returns its result, even if no caller waits for it any more.

Raises :class:`ProtocolError` for an invalid reply, which ends the connection, and another
:class:`KVTierError` for a failed request, which the caller gets.
"""


@dataclass(slots=True, eq=False)
class Call(Generic[ResultT]):
    """A request that was sent, and its result once the reply has arrived. Confined to one thread."""

    ticket: int
    name: str
    """What was requested, as a plural for logs."""
    _reply_type: type[Reply] | tuple[type[Reply], ...]
    _settle: Settle[Any, ResultT]
    _on_interim: Callable[[Any], None] | None = None
    _give_back: Callable[[ResultT], None] | None = None
    """Gets a result that no caller gets, so that what it grants is released."""
    result: ResultT | None = None
    error: KVTierError | None = None
    settled: bool = False
    """Whether there is a result or an error."""
    wanted: bool = True
    """False once the caller has given up."""
    _done: anyio.Event | None = None

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait up to ``seconds`` until the call is settled; return whether it is. Does not give it up."""
        if not self.settled:
            self._done = self._done or anyio.Event()
            with anyio.move_on_after(seconds):
                await self._done.wait()
        return self.settled

    async def reply(self) -> ResultT:
        """Wait for the result. Gives the call up if cancelled. Raises its error."""
        if not self.settled:
            self._done = self._done or anyio.Event()
            try:
                await self._done.wait()
            except BaseException:
                if self.settled and self.error is None:  # Since it was cancelled, but before it knows that.
                    self._return_result()
                self.abandon()
                raise
        if self.error is not None:
            # All calls of a connection fail with one error, whose traceback keeps the memory of its frames.
            raise self.error.with_traceback(None)
        return self.result  # type: ignore[return-value]  # None only if that is the result.

    def abandon(self) -> None:
        """Give up: the reply is still validated and settled, but has no effect on the caller."""
        self.wanted = False
        self._on_interim = None

    # For Calls.

    def report(self, reply: Interim) -> None:
        """Handle a reply that does not settle the call."""
        if self._on_interim is not None:
            self._on_interim(reply)

    def settle(self, reply: Reply) -> None:
        """Handle the reply. Raises :class:`ProtocolError`, which the caller gets, too."""
        try:
            if not isinstance(reply, self._reply_type):
                raise ProtocolError(f"the other side answers {self.name} with {type(reply).__name__}")  # noqa: TRY301
            self.result = self._settle(reply)
            if not self.wanted:
                self._return_result()
        except ProtocolError as error:
            self.fail(error)
            raise
        except KVTierError as error:
            self.error = error
        self._finish()

    def _return_result(self) -> None:
        if self._give_back is not None:
            self._give_back(self.result)  # type: ignore[arg-type]  # None only if that is the result.

    def fail(self, error: KVTierError) -> None:
        """Settle the call without a reply."""
        self.error = error
        self._finish()

    def _finish(self) -> None:
        self.settled = True
        if self._done is not None:
            self._done.set()


class Calls:
    """The unanswered requests of one side of a connection."""

    def __init__(self, limit: int = MAX_CALLS) -> None:
        self._limit = limit
        self._tickets = itertools.count(1)
        self._pending: dict[int, Call[Any]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._pending

    @property
    def names(self) -> Iterator[str]:
        """What the unanswered requests are, for logs."""
        return (call.name for call in self._pending.values())

    def next_ticket(self) -> int:
        """Return an unused ticket, for requests that are not tracked here."""
        return next(self._tickets)

    def add(
        self,
        name: str,
        reply_type: type[Reply] | tuple[type[Reply], ...],
        settle: Settle[Any, ResultT],
        on_interim: Callable[[Any], None] | None = None,
        give_back: Callable[[ResultT], None] | None = None,
    ) -> Call[ResultT]:
        """Create a call with a new ticket. Raises :class:`ChannelError` beyond the limit."""
        if len(self._pending) >= self._limit:
            raise ChannelError(f"the other side has left {self._limit:,} requests unanswered")
        call = Call(next(self._tickets), name, reply_type, settle, on_interim, give_back)
        self._pending[call.ticket] = call
        return call

    def remove(self, call: Call[Any]) -> None:
        """Forget a call whose request was not sent."""
        self._pending.pop(call.ticket, None)

    def settle(self, reply: Reply) -> bool:
        """Settle the call that this answers; return whether there is one. Raises :class:`ProtocolError`."""
        call = self._pending.get(reply.ticket)
        if call is None:
            return False
        if isinstance(reply, Interim):
            call.report(reply)
        else:
            del self._pending[reply.ticket]
            call.settle(reply)
        return True

    def fail(self, error: KVTierError) -> None:
        """Fail every call, because the connection has ended."""
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.fail(error)
