"""Waiting for a condition in an event loop."""

from __future__ import annotations

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition is true. Raises ``TimeoutError``."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)
