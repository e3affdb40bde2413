"""What happens, told as it happens: server-sent events (https://html.spec.whatwg.org/#server-sent-events).

A reader is told the newest state of what has changed since it was told last. One that reads slowly is told
less often, and of fewer events where it has fallen far behind; one that takes nothing in is let go.
"""

from __future__ import annotations

import math
import time

import anyio
from anyio import CancelScope
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvtier.controller import answers
from kvtier.controller.events import Event, EventLog
from kvtier.controller.registry import Registry

MOST_READERS = 64
INSTANCES_SECONDS = 1.0
"""Between two lists of instances, at least,"""
QUIET_SECONDS = 10.0
"""and at most."""
EVENTS_SECONDS = 0.2
"""Between two states of one event, at least."""
MOST_CHANGED = 1000
"""Events that one reader has not been told of. Beyond, the oldest changes are left out."""
PATIENCE_SECONDS = 30.0
"""How long a reader may take to take something in."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
"""The last is for proxies that would gather what they pass on."""


class Stream:
    """All readers of one controller."""

    def __init__(self, registry: Registry, events: EventLog) -> None:
        self.registry = registry
        self.events = events
        self.readers = 0
        self._listed: tuple[float, bytes] = (0.0, b"")

    @property
    def full(self) -> bool:
        """Whether there are as many readers as there may be."""
        return self.readers >= MOST_READERS

    def instances(self) -> bytes:
        """The list of instances as a message: one list for all readers, as they ask at much the same time."""
        made, message = self._listed
        now = time.monotonic()
        if not message or now - made >= INSTANCES_SECONDS / 2:
            message = _message("instances", answers.of_registry(self.registry))
            self._listed = now, message
        return message


class Reader(Response):
    """One answer to ``GET /stream``."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._changed: dict[str, Event] = {}
        """Events to be told of, in the order in which they changed first."""
        self._instances_changed = False
        self._listed_at = -QUIET_SECONDS
        self._woken = anyio.Event()
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on until the reader goes, or the server cuts the connection off."""
        self._send = send
        self._stream.readers += 1
        try:
            with self._stream.events.watching(self._note):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch)
                    tasks.start_soon(self._tell, tasks.cancel_scope)
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()
        finally:
            self._stream.readers -= 1

    def _note(self, event: Event) -> None:
        self._changed[event.id] = event
        if len(self._changed) > MOST_CHANGED:
            del self._changed[next(iter(self._changed))]
        self._woken.set()

    async def _watch(self) -> None:
        watch = self._stream.registry.watch()
        while True:
            await watch.changed()
            self._instances_changed = True
            self._woken.set()
            await anyio.sleep(EVENTS_SECONDS)

    async def _tell(self, scope: CancelScope) -> None:
        """Tell what is due, until the reader takes nothing in any longer."""
        with anyio.move_on_after(PATIENCE_SECONDS) as self._patience:
            await self._say({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while True:
                self._woken = anyio.Event()
                changed, self._changed = self._changed, {}
                for event in changed.values():
                    await self._write(_message("event", answers.of_event(event)))
                if self._left <= 0:
                    self._instances_changed = False
                    self._listed_at = anyio.current_time()
                    await self._write(self._stream.instances())
                await self._rest()
        scope.cancel()

    @property
    def _left(self) -> float:
        """Seconds until the next list of instances is due."""
        pause = INSTANCES_SECONDS if self._instances_changed else QUIET_SECONDS
        return self._listed_at + pause - anyio.current_time()

    async def _rest(self) -> None:
        self._patience.deadline = math.inf
        if not self._changed:
            with anyio.move_on_after(self._left):
                await self._woken.wait()
        await anyio.sleep(EVENTS_SECONDS)

    async def _write(self, message: bytes) -> None:
        await self._say({"type": "http.response.body", "body": message, "more_body": True})

    async def _say(self, message: Message) -> None:
        self._patience.deadline = anyio.current_time() + PATIENCE_SECONDS
        await self._send(message)


def _message(name: str, value: BaseModel) -> bytes:
    # JSON has no line breaks of its own, so that it is one line of data.
    return f"event: {name}\ndata: {value.model_dump_json()}\n\n".encode()
