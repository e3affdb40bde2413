"""Push chunks from a local staging buffer to a peer's staging buffer, without a copy to host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import anyio

from kvtier.errors import PeerError
from kvtier.logs import printable
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.peers.protocol import Stage, Staged
from kvtier.peers.push import Pusher, PushOutcome, PushSource, RemoteRoom
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.staging.buffers import PeerStaging, Staging
from kvtier.tiers.host_memory import Reservation
from kvtier.transports.nixl.link import Endpoint

NO_ROOM = "the peer's staging buffer is full"
REFUSED_SECONDS = 1.0
"""How long a peer without staging buffers is not asked again. Recreating them takes about as long."""
LOST = "the write to the peer's staging buffer failed"


@dataclass(slots=True, kw_only=True)
class StagedWrite(Reservation):
    """Room in a staging buffer here for one chunk, which the engine's workers fill."""

    in_arena: ClassVar[bool] = False
    in_catalog: ClassVar[bool] = False

    chunks: StagedChunks
    staging: Staging

    def complete(self) -> bool:
        """Push the chunk from the staging buffer, if it is still wanted."""
        self.chunks.filling -= 1
        self.chunks.add(self)
        return False

    def give_up(self) -> None:
        """Release the room: it will not be filled."""
        self.chunks.filling -= 1
        self.lease.release()


class StagedChunks:
    """The chunks of one KV transfer that are pushed from staging buffers."""

    def __init__(self, wants: Callable[[ChunkKey], bool], staged: Callable[[ChunkKey], None]) -> None:
        """``wants``: whether a chunk is still to be pushed. ``staged``: called when one can be."""
        self.filling = 0
        """Chunks that the engine is copying to a staging buffer."""
        self.pushed = 0
        """Chunks that were transferred between staging buffers."""
        self.last_error = ""
        """Why chunks last fell back to the first tier, as text."""
        self._wants = wants
        self._staged = staged
        self.refused_until = 0.0
        """Until when nothing is staged, on the clock of :func:`time.monotonic`."""
        self._sources: dict[Staging, StagingSource] = {}

    def source_of(self, key: ChunkKey) -> StagingSource | None:
        """Return the buffers here that a chunk is complete in; ``None`` if there are none."""
        return next((source for source in self._sources.values() if key in source.chunks), None)

    def reserve(self, staging: Staging, header: ChunkHeader) -> StagedWrite | None:
        """Reserve room here for a chunk to push from there; ``None`` without room, or if it is not wanted."""
        lease = staging.take(header) if self._stages(header.key) else None
        if lease is None:
            return None
        self.filling += 1
        return StagedWrite(header, lease, chunks=self, staging=staging)

    def add(self, chunk: StagedWrite) -> None:
        """Take over a chunk that is complete in a staging buffer here."""
        if not self._stages(chunk.key):
            chunk.lease.release()
            return
        source = self._sources.setdefault(chunk.staging, StagingSource(self, chunk.staging))
        source.chunks[chunk.key] = chunk
        self._staged(chunk.key)

    def _stages(self, key: ChunkKey) -> bool:
        # A peer that had no usable staging buffers a moment ago may be recreating lost ones.
        return self._wants(key) and time.monotonic() >= self.refused_until

    def close(self) -> None:
        """Release all chunks."""
        for source in self._sources.values():
            for key in list(source.chunks):
                source.release(key)
        self._sources.clear()


class StagingSource(PushSource):
    """The staging buffers of an engine here, with the chunks of one KV transfer that are complete in them."""

    retried = True

    def __init__(self, of: StagedChunks, staging: Staging) -> None:
        self.chunks: dict[ChunkKey, StagedWrite] = {}
        self._of = of
        self._staging = staging

    def lease(self, key: ChunkKey, *, always: bool = False) -> int:
        """See :meth:`PushSource.lease`."""
        return self.chunks[key].header.payload_bytes

    def release(self, key: ChunkKey) -> int:
        """See :meth:`PushSource.release`."""
        chunk = self.chunks.pop(key)
        chunk.lease.release()
        return chunk.header.payload_bytes

    async def push(self, target: Pusher, keys: Sequence[ChunkKey], seconds: float) -> Sequence[PushOutcome]:
        """Push leased chunks within ``seconds``, and return the outcomes in order. Raises like ``target``."""
        staging = self._staging
        chunks = [self.chunks[key] for key in keys]
        outcomes = [PushOutcome.FAILED] * len(chunks)
        with anyio.move_on_after(seconds):
            peer = await self._find(target, chunks[0].header.namespace)
            if peer is None:
                self._of.refused_until = time.monotonic() + REFUSED_SECONDS
                return outcomes
            headers = [chunk.header for chunk in chunks]
            room = await target.reserve(headers, staging=peer.number, shares=staging.shares)
            for at in room.held:
                outcomes[at] = PushOutcome.HELD
            if len(room.leases) + len(room.held) + len(room.pending) < len(chunks):
                self._of.last_error = room.refusal or NO_ROOM
            for at in await self._fill(target, peer, chunks, room):
                outcomes[at] = PushOutcome.OK
        self._of.pushed += outcomes.count(PushOutcome.OK)
        return outcomes

    async def _find(self, target: Pusher, namespace: bytes) -> PeerStaging | None:
        """Query the peer's staging buffers. Not cached: they may change, and the query takes about 100 µs."""
        request = partial(Stage, namespace=namespace)
        staged = await target.source.endpoint.call(request, Staged, lambda reply: reply).reply()
        if staged.refusal:
            self._of.last_error = printable(staged.refusal)
            return None
        try:
            endpoints = [Endpoint.decode(endpoint) for endpoint in staged.endpoints]
        except PeerError as error:
            self._of.last_error = str(error)
            return None
        ranks = self._staging.ranks
        if len(endpoints) != ranks or not staged.number:
            self._of.last_error = f"the peer has staging buffers for {len(endpoints)} ranks, not {ranks}"
            return None
        return PeerStaging(staged.number, endpoints)

    async def _fill(
        self, target: Pusher, peer: PeerStaging, chunks: Sequence[Reservation], room: RemoteRoom
    ) -> Sequence[int]:
        """Write the chunks that have room. Return the indexes of those that the peer serves now."""
        if not room.leases:
            return []
        unused: Sequence[RemoteLease] = list(room.leases.values())
        valid: list[bool] = []
        try:
            writes = [(chunks[at].lease, remote) for at, remote in room.leases.items()]
            if await self._staging.write(peer, writes):
                ready, unused = unused, []
                valid = await target.commit(ready, [b""] * len(ready))
            else:
                self._of.last_error = LOST
        finally:
            # The transfers have ended, successfully or not: the peer may reuse its memory.
            target.source.release(unused)
        return [at for at, ok in zip(room.leases, valid, strict=False) if ok]
