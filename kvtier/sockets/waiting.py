"""Waiting in the event loop for a socket, at a quarter of what anyio's way takes: it is done once a part."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

MOMENT_SECONDS = 0.1
"""So long one waits for a socket before it is looked whether the other side is still there."""


async def until_readable(fd: int) -> None:
    """Wait until there is something to receive, or the other side has closed."""
    loop = asyncio.get_running_loop()
    await _until(loop.add_reader, loop.remove_reader, fd, loop.create_future())


async def until_writable(fd: int) -> None:
    """Wait until something can be sent, or nothing can any more.

    Raises ``ConnectionResetError`` where the other side :func:`has_left`, of which the loop would not hear.
    """
    loop = asyncio.get_running_loop()
    is_writable = False
    while not is_writable:
        done = loop.create_future()
        timer = loop.call_later(MOMENT_SECONDS, _settle, done, False)
        try:
            is_writable = await _until(loop.add_writer, loop.remove_writer, fd, done)
        finally:
            timer.cancel()
        if not is_writable and has_left(fd):
            raise ConnectionResetError("the other side has closed, and takes nothing in")


def has_left(fd: int) -> bool:
    """Whether the other side has closed without taking in what it was sent.

    What sends does not see that while the other's window is shut, and would wait for nothing. Does not block.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT | select.POLLRDHUP)
    events = poll.poll(0)
    return bool(events) and not events[0][1] & select.POLLOUT


async def _until(
    add: Callable[..., object], remove: Callable[[int], object], fd: int, done: asyncio.Future[bool]
) -> bool:
    add(fd, _settle, done, True)
    try:
        return await done
    finally:
        remove(fd)


def _settle(done: asyncio.Future[bool], is_possible: bool) -> None:
    if not done.done():
        done.set_result(is_possible)
