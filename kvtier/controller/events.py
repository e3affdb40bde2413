"""What the controller was asked to do, and what has become of it.

An event is queued, then running, then done or failed, and stays for a while after its end. What the log
holds survives the controller, but not what it was doing: an event that had not ended has failed.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Literal

import anyio
import msgspec

from kvtier.controller.errors import TooManyOperations, UnknownEvent
from kvtier.controller.state import State

Kind = Literal["move", "copy", "prefetch", "pin", "unpin", "clear"]
EventState = Literal["queued", "running", "done", "failed"]
Position = tuple[str, str | None]
"""An instance and one of its tiers, by their names; ``None`` for all tiers."""

KEEP_SECONDS = 3600.0
MOST_ENDED = 10_000
MOST_UNFINISHED = 1_000
"""What comes on top is refused: whoever asks faster than instances can move must wait, not the controller."""
RESTARTED = "the controller was restarted"
MEANWHILE = "what was confirmed until then stays as it is: ask for the same again to do the rest"


class Result(msgspec.Struct, kw_only=True):
    """What has come of an event."""

    tokens: int = 0
    """Of the chunks that are now as they should be."""
    chunks: int = 0
    """How many these are."""
    bytes: int = 0
    """Transferred, or freed by a clear."""
    removed: int = 0
    """Chunks that were removed: from the source of a move, or by a clear."""
    reason: str | None = None
    """Where that is less than was asked for: why."""


class Event(msgspec.Struct, kw_only=True, eq=False):
    """One operation. Changed by the :class:`EventLog` alone."""

    id: str
    kind: Kind
    source: Position | None
    target: Position | None
    model: str | None
    num_tokens: int
    """That are to be moved, pinned ...; 0 where a tier is cleared of all that it holds, whoever's that is."""
    chunks: int
    state: EventState = "queued"
    chunks_done: int = 0
    bytes_done: int = 0
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None
    result: Result = msgspec.field(default_factory=Result)

    @property
    def ended(self) -> bool:
        """Whether it is done or failed."""
        return self.ended_at is not None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode

Listener = Callable[[Event], None]


class EventLog:
    """All events that are under way, and those that have ended of late. Synchronous but for :meth:`wait`."""

    def __init__(
        self,
        state: State,
        *,
        keep: float = KEEP_SECONDS,
        most: int = MOST_ENDED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take in what a former run has left in ``state``. ``keep`` is in seconds after an event's end."""
        self._state = state
        self._keep = keep
        self._most = most
        self._clock = clock
        self._events: dict[str, Event] = {}
        """The oldest first."""
        self._ended: deque[Event] = deque()
        """In the order in which they ended."""
        self._ends: dict[str, anyio.Event] = {}
        """Of those that have not ended."""
        self._listeners: set[Listener] = set()
        self.counts: Counter[tuple[Kind, EventState]] = Counter()
        """How many have come to each state since this run began."""
        self.seconds: defaultdict[Kind, float] = defaultdict(float)
        """Seconds from the start to the end of all that have ended, by their kind."""
        self._take_in()

    def _take_in(self) -> None:
        for (row,) in self._state.read("SELECT event FROM events ORDER BY created_at"):
            assert isinstance(row, bytes)
            event = _decode(row)
            self._events[event.id] = event
        for event in self._events.values():
            if not event.ended:
                event.state, event.ended_at = "failed", self._clock()
                event.error = f"{RESTARTED}; {MEANWHILE}"
                self._save(event)
        self._ended.extend(sorted(self._events.values(), key=lambda event: event.ended_at or 0.0))
        self._forget()

    @property
    def unfinished(self) -> int:
        """How many are queued or running."""
        return len(self._ends)

    def create(
        self,
        kind: Kind,
        *,
        source: Position | None = None,
        target: Position | None = None,
        model: str | None = None,
        num_tokens: int = 0,
        chunks: int = 0,
    ) -> Event:
        """Enter a new event. Raises :class:`TooManyOperations` where too many are under way."""
        if len(self._ends) >= MOST_UNFINISHED:
            raise TooManyOperations(
                f"{MOST_UNFINISHED} operations are under way: ask again when some of them have ended"
            )
        self._forget()
        event = Event(
            id=secrets.token_hex(8),
            kind=kind,
            source=source,
            target=target,
            model=model,
            num_tokens=num_tokens,
            chunks=chunks,
            created_at=self._clock(),
        )
        self._events[event.id] = event
        self._ends[event.id] = anyio.Event()
        self._changed(event)
        return event

    def start(self, event: Event) -> None:
        """It is being carried out."""
        event.state, event.started_at = "running", self._clock()
        self._changed(event)

    def progress(self, event: Event, chunks: int, transferred: int) -> None:
        """So much of it is done; told to whoever watches, and not written down."""
        event.chunks_done, event.bytes_done = min(chunks, event.chunks), transferred
        self._tell(event)

    def finish(self, event: Event) -> None:
        """It is done; its result says how far."""
        self._end(event, "done")

    def fail(self, event: Event, error: str) -> None:
        """It has failed, for a reason in words. Harmless where it has ended already."""
        if not event.ended:
            event.error = error
            self._end(event, "failed")

    def fail_all(self, error: str) -> None:
        """All that have not ended have failed, for one reason."""
        for number in list(self._ends):
            self.fail(self._events[number], error)

    def find(self, number: str) -> Event:
        """The event of this id. Raises :class:`UnknownEvent`."""
        self._forget()
        event = self._events.get(number)
        if event is None:
            raise UnknownEvent(number, [known.id for known in self.newest(10)])
        return event

    def newest(self, limit: int) -> list[Event]:
        """The events that were asked for last, the newest first."""
        self._forget()
        return list(islice(reversed(self._events.values()), limit))

    async def wait(self, event: Event, seconds: float) -> None:
        """Wait until it has ended, for ``seconds`` at most."""
        end = self._ends.get(event.id)
        if end is not None:
            with anyio.move_on_after(seconds):
                await end.wait()

    async def all_ended(self) -> None:
        """Wait until none is under way."""
        while self._ends:
            await next(iter(self._ends.values())).wait()

    @contextmanager
    def watching(self, listener: Listener) -> Iterator[None]:
        """Tell ``listener`` of every change and progress while the block lasts; it must not block."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _end(self, event: Event, state: EventState) -> None:
        event.state, event.ended_at = state, self._clock()
        self.seconds[event.kind] += event.ended_at - (event.started_at or event.created_at)
        self._ended.append(event)
        self._changed(event)
        self._ends.pop(event.id).set()

    def _changed(self, event: Event) -> None:
        self.counts[event.kind, event.state] += 1
        self._save(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    def _save(self, event: Event) -> None:
        self._state.write(
            "REPLACE INTO events VALUES (?, ?, ?)", [(event.id, event.created_at, _encode(event))]
        )

    def _forget(self) -> None:
        """What ended long ago, and the oldest of too many."""
        before = self._clock() - self._keep
        gone = []
        while self._ended and ((self._ended[0].ended_at or 0.0) < before or len(self._ended) > self._most):
            event = self._ended.popleft()
            del self._events[event.id]
            gone.append((event.id,))
        if gone:
            self._state.write("DELETE FROM events WHERE id = ?", gone)
