"""The stream of changes, as server-sent events (https://html.spec.whatwg.org/#server-sent-events).

A reader gets the latest state of everything that changed since its last update. Slow readers get updates less
often, and miss the oldest changes if they fall far behind. Readers that accept no data are disconnected.
"""

from __future__ import annotations

import math
import time

import anyio
from anyio import CancelScope
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvtier.fleet.controller import answers
from kvtier.fleet.controller.events import Event, EventLog
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import Registry

MAX_READERS = 64
INSTANCES_SECONDS = 1.0
"""Minimum interval between two lists of instances."""
KEEPALIVE_SECONDS = 10.0
"""Maximum interval between two lists of instances."""
EVENTS_SECONDS = 0.2
"""Minimum interval between two updates."""
MAX_CHANGED = 1000
"""Events queued for one reader. Beyond this, the oldest changes are dropped."""
TIMEOUT_SECONDS = 30.0
"""Timeout for sending one message to a reader."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
"""The last one stops nginx from buffering the response."""


class Stream:
    """State shared by all readers of one controller."""

    def __init__(self, registry: Registry, events: EventLog, pins: Pins) -> None:
        self.registry = registry
        self.pins = pins
        self.events = events
        self.readers = 0
        self._listed: tuple[float, bytes] = (0.0, b"")

    @property
    def full(self) -> bool:
        """Whether the limit of readers is reached."""
        return self.readers >= MAX_READERS

    def instances(self) -> bytes:
        """Return the list of instances as a message. Cached: all readers need it at about the same time."""
        made, message = self._listed
        now = time.monotonic()
        if not message or now - made >= INSTANCES_SECONDS / 2:
            members, gone = self.registry.members.values(), self.registry.gone.values()
            message = _message("instances", answers.of_members(members, gone, self.pins))
            self._listed = now, message
        return message


class Reader(Response):
    """One response to ``GET /stream``."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._changed: dict[str, Event] = {}
        """Events to send, in the order of their first change."""
        self._instances_changed = False
        self._listed_at = -KEEPALIVE_SECONDS
        self._wakeup = anyio.Event()
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the reader disconnects, or another controller has the events that follow."""
        self._send = send
        self._stream.readers += 1
        try:
            with self._stream.events.subscribe(self._on_event):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch)
                    tasks.start_soon(self._watch_log)
                    tasks.start_soon(self._send_updates, tasks.cancel_scope)
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()
        finally:
            self._stream.readers -= 1

    def _on_event(self, event: Event) -> None:
        self._changed[event.event_id] = event
        if len(self._changed) > MAX_CHANGED:
            del self._changed[next(iter(self._changed))]
        self._wakeup.set()

    async def _watch(self) -> None:
        changes = self._stream.registry.changes
        seen = changes.count
        while True:
            seen = await changes.after(seen)
            self._instances_changed = True
            self._wakeup.set()
            # Every heartbeat is a change: a thousand instances would wake each reader all the time.
            await anyio.sleep(EVENTS_SECONDS)

    async def _watch_log(self) -> None:
        await self._stream.events.wait_closed()
        self._wakeup.set()

    async def _send_updates(self, scope: CancelScope) -> None:
        """Send updates until one times out, or the log is closed."""
        with anyio.move_on_after(TIMEOUT_SECONDS) as self._send_scope:
            await self._send_message({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while not self._stream.events.closed:
                self._wakeup = anyio.Event()
                changed, self._changed = self._changed, {}
                for event in changed.values():
                    await self._write(_message("event", event))
                if self._until_listing <= 0:
                    self._instances_changed = False
                    self._listed_at = anyio.current_time()
                    await self._write(self._stream.instances())
                await self._wait_for_changes()
            await self._send_message({"type": "http.response.body"})
        scope.cancel()

    @property
    def _until_listing(self) -> float:
        """Seconds until the next list of instances is due."""
        pause = INSTANCES_SECONDS if self._instances_changed else KEEPALIVE_SECONDS
        return self._listed_at + pause - anyio.current_time()

    async def _wait_for_changes(self) -> None:
        self._send_scope.deadline = math.inf
        if not self._changed:
            with anyio.move_on_after(self._until_listing):
                await self._wakeup.wait()
        await anyio.sleep(EVENTS_SECONDS)

    async def _write(self, message: bytes) -> None:
        await self._send_message({"type": "http.response.body", "body": message, "more_body": True})

    async def _send_message(self, message: Message) -> None:
        self._send_scope.deadline = anyio.current_time() + TIMEOUT_SECONDS
        await self._send(message)


def _message(name: str, value: BaseModel) -> bytes:
    # Compact JSON has no line breaks, so it fits in one data line.
    return f"event: {name}\ndata: {value.model_dump_json()}\n\n".encode()
