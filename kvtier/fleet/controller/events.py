"""The log of operations (*events*), their progress and their results.

An event is queued, then running, then done or failed, and is kept for some time afterwards. The log survives
the controller, and what has not ended is queued again by the next one, from what is stored of the operation.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Literal

import anyio
import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from kvtier.errors import ControllerError
from kvtier.fleet.controller.errors import TooManyOperations, UnknownName
from kvtier.fleet.controller.settings import KEEP_SECONDS
from kvtier.fleet.controller.state import EVENTS, OPERATIONS, State

Kind = Literal["move", "copy", "prefetch", "pin", "unpin", "clear"]
EventState = Literal["queued", "running", "done", "failed"]
Position = tuple[str, str | None]
"""Instance id and tier name; ``None`` for all tiers."""

MAX_ENDED = 10_000
MAX_UNFINISHED = 1_000
"""Backpressure: further operations are refused until some have finished."""
INTERRUPTED = "it was interrupted, and is too old to be continued or was stored by an earlier version"
PARTIAL_PROGRESS = "chunks confirmed before that keep their new state: repeat the request to do the rest"


class Result(BaseModel):
    """The result of an event."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    tokens: int = Field(default=0, description="Tokens of the chunks that were processed.")
    chunks: int = Field(default=0, description="Chunks moved, copied, fetched, pinned, unpinned or removed.")
    bytes: int = Field(default=0, description="Bytes transferred, or freed by a clear.")
    removed: int = Field(default=0, description="Chunks removed: from the source of a move, or by a clear.")
    unpinned: int = Field(
        default=0, description="Pinned chunks that are not pinned any more: unpinned, moved away or cleared."
    )
    reason: str | None = Field(default=None, description="Why fewer chunks were processed than requested.")


class Event(BaseModel):
    """One operation. Times are Unix timestamps in seconds."""

    # Only the EventLog modifies it. In the API, this is the description, and no field is ever missing.
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    # In the state file it is "id".
    event_id: str = Field(validation_alias=AliasChoices("event_id", "id"), examples=["9f86d081884c7d65"])
    kind: Kind
    state: EventState = "queued"
    source: Position | None = Field(
        description="The source of a move or copy: instance and tier.", examples=[["instance-1", "cpu"]]
    )
    target: Position | None = Field(
        description="The instance and tier that the operation targets; tier `null` means all tiers.",
        examples=[["instance-2", "cpu"]],
    )
    model: str | None
    num_tokens: int = Field(description="Tokens to be moved, pinned, etc. 0 for a clear without a prompt.")
    chunks: int = Field(description="Number of chunks that the operation applies to.")
    chunks_done: int = 0
    bytes_done: int = 0
    created_at: float
    started_at: float | None = Field(
        default=None, description="`null` while it waits for conflicting operations."
    )
    ended_at: float | None = None
    error: str | None = Field(default=None, description="Why it failed.")
    result: Result = Field(default_factory=Result)

    @property
    def ended(self) -> bool:
        """Whether the event is done or failed."""
        return self.ended_at is not None


def _decode_row(row: tuple[str, float, bytes]) -> Event:
    event_id, _, encoded = row
    event = Event.model_validate(msgspec.msgpack.decode(encoded))
    if event.event_id != event_id:
        raise ValueError(f"it has event {event.event_id:.100}")
    return event


_as_operation = partial(msgspec.convert, type=tuple[str, bytes])
Listener = Callable[[Event], None]


