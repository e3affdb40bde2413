"""Forward warnings of the cache process to its engines, so that they appear in vLLM's log as well."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio

from kvtier.concurrency.threads import caller_into_loop

MAX_NOTICES = 16
"""Maximum number of notices queued for an engine, and sent to it in one batch."""
MAX_CHARACTERS = 500
"""Maximum length of a notice."""
INTERVAL_SECONDS = 1.0
"""Interval between batches."""


class _Queue:
    """Unsent notices of one engine."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque()
        self.dropped = 0
        self.wake = anyio.Event()

    def put(self, text: str) -> None:
        if len(self.texts) < MAX_NOTICES:
            self.texts.append(text)
        else:
            self.dropped += 1
        self.wake.set()

    def take(self) -> list[str]:
        texts, dropped = [*self.texts], self.dropped
        self.texts.clear()
        self.dropped, self.wake = 0, anyio.Event()
        return [*texts, f"{dropped} further warnings are in the cache process's log"] if dropped else texts


class Notices(logging.Handler):
    """A logging handler that forwards warnings, as formatted in the log, to every subscriber.

    Thread-safe and non-blocking: notices that an engine does not read in time are dropped and counted.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._queues: set[_Queue] = set()
        self._call_soon: Callable[..., object] | None = None

    @contextmanager
    def listening(self, logger: logging.Logger) -> Iterator[None]:
        """Forward the records of ``logger``. Call from the event loop."""
        self._call_soon = caller_into_loop()
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            self._call_soon = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the first line of a message, without its traceback."""
        call_soon = self._call_soon
        if call_soon is None or not self._queues:
            return
        try:
            text = next(iter(record.getMessage().splitlines()), "")[:MAX_CHARACTERS]
        except Exception:
            self.handleError(record)
            return
        with suppress(RuntimeError):  # The event loop is closed.
            call_soon(self._put, text)

    async def forward(self, send: Callable[[list[str]], Awaitable[None]]) -> None:
        """Send notices in batches until cancelled. Each is sent within a few seconds."""
        queue = _Queue()
        self._queues.add(queue)
        try:
            while True:
                await queue.wake.wait()
                await send(queue.take())
                await anyio.sleep(INTERVAL_SECONDS)
        finally:
            self._queues.discard(queue)

    def _put(self, text: str) -> None:
        for queue in self._queues:
            queue.put(text)
