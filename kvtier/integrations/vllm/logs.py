"""Log without delaying a step of the engine.

If other processes saturate the disk with writes, the kernel throttles every writer, even one that appends a
single line (``balance_dirty_pages`` in mm/page-writeback.c): one line has delayed a step by 0.3 s. So a
thread writes the connector's log (:class:`LogThread`). A line still costs 0.1 to 1 ms of the step, and steps
that store are as frequent as those of a prompt: :class:`StoreLog` writes one per second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from logging import Handler, Logger, LogRecord
from logging.handlers import QueueHandler

INTERVAL_SECONDS = 1.0
"""How often :class:`StoreLog` writes a line."""
MAX_RECORDS = 10_000
"""Maximum number of queued records; further ones are dropped."""
GATHER_SECONDS = 0.1
"""How long the thread gathers lines. Waking it for each takes the GIL from the engine in the middle of a
step, up to 1 ms each time if all cores are busy.
"""
FLUSH_SECONDS = 1.0
POLL_SECONDS = 0.001


class _Forward(Handler):
    """Forwards records to another logger's handlers."""

    def __init__(self, to: Logger) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: LogRecord) -> None:
        self._to.handle(record)


class LogThread(QueueHandler):
    """Passes a logger's records to its parent's handlers, in a thread. Thread-safe."""

    def __init__(self, to: Logger) -> None:
        """Start the thread; ``to`` is the parent."""
        self._records: deque[LogRecord] = deque()
        """Not yet written; a record leaves once it is."""
        super().__init__(self._records)  # type: ignore[arg-type]  # Only `enqueue` uses it.
        self._process = os.getpid()
        self._forward = _Forward(to)
        self._waiting = threading.Event()
        self._flushing = threading.Event()
        threading.Thread(target=self._write, name="kvtier log", daemon=True).start()

    @classmethod
    def of(cls, logger: Logger) -> LogThread:
        """Return the log thread of ``logger``; install one if it has none."""
        for handler in logger.handlers:
            if isinstance(handler, LogThread):
                return handler
        created = cls(logger.parent or logging.getLogger())
        logger.addHandler(created)
        logger.propagate = False
        return created

    def enqueue(self, record: LogRecord) -> None:
        """Queue a record. Blocks only in a forked child, which has no log thread."""
        if os.getpid() != self._process:
            self._forward.emit(record)
            return
        if len(self._records) < MAX_RECORDS:
            self._records.append(record)
        if not self._waiting.is_set():  # set() takes a lock, even if it changes nothing.
            self._waiting.set()

    def _write(self) -> None:
        """Write records forever. The thread's main function."""
        while True:
            self._waiting.wait()
            self._flushing.wait(GATHER_SECONDS)
            self._waiting.clear()
            # A record is removed after it was written, so flush() may return once the queue is empty.
            while self._records:
                try:
                    self._forward.emit(self._records[0])
                except Exception:
                    self.handleError(self._records[0])
                self._records.popleft()

    def flush(self) -> None:
        """Block until all records are written, up to :data:`FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        self._flushing.set()
        while self._records and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._flushing.clear()


class StoreLog:
    """Adds up what is stored until a line is due. Not thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since = 0.0
        self._requests: set[str] = set()
        self._tokens = 0
        self._bytes = 0
        self._seconds = 0.0

    def add(self, requests: Iterable[str], tokens: int, size: int, seconds: float) -> None:
        """Add a step that has stored ``tokens`` of some requests, which are ``size`` bytes."""
        now = time.monotonic()
        if not self._requests:
            self._since = now
        self._requests.update(requests)
        self._tokens += tokens
        self._bytes += size
        self._seconds += seconds
        if now - self._since >= INTERVAL_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the line now, if anything was stored. For steps that compute nothing: the next may be far."""
        if not self._requests:
            return
        (first, *others) = self._requests
        self._logger.info(
            "stored %d tokens for %s in %.1f ms (%.1f GB/s)",
            self._tokens,
            f"{len(others) + 1} requests" if others else f"request {first}",
            self._seconds * 1e3,
            self._bytes / self._seconds / 1e9,
        )
        self._requests.clear()
        self._tokens, self._bytes, self._seconds = 0, 0, 0.0
