"""Pass frames between two connections without looking into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import anyio
import anyio.lowlevel

from kvtier.errors import ChannelError
from kvtier.rpc.wire import Wire


async def relay(near: Wire, far: Wire, pending: Sequence[bytes]) -> NoReturn:
    """Pass on frames in both directions, first ``pending`` ones to ``far``.

    A side that does not read holds up the other one, and nothing piles up. Raises :class:`ChannelError` when
    either connection ends. Closes neither.
    """
    failed: list[ChannelError] = []

    async def copy(source: Wire, target: Wire, bodies: Sequence[bytes]) -> None:
        try:
            while True:
                for body in bodies:
                    target.write(body)
                await target.flush()
                await anyio.lowlevel.checkpoint()
                bodies = await source.receive()
        except ChannelError as error:
            failed.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copy, near, far, pending)
        tasks.start_soon(copy, far, near, ())
    raise failed[0].with_traceback(None)
