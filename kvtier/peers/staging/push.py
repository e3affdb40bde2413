"""Push chunks from a local staging buffer to a peer's staging buffer, without a copy to host memory."""

from __future__ import annotations

import time
from collections import deque
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
from kvtier.peers.push import Pusher, PushOutcome, RemoteRoom
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.staging.buffers import PeerStaging, Staging
from kvtier.tiers.host_memory import Reservation
from kvtier.tiers.level import ChunkBytes
from kvtier.transports.nixl.link import Endpoint

NO_ROOM = "the peer's staging buffer is full"
REFUSED_SECONDS = 1.0
"""How long a peer without staging buffers is not asked again. Recreating them takes about as long."""
LOST = "the write to the peer's staging buffer failed"


@dataclass(slots=True, kw_only=True)
class StagedWrite(Reservation):
    """Room in a staging buffer here for one chunk, which the engine's workers fill."""

    in_arena: ClassVar[bool] = False

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
    """The chunks of one KV transfer that are pushed from staging buffers. Owns their leases."""

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
        self._refused_until = 0.0
        self._chunks: dict[ChunkKey, StagedWrite] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

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
        self._chunks[chunk.key] = chunk
        self._staged(chunk.key)

    def _stages(self, key: ChunkKey) -> bool:
        # A peer that had no usable staging buffers a moment ago may be recreating lost ones.
        return self._wants(key) and time.monotonic() >= self._refused_until

    def dequeue(self, queue: deque[ChunkKey], max_bytes: int, max_chunks: int) -> list[ChunkBytes]:
        """Remove the leading keys of a queue that are in one staging buffer here; at least one if any is."""
        batch: list[ChunkBytes] = []
        first = self._chunks.get(queue[0]) if queue else None
        while first is not None and queue and len(batch) < max_chunks:
            chunk = self._chunks.get(queue[0])
            if chunk is None or chunk.staging is not first.staging:
                break
            max_bytes -= chunk.header.payload_bytes
            if batch and max_bytes < 0:
                break
            batch.append(ChunkBytes(queue.popleft(), chunk.lease))
        return batch

    def remove(self, key: ChunkKey, outcome: PushOutcome) -> int:
        """Release a chunk that was pushed, or is not pushed from here. Return its length."""
        chunk = self._chunks.pop(key)
        chunk.lease.release()
        self.pushed += outcome is PushOutcome.OK
        return chunk.header.payload_bytes

    def close(self) -> None:
        """Release all chunks."""
        for chunk in self._chunks.values():
            chunk.lease.release()
        self._chunks.clear()

    async def push(self, target: Pusher, keys: Sequence[ChunkKey], seconds: float) -> Sequence[PushOutcome]:
        """Push a batch of :meth:`dequeue` within ``seconds``, and return the outcomes in order.

        The caller pushes failed chunks through the first tier. Raises like
        :class:`~kvtier.peers.push.Pusher`.
        """
        staging = self._chunks[keys[0]].staging
        chunks = [self._chunks[key] for key in keys]
        outcomes = [PushOutcome.FAILED] * len(chunks)
        with anyio.move_on_after(seconds):
            peer = await self._find(target, staging, chunks[0].header.namespace)
            if peer is None:
                self._refused_until = time.monotonic() + REFUSED_SECONDS
                return outcomes
            headers = [chunk.header for chunk in chunks]
            room = await target.reserve(headers, staging=peer.number, shares=staging.shares)
            for at in room.held:
                outcomes[at] = PushOutcome.HELD
            if len(room.leases) + len(room.held) + len(room.pending) < len(chunks):
                self.last_error = room.refusal or NO_ROOM
            for at in await self._fill(target, staging, peer, chunks, room):
                outcomes[at] = PushOutcome.OK
        return outcomes

    async def _find(self, target: Pusher, staging: Staging, namespace: bytes) -> PeerStaging | None:
        """Query the peer's staging buffers. Not cached: they may change, and the query takes about 100 µs."""
        request = partial(Stage, namespace=namespace)
        staged = await target.source.endpoint.call(request, Staged, lambda reply, _wanted: reply).reply()
        if staged.refusal:
            self.last_error = printable(staged.refusal)
            return None
        try:
            endpoints = [Endpoint.decode(endpoint) for endpoint in staged.endpoints]
        except PeerError as error:
            self.last_error = str(error)
            return None
        if len(endpoints) != staging.ranks or not staged.number:
            self.last_error = f"the peer has staging buffers for {len(endpoints)} ranks, not {staging.ranks}"
            return None
        return PeerStaging(staged.number, endpoints)

    async def _fill(
        self,
        target: Pusher,
        staging: Staging,
        peer: PeerStaging,
        chunks: Sequence[Reservation],
        room: RemoteRoom,
    ) -> Sequence[int]:
        """Write the chunks that have room. Return the indexes of those that the peer serves now."""
        if not room.leases:
            return []
        unused: Sequence[RemoteLease] = list(room.leases.values())
        valid: list[bool] = []
        try:
            writes = [(chunks[at].lease, remote) for at, remote in room.leases.items()]
            if await staging.write(peer, writes):
                ready, unused = unused, []
                valid = await target.commit(ready, [b""] * len(ready))
            else:
                self.last_error = LOST
        finally:
            # The transfers have ended, successfully or not: the peer may reuse its memory.
            target.source.release(unused)
        return [at for at, ok in zip(room.leases, valid, strict=False) if ok]
