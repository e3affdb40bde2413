"""Write the connector's log in a thread, so that no step of the engine waits for the disk that it is on.

Where other processes write more than the disk takes, the kernel makes whoever appends a line to a file wait
(``balance_dirty_pages`` in mm/page-writeback.c): steps were held up for 0.3 s by one line.
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
"""Limit of the records that wait to be written; those on top of it are dropped."""
FLUSH_SECONDS = 1.0
POLL_SECONDS = 0.001


class _Forward(Handler):
    """Hands records to another logger's handlers."""

    def __init__(self, to: Logger) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: LogRecord) -> None:
        self._to.handle(record)


class LogThread(QueueHandler):
    """Passes what a logger is told to its parent's handlers, in a thread. Any thread may log."""

    def __init__(self, to: Logger) -> None:
        """Start the thread; ``to`` is the parent."""
        self._records: Queue[LogRecord] = Queue(MAX_RECORDS)
        super().__init__(self._records)
        self._process = os.getpid()
        self._forward = _Forward(to)
        QueueListener(self._records, self._forward).start()

    @classmethod
    def of(cls, logger: Logger) -> LogThread:
        """Make it the handler of ``logger``, unless it is there already."""
        for handler in logger.handlers:
            if isinstance(handler, LogThread):
                return handler
        made = cls(logger.parent or logging.getLogger())
        logger.addHandler(made)
        logger.propagate = False
        return made

    def enqueue(self, record: LogRecord) -> None:
        """Take a record in. Does not block, but in the child of a fork, which has no such thread."""
        if os.getpid() != self._process:
            self._forward.emit(record)
            return
        with suppress(Full):
            self._records.put_nowait(record)

    def flush(self) -> None:
        """Block until all is written, up to :data:`FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._records.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
