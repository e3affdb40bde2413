"""A scripted exchange over a connection: sends and expected replies, to be executed by native code.

A conversation continues while each reply equals the expected one, byte for byte, so no reply is parsed. At
the first other reply it stops, and the caller parses what has arrived.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

SEND: Final = 0
"""Send all buffers, in order."""
EXPECT: Final = 1
"""Receive exactly the bytes of the only buffer."""
RECEIVE: Final = 2
"""Fill all buffers, in order."""

Operation = tuple[int, Sequence[bytes | memoryview]]


class Progress(NamedTuple):
    """How far a conversation has been executed."""

    operations: int
    """Number of completed operations. The conversation is complete if that is all of them."""
    received: int = 0
    """Bytes received of the next one, if that is to receive."""
    error: OSError | None = None
    """Why it has stopped; ``None`` if it is complete, and after an unexpected reply."""

    def after(self, operations: int) -> Progress:
        """Return the progress without the first ``operations``."""
        return self._replace(operations=self.operations - operations)


def progress_of(operations: int, moved: int, number: int) -> Progress:
    """Convert the result of native code."""
    return Progress(operations, moved, _error_of(number) if number else None)


def _error_of(number: int) -> OSError:
    if number == errno.ETIMEDOUT:
        return TimeoutError("no answer in time")
    if number == errno.ESHUTDOWN:
        return ConnectionResetError("the server closed the connection")
    return OSError(number, os.strerror(number))
