"""What is said and heard over a connection, laid down beforehand, so that native code can carry it out.

A conversation goes on as long as each answer is the one that is expected, byte by byte: no answer has to be
parsed for that. Where another comes it stops, and whoever began it parses what has come.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

SEND: Final = 0
"""Send all buffers, one after the other."""
EXPECT: Final = 1
"""Receive bytes that are equal to those of the only buffer."""
RECEIVE: Final = 2
"""Fill all buffers, one after the other."""

Operation = tuple[int, Sequence[bytes | memoryview]]


class Progress(NamedTuple):
    """How far a conversation has come. It is over where ``operations`` is how many there were."""

    operations: int
    """That were carried out whole."""
    received: int = 0
    """Bytes of the next one, where it is to receive."""
    error: OSError | None = None
    """Why it went no further; ``None`` also where something came that was not expected."""

    def after(self, operations: int) -> Progress:
        """As if it had begun so many operations later."""
        return self._replace(operations=self.operations - operations)


def progress_of(operations: int, moved: int, number: int) -> Progress:
    """From what native code says."""
    return Progress(operations, moved, _error_of(number) if number else None)


def _error_of(number: int) -> OSError:
    if number == errno.ETIMEDOUT:
        return TimeoutError("no answer in time")
    if number == errno.ESHUTDOWN:
        return ConnectionResetError("the server closed the connection")
    return OSError(number, os.strerror(number))
