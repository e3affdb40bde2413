"""The hand-overs that one scheduler has asked for. They end with its connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.abc import TaskGroup

from kvtier.backends.logs import Troubles
from kvtier.bridge.protocol import EndHandOver, HandedOver, HandOver
from kvtier.catalog import Catalog, State
from kvtier.errors import PeerError, ProtocolError
from kvtier.keys import ChunkKey, split_keys
from kvtier.layout import ChunkLayout
from kvtier.pipeline.store import Reservation
from kvtier.router import FIRST

if TYPE_CHECKING:
    from kvtier.peers.staging import Staging

COMMIT_POLL_SECONDS = 0.02
"""How often it is looked whether the workers have filled what was reserved. Only at a prompt's end."""


class Result(Protocol):
    """What became of a hand-over: see :class:`kvtier.peers.handed.HandedOver`."""

    @property
    def leading(self) -> int:
        """How many chunks from the first on the peer has."""

    @property
    def refused(self) -> bool:
        """Whether the peer takes nothing of this model."""

    @property
    def trouble(self) -> str:
        """Why not all of it is there."""


class Handing(Protocol):
    """A hand-over under way: see :class:`kvtier.peers.handing.HandOver`."""

    filling: int
    """How many chunks its engine is about to put into a staging buffer."""

    def stages(self, key: ChunkKey) -> bool:
        """Whether a chunk is wanted from a staging buffer."""

    def staged(self, staging: Staging, chunk: Reservation) -> None:
        """A chunk is whole in a staging buffer. Takes over its lease."""

    @property
    def ended(self) -> anyio.Event:
        """Set when nothing is pushed or awaited by it any longer."""

    @property
    def result(self) -> Result:
        """What became of it so far."""

    async def finish(self, seconds: float) -> Result:
        """No further chunk will become READY: push those that are, so long at most."""

    def abort(self) -> None:
        """Push nothing more."""


Begin = Callable[[str, Sequence[ChunkKey]], Handing]
"""Begins to push the chunks of a prompt to a peer. Raises :class:`PeerError`."""


class EngineHandOvers:
    """Begins and ends the hand-overs of one engine, and tells it what becomes of them."""

    def __init__(
        self,
        begin: Begin,
        catalog: Catalog,
        layout: ChunkLayout,
        troubles: Troubles,
        seconds: float,
        tasks: TaskGroup,
        tell: Callable[[HandedOver], Awaitable[None]],
    ) -> None:
        """``seconds``: how long what is reserved may take to be filled and pushed, once a prompt is computed.

        ``tasks`` are those of the connection, on which ``tell`` sends.
        """
        self._begin = begin
        self._catalog = catalog
        self._layout = layout
        self._troubles = troubles
        self._seconds = seconds
        self._tasks = tasks
        self._tell = tell
        self._open: dict[int, tuple[Handing, list[ChunkKey]]] = {}

    @property
    def count(self) -> int:
        """How many are under way."""
        return len(self._open)

    def find(self, ticket: int) -> Handing | None:
        """One that is under way."""
        return self._open.get(ticket, (None, ()))[0]

    def begin(self, ask: HandOver) -> HandedOver | None:
        """Push from now on what is READY; an answer where that cannot be. Raises :class:`ProtocolError`."""
        try:
            keys = split_keys(ask.keys)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if ask.ticket in self._open or not 0 < ask.tokens <= len(keys) * self._layout.chunk_tokens:
            raise ProtocolError("a hand-over that does not fit together")
        try:
            handing = self._begin(ask.to, keys)
        except PeerError as error:
            self._troubles.note(ask.to, str(error))
            return HandedOver(ask.ticket, 0, str(error))
        self._open[ask.ticket] = handing, keys
        self._tasks.start_soon(self._watch, ask, handing)
        return None

    def end(self, ask: EndHandOver) -> None:
        """No further chunk of it will be reserved. Unknown numbers are passed over."""
        handing, keys = self._open.get(ask.ticket, (None, ()))
        if handing is None:
            return
        if ask.complete:
            self._tasks.start_soon(self._finish, handing, keys)
        else:
            handing.abort()

    def close(self) -> None:
        """The scheduler is gone."""
        for handing, _ in self._open.values():
            handing.abort()
        self._open.clear()

    async def _finish(self, handing: Handing, keys: Sequence[ChunkKey]) -> None:
        """Workers say that they have filled a chunk on connections of their own: maybe later than this."""
        deadline = anyio.current_time() + self._seconds
        while (
            not handing.ended.is_set()
            and (handing.filling or self._coming(keys))
            and anyio.current_time() < deadline
        ):
            with anyio.move_on_after(COMMIT_POLL_SECONDS):
                await handing.ended.wait()
        await handing.finish(self._seconds)

    def _coming(self, keys: Sequence[ChunkKey]) -> bool:
        return any(self._catalog.state(key, FIRST) is State.PENDING for key in keys)

    async def _watch(self, ask: HandOver, handing: Handing) -> None:
        await handing.ended.wait()
        self._open.pop(ask.ticket, None)
        result = handing.result
        trouble = f"{result.trouble}; here: {self._layout}" if result.refused else result.trouble
        self._troubles.note(ask.to, trouble)
        tokens = min(result.leading * self._layout.chunk_tokens, ask.tokens)
        await self._tell(HandedOver(ask.ticket, tokens, trouble))
