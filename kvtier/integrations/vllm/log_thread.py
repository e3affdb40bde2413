"""Write the connector's log in a thread, so that no step of the engine waits for the disk.

If other processes saturate the disk with writes, the kernel throttles every writer, even one that appends a
single line (``balance_dirty_pages`` in mm/page-writeback.c): one line has delayed a step by 0.3 s.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from logging import Handler, Logger, LogRecord
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

MAX_RECORDS = 10_000
"""Maximum number of queued records; further ones are dropped."""
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
        self._records: Queue[LogRecord] = Queue(MAX_RECORDS)
        super().__init__(self._records)
        self._process = os.getpid()
        self._forward = _Forward(to)
        QueueListener(self._records, self._forward).start()

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
        with suppress(Full):
            self._records.put_nowait(record)

    def flush(self) -> None:
        """Block until all records are written, up to :data:`FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._records.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
