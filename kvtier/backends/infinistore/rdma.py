"""InfiniStore's RDMA path, through its client library: the server reads from the arena, and writes to it.

Not run on any machine of ours: it needs an RDMA device on both sides.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from anyio import CancelScope, fail_after, to_thread

from kvtier.arena import Arena, address_of
from kvtier.backends.base import Outcome
from kvtier.backends.infinistore.protocol import OUT_OF_MEMORY
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.errors import TierError

NamedView = tuple[str, memoryview]
Transfer = Callable[[list[tuple[str, int]], int, int], Awaitable[object]]
"""(name, offset from the base) of each block, bytes of a block, address of the base."""


class InfiniStoreRDMA:
    """One RDMA connection, over which all batches go. Connects when first used, and again after a failure."""

    def __init__(self, settings: InfiniStoreSettings) -> None:
        self._settings = settings
        self._library: Any = None
        self._connection: Any = None
        self._arena: Arena | None = None
        self._base = 0
        self._connecting = asyncio.Lock()

    def load(self) -> None:
        """Import the library. Blocks. Raises :class:`TierError` where it is missing or too old."""
        try:
            import infinistore
        except ImportError as error:
            raise TierError(
                "connection: rdma takes InfiniStore's client library: pip install 'kvtier[infinistore]'"
            ) from error
        chooses = not hasattr(infinistore.ClientConfig, "hint_gid_index")
        if self._settings.gid_index is not None and chooses:
            raise TierError(
                "this version of InfiniStore's client library chooses its GID: leave out `gid_index`"
            )
        self._library = infinistore

    def register(self, arena: Arena) -> None:
        """Chunks lie in ``arena``, which is registered whenever a connection is made."""
        self._arena = arena
        self._base = address_of(arena.view(0, arena.capacity))

    def reaches(self, views: Iterable[memoryview]) -> bool:
        """Whether all of these lie in the arena."""
        if self._arena is None:
            return False
        stop = self._base + self._arena.capacity
        return all(not view.readonly and self._base <= address_of(view) <= stop - len(view) for view in views)

    async def write(self, items: Sequence[NamedView]) -> list[Outcome]:
        """Have the server read each view."""
        return await self._carry("rdma_write_cache_async", items)

    async def read(self, items: Sequence[NamedView]) -> list[Outcome]:
        """Have the server fill each view."""
        return await self._carry("rdma_read_cache_async", items)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._drop(self._connection)

    async def _drop(self, connection: Any) -> None:  # noqa: ANN401 - the library has no types
        """End ``connection``, whoever else uses it: the device does not touch the arena after this."""
        if connection is None or connection.conn is None:
            return
        if self._connection is connection:
            self._connection = None

        def end() -> None:
            connection.close()
            # Its queue pair is destroyed with the last reference to this, and not before.
            connection.conn = None

        with CancelScope(shield=True):
            await to_thread.run_sync(end)

    async def _carry(self, method: str, items: Sequence[NamedView]) -> list[Outcome]:
        """Blocks of one length in one call; the outcomes in the order of the items."""
        connection = await self._connected()
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for index, (_, view) in enumerate(items):
            by_length[len(view)].append(index)
        outcomes = [Outcome.FAILED] * len(items)
        for length, indices in by_length.items():
            blocks = [(items[index][0], address_of(items[index][1]) - self._base) for index in indices]
            moved = await self._transfer(connection, method, blocks, length)
            for index, outcome in zip(indices, moved, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _transfer(
        self,
        connection: Any,  # noqa: ANN401
        method: str,
        blocks: list[tuple[str, int]],
        length: int,
    ) -> list[Outcome]:
        """Move ``blocks``, each as (name, offset from the arena's start)."""
        transfer: Transfer = getattr(connection, method)
        try:
            # The device goes on whoever waits: a cancelled call must not end before it has. The library
            # waits for good where the server has gone.
            with fail_after(self._settings.deadline, shield=True):
                await transfer(blocks, length, self._base)
        except self._library.InfiniStoreKeyNotFound:
            if len(blocks) == 1:
                return [Outcome.MISS]
            # One that is missing spoils its batch.
            return [(await self._transfer(connection, method, [block], length))[0] for block in blocks]
        except Exception as error:
            # The library raises plain exceptions; its queue pair is of no use after any other of them.
            if str(error).endswith(f"ret = {OUT_OF_MEMORY}"):
                return [Outcome.FULL] * len(blocks)
            await self._drop(connection)
            raise
        return [Outcome.OK] * len(blocks)

    async def _connected(self) -> Any:  # noqa: ANN401 - the library has no types
        async with self._connecting:
            if self._connection is None:
                self._connection = await to_thread.run_sync(self._connect)
        return self._connection

    def _connect(self) -> Any:  # noqa: ANN401
        settings, arena = self._settings, self._arena
        if arena is None:
            raise RuntimeError("the arena is not registered")
        chosen = {} if settings.gid_index is None else {"hint_gid_index": settings.gid_index}
        config = self._library.ClientConfig(
            host_addr=socket.gethostbyname(settings.host),  # It takes addresses alone, of IPv4.
            service_port=settings.port,
            connection_type=self._library.TYPE_RDMA,
            dev_name=settings.device,
            link_type=settings.link_type,
            log_level="error",
            **chosen,
        )
        connection = self._library.InfinityConnection(config)
        connection.connect()
        connection.register_mr(self._base, arena.capacity)
        return connection
