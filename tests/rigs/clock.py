"""A clock that only the test advances."""

from __future__ import annotations


class Clock:
    """In place of ``time.time`` or ``time.monotonic``: a test adds to ``now``, in seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now
