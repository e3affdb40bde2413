"""Waiting for a condition, in an event loop or in a thread. The limit only ends a test that would hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

LIMIT_SECONDS = 60.0


async def until(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
    """Wait until a condition is true. Raises ``TimeoutError``."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.005)


def wait_until(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
    """Block until a condition is true. Raises ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {seconds:g} s")
        time.sleep(0.005)
