"""KV transfers requested by one scheduler. They end with its connection."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from kvtier.bridge.protocol import EndKVTransfer, KVTransfer, KVTransferResult
from kvtier.catalog.catalog import Catalog, State
from kvtier.errors import PeerError, ProtocolError
from kvtier.logs import ChangedWarnings
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.memory.layout import ChunkLayout
from kvtier.observability.traces.spans import Tracer, Value, child, following
from kvtier.tiers.planner import FIRST

if TYPE_CHECKING:
    from kvtier.peers.kv_transfer import KVTransfer as Transfer

COMMIT_POLL_SECONDS = 0.02
"""How often to check whether the workers have filled the reserved chunks. Only at the end of a prompt."""


@dataclass(eq=False)
class EngineKVTransfers:
    """Starts and ends the KV transfers of one engine, and reports their results to it."""

    push: Callable[[str, Sequence[ChunkKey]], Transfer]
    """Starts to push the chunks of a prompt to a peer. Raises :class:`PeerError`."""
    catalog: Catalog
    layout: ChunkLayout
    warnings: ChangedWarnings
    tracer: Tracer
    seconds: float
    """How long reserved chunks may take to be filled and pushed once a prompt is computed."""
    tasks: TaskGroup
    """Those of the connection that :attr:`notify` sends on."""
    notify: Callable[[KVTransferResult], Awaitable[None]]
    _open: dict[int, tuple[Transfer, list[ChunkKey]]] = field(default_factory=dict)

    def find(self, ticket: int) -> Transfer | None:
        """Return a running transfer, or ``None``."""
        return self._open.get(ticket, (None, ()))[0]

    def begin(self, request: KVTransfer) -> KVTransferResult | None:
        """Push chunks as they become READY; return a result if that fails. Raises :class:`ProtocolError`."""
        keys = split_keys(request.keys)
        if request.ticket in self._open or not 0 < request.tokens <= len(keys) * self.layout.chunk_tokens:
            raise ProtocolError("invalid KV transfer: ticket in use, or tokens do not match its keys")
        within = child(request.trace)
        try:
            with following(within):
                transfer = self.push(request.to, keys)
        except PeerError as error:
            self.warnings.note(request.to, str(error))
            return KVTransferResult(request.ticket, 0, str(error))
        self._open[request.ticket] = transfer, keys
        self.tasks.start_soon(self._watch, request, transfer, within)
        return None

    def end(self, request: EndKVTransfer) -> None:
        """End a transfer: no further chunk of it will be reserved. Unknown tickets are ignored."""
        transfer, keys = self._open.get(request.ticket, (None, ()))
        if transfer is None:
            return
        if request.complete:
            self.tasks.start_soon(self._finish, transfer, keys)
        else:
            transfer.abort()

    def close(self) -> None:
        """Abort all transfers: the scheduler has disconnected."""
        for transfer, _ in self._open.values():
            transfer.abort()
        self._open.clear()

    async def _finish(self, transfer: Transfer, keys: Sequence[ChunkKey]) -> None:
        # Workers commit chunks on their own connections, possibly later than this.
        deadline = anyio.current_time() + self.seconds
        while (
            not transfer.ended.is_set()
            and (transfer.staging.filling or self._any_pending(keys))
            and anyio.current_time() < deadline
        ):
            with anyio.move_on_after(COMMIT_POLL_SECONDS):
                await transfer.ended.wait()
        await transfer.finish(self.seconds)

    def _any_pending(self, keys: Sequence[ChunkKey]) -> bool:
        return any(self.catalog.state(key, FIRST) is State.PENDING for key in keys)

    async def _watch(self, request: KVTransfer, transfer: Transfer, within: bytes) -> None:
        await transfer.ended.wait()
        self._open.pop(request.ticket, None)
        result = transfer.result
        last_error = f"{result.last_error}; here: {self.layout}" if result.refused else result.last_error
        if not transfer.unnamed:
            self.warnings.note(request.to, last_error)
        tokens = min(result.leading * self.layout.chunk_tokens, request.tokens)
        began = time.monotonic() - result.seconds
        pushed: dict[str, Value] = {"peer": request.to, "tokens": tokens, "bytes": result.pushed_bytes}
        self.tracer.record("kvtier.kv_transfer", request.trace, began, within, last_error, **pushed)
        await self.notify(KVTransferResult(request.ticket, tokens, last_error))
