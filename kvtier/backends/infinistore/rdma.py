"""InfiniStore's RDMA path, through its client library: the server reads from and writes to the arena.

Never tested on real hardware: it requires an RDMA device on both sides.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from anyio import CancelScope, Lock, fail_after, to_thread

from kvtier.backends.base import Outcome
from kvtier.backends.infinistore.protocol import OUT_OF_MEMORY
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.errors import TierError
from kvtier.memory.arena import Arena, address_of

NamedView = tuple[str, memoryview]
Transfer = Callable[[list[tuple[str, int]], int, int], Awaitable[object]]
"""Arguments: (name, offset from the base) of each block, bytes per block, base address."""


class InfiniStoreRDMA:
    """An RDMA connection that all batches share. Connects lazily, and reconnects after a failure."""

    def __init__(self, settings: InfiniStoreSettings) -> None:
        self._settings = settings
        self._library: Any = None
        self._connection: Any = None
        self._arena: Arena | None = None
        self._base = 0
        self._connecting = Lock(fast_acquire=True)

    def load(self) -> None:
        """Import the library. Blocks. Raises :class:`TierError` if it is missing or too old."""
        try:
            import infinistore
        except ImportError as error:
            raise TierError(
                "connection: rdma requires InfiniStore's client library", "pip install 'kvtier[infinistore]'"
            ) from error
        has_gid_index = hasattr(infinistore.ClientConfig, "hint_gid_index")
        if self._settings.gid_index is not None and not has_gid_index:
            raise TierError(
                "this version of InfiniStore's client library does not support `gid_index`", "omit it"
            )
        self._library = infinistore

    def register(self, arena: Arena) -> None:
        """Set the arena to register with every new connection."""
        self._arena = arena
        self._base = address_of(arena.view(0, arena.capacity))

    def reaches(self, views: Iterable[memoryview]) -> bool:
        """Return whether all views are writable memory of the arena."""
        if self._arena is None:
            return False
        stop = self._base + self._arena.capacity
        return all(not view.readonly and self._base <= address_of(view) <= stop - len(view) for view in views)

    async def write(self, items: Sequence[NamedView]) -> list[Outcome]:
        """Have the server read each view."""
        return await self._transfer_all("rdma_write_cache_async", items)

    async def read(self, items: Sequence[NamedView]) -> list[Outcome]:
        """Have the server fill each view."""
        return await self._transfer_all("rdma_read_cache_async", items)

    async def close(self) -> None:
        """Close the connection."""
        await self._drop(self._connection)

    async def _drop(self, connection: Any) -> None:  # noqa: ANN401 - the library has no types
        """Close ``connection``, even if other calls use it. Afterwards, the device leaves the arena alone."""
        if connection is None or connection.conn is None:  # Another call that used it has closed it.
            return
        if self._connection is connection:
            self._connection = None

        def end() -> None:
            connection.close()
            # The queue pair is destroyed only with the last reference to this.
            connection.conn = None

        # Shielded, so that the device leaves the arena alone before a cancelled caller reuses it.
        with CancelScope(shield=True):
            await to_thread.run_sync(end)

    async def _transfer_all(self, method: str, items: Sequence[NamedView]) -> list[Outcome]:
        """Transfer in one call per block length. Return the outcomes in the order of the items."""
        connection = await self._connected()
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for index, (_, view) in enumerate(items):
            by_length[len(view)].append(index)
        outcomes = [Outcome.FAILED] * len(items)
        for length, indices in by_length.items():
            blocks = [(items[index][0], address_of(items[index][1]) - self._base) for index in indices]
            transferred = await self._transfer(connection, method, blocks, length)
            for index, outcome in zip(indices, transferred, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _transfer(
        self,
        connection: Any,  # noqa: ANN401
        method: str,
        blocks: list[tuple[str, int]],
        length: int,
    ) -> list[Outcome]:
        """Transfer ``blocks``, each given as (name, offset from the start of the arena)."""
        transfer: Transfer = getattr(connection, method)
        try:
            # The device does not stop on cancellation, so a cancelled call must wait for it. Without the
            # timeout, the library waits forever for a server that has died.
            with fail_after(self._settings.deadline, shield=True):
                await transfer(blocks, length, self._base)
        except self._library.InfiniStoreKeyNotFound:
            if len(blocks) == 1:
                return [Outcome.MISS]
            # One missing key fails the whole batch.
            return [(await self._transfer(connection, method, [block], length))[0] for block in blocks]
        except Exception as error:
            # The library raises plain ``Exception``. After any other error the queue pair is unusable.
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
        gid_options = {} if settings.gid_index is None else {"hint_gid_index": settings.gid_index}
        config = self._library.ClientConfig(
            host_addr=socket.gethostbyname(settings.host),  # The library accepts IPv4 addresses only.
            service_port=settings.port,
            connection_type=self._library.TYPE_RDMA,
            dev_name=settings.device,
            link_type=settings.link_type,
            log_level="error",
            **gid_options,
        )
        connection = self._library.InfinityConnection(config)
        connection.connect()
        connection.register_mr(self._base, arena.capacity)
        return connection
