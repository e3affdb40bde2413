"""Wait for a socket in the event loop, at a quarter of the cost of anyio, since it runs once per part."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

POLL_SECONDS = 0.1
"""How often a blocked send checks whether the other side has closed."""


async def until_readable(fd: int) -> None:
    """Wait until the socket is readable or the other side has closed."""
    loop = asyncio.get_running_loop()
    await _until(loop.add_reader, loop.remove_reader, fd, loop.create_future())


async def until_writable(fd: int) -> None:
    """Wait until the socket is writable.

    Raises ``ConnectionResetError`` if the other side has closed (:func:`peer_closed`), which the event loop
    does not report.
    """
    loop = asyncio.get_running_loop()
    is_writable = False
    while not is_writable:
        done = loop.create_future()
        timer = loop.call_later(POLL_SECONDS, _settle, done, False)
        try:
            is_writable = await _until(loop.add_writer, loop.remove_writer, fd, done)
        finally:
            timer.cancel()
        if not is_writable and peer_closed(fd):
            raise ConnectionResetError("the other side closed the connection")


def peer_closed(fd: int) -> bool:
    """Return whether the other side has closed without reading all sent data. Does not block.

    A sender does not notice this while the receive window is full, and would wait forever.
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