class EventLog:
    """All unfinished events, and recent finished ones. Only the ``wait`` methods are asynchronous."""

    def __init__(
        self,
        state: State,
        *,
        keep: float = KEEP_SECONDS,
        max_ended: int = MAX_ENDED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Load the events of a previous run from ``state``. ``keep`` is in seconds after an event's end."""
        self._state = state
        self._keep = keep
        self._max_ended = max_ended
        self._clock = clock
        self._events: dict[str, Event] = {}
        """Oldest first."""
        self._ended: deque[Event] = deque()
        """In the order of their end."""
        self._ends: dict[str, anyio.Event] = {}
        """Set at the end of an event; unfinished events only."""
        self.listeners: set[Listener] = set()
        """Those that :meth:`subscribe` has added."""
        self.counts: Counter[tuple[Kind, EventState]] = Counter()
        """Transitions into each state since the controller started."""
        self.seconds: defaultdict[Kind, float] = defaultdict(float)
        """Total run time of finished events in seconds, by kind."""
        self._closing = anyio.Event()
        self.interrupted: dict[str, bytes] = {}
        """Stored operations of those events that a previous run has not ended, the oldest first."""
        self._load()

    def _load(self) -> None:
        events = self._state.decoded(self._state.rows(EVENTS), _decode_row)
        operations = dict(self._state.decoded(self._state.rows(OPERATIONS), _as_operation))
        for event in sorted(events, key=lambda event: event.created_at):
            self._events[event.event_id] = event
            if event.ended:
                continue
            self._ends[event.event_id] = anyio.Event()
            operation = operations.get(event.event_id)
            if operation is None or event.created_at < self._clock() - self._keep:
                self.fail(event, f"{INTERRUPTED}; {PARTIAL_PROGRESS}")
            else:
                event.state, event.started_at = "queued", None
                self.interrupted[event.event_id] = operation
        # A controller may have been killed between the end of an event and this.
        leftovers = operations.keys() - self._ends.keys()
        self._state.delete(OPERATIONS, [(event_id,) for event_id in leftovers])
        ended = (event for event in events if event.ended)
        self._ended = deque(sorted(ended, key=lambda event: event.ended_at or 0.0))
        self._expire()

    @property
    def closed(self) -> bool:
        """Whether what has not ended is left to the next run."""
        return self._closing.is_set()

    @property
    def unfinished(self) -> int:
        """Number of queued and running events."""
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
        operation: bytes = b"",
    ) -> Event:
        """Add a queued event, with its operation as stored. Raises: TooManyOperations."""
        if len(self._ends) >= MAX_UNFINISHED:
            raise TooManyOperations(
                f"{MAX_UNFINISHED} operations are in flight: retry when some of them have finished"
            )
        self._expire()
        event = Event(
            event_id=secrets.token_hex(8),
            kind=kind,
            source=source,
            target=target,
            model=model,
            num_tokens=num_tokens,
            chunks=chunks,
            created_at=self._clock(),
        )
        self._events[event.event_id] = event
        self._ends[event.event_id] = anyio.Event()
        self._state.put(OPERATIONS, (event.event_id, operation))
        self._changed(event)
        return event

    async def saved(self, event: Event) -> None:
        """Wait until a new event survives this process. Raises: ControllerError: then it has failed."""
        try:
            await self._state.saved()
        except ControllerError as error:
            self.fail(event, str(error))
            raise

    def start(self, event: Event) -> None:
        """Mark an event as running."""
        event.state, event.started_at = "running", self._clock()
        self._changed(event)

    def progress(self, event: Event, chunks: int, transferred: int) -> None:
        """Update an event's progress and notify listeners. Progress is not persisted."""
        event.chunks_done, event.bytes_done = min(chunks, event.chunks), transferred
        self._notify(event)

    def finish(self, event: Event) -> None:
        """Mark an event as done. Its ``result`` may be partial."""
        self._end(event, "done")

    def fail(self, event: Event, error: str) -> None:
        """Mark an event as failed. No effect on one that has ended, or is left to the next run."""
        if not (event.ended or self.closed):
            event.error = error
            self._end(event, "failed")

    def close(self) -> None:
        """Leave unfinished events to the next run, and wake all who wait for one. Idempotent."""
        self._closing.set()
        for end in self._ends.values():
            end.set()

    def find(self, event_id: str) -> Event:
        """Return the event with this id. Raises: UnknownName."""
        self._expire()
        event = self._events.get(event_id)
        if event is None:
            raise UnknownName(f"event {event_id!r}", [known.event_id for known in self.newest(10)])
        return event

    def newest(self, limit: int) -> list[Event]:
        """Return the latest events, newest first."""
        self._expire()
        return list(islice(reversed(self._events.values()), limit))

    async def wait(self, event: Event, seconds: float) -> None:
        """Wait until the event has ended or the log is closed, for at most ``seconds``."""
        end = self._ends.get(event.event_id)
        if end is not None:
            with anyio.move_on_after(seconds):
                await end.wait()
        if event.ended:
            # Else the next controller could repeat what its client takes for done.
            with suppress(ControllerError):
                await self._state.saved()

    async def wait_closed(self) -> None:
        """Wait until the log is closed."""
        await self._closing.wait()

    async def wait_all(self) -> None:
        """Wait until no event is queued or running, or the log is closed."""
        while self._ends and not self.closed:
            await next(iter(self._ends.values())).wait()

    @contextmanager
    def subscribe(self, listener: Listener) -> Iterator[None]:
        """Call ``listener`` on every change and progress within the block. It must not block."""
        self.listeners.add(listener)
        try:
            yield
        finally:
            self.listeners.discard(listener)

    def _end(self, event: Event, state: EventState) -> None:
        event.state, event.ended_at = state, self._clock()
        self.seconds[event.kind] += event.ended_at - (event.started_at or event.created_at)
        self._ended.append(event)
        self._changed(event)
        self._state.delete(OPERATIONS, [(event.event_id,)])
        self._ends.pop(event.event_id).set()

    def _changed(self, event: Event) -> None:
        self.counts[event.kind, event.state] += 1
        self._save(event)
        self._notify(event)

    def _notify(self, event: Event) -> None:
        for listener in tuple(self.listeners):
            listener(event)

    def _save(self, event: Event) -> None:
        # As all versions write and read it: a controller may be replaced by one of an earlier version.
        encoded = msgspec.msgpack.encode({"id": event.event_id, **event.model_dump(exclude={"event_id"})})
        self._state.put(EVENTS, (event.event_id, event.created_at, encoded))

    def _expire(self) -> None:
        """Delete finished events that are older than ``keep`` or beyond ``max_ended``."""
        before = self._clock() - self._keep
        expired = []
        while self._ended and (
            (self._ended[0].ended_at or 0.0) < before or len(self._ended) > self._max_ended
        ):
            event = self._ended.popleft()
            del self._events[event.event_id]
            expired.append((event.event_id,))
        if expired:
            self._state.delete(EVENTS, expired)
