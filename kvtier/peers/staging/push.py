"""Push chunks from a local staging buffer to a peer's staging buffer, without a copy to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio

from kvtier.errors import PeerError
from kvtier.logs import printable
from kvtier.peers.promises import Promise
from kvtier.peers.protocol import Stage, Staged
from kvtier.peers.push import PushOutcome, Room, Target
from kvtier.peers.staging.buffers import PeerStaging, Staging
from kvtier.pipeline.store import Reservation
from kvtier.transports.nixl.endpoint import Endpoint

NO_ROOM = "its staging buffer is full"
LOST = "the write to its staging buffer failed"


class StagedTarget:
    """The staging buffers of a connected peer. Raises like :class:`~kvtier.peers.push.Target`."""

    def __init__(self, target: Target) -> None:
        self.last_error = ""
        """Why chunks last fell back to the first tier, as text."""
        self.refused = False
        """Whether the peer has no usable staging buffers."""
        self._target = target

    async def push(
        self, staging: Staging, chunks: Sequence[Reservation], seconds: float
    ) -> Sequence[PushOutcome]:
        """Push chunks of one namespace within ``seconds``, and return their outcomes in order.

        The leases stay with the caller. The caller pushes failed chunks through the first tier.
        """
        outcomes = [PushOutcome.FAILED] * len(chunks)
        with anyio.move_on_after(seconds):
            peer = await self._find(staging, chunks[0].header.namespace)
            if peer is None:
                self.refused = True
                return outcomes
            headers = [chunk.header for chunk in chunks]
            room = await self._target.reserve(headers, staging=peer.number, ranks=staging.ranks)
            for at in room.held:
                outcomes[at] = PushOutcome.HELD
            if len(room.promises) + len(room.held) + len(room.pending) < len(chunks):
                self.last_error = room.refusal or NO_ROOM
            for at in await self._fill(staging, peer, chunks, room):
                outcomes[at] = PushOutcome.OK
        return outcomes

    async def _find(self, staging: Staging, namespace: bytes) -> PeerStaging | None:
        """Query the peer's staging buffers. Not cached: they may change, and the query takes about 100 µs."""
        request = partial(Stage, namespace=namespace)
        staged = await self._target.source.endpoint.call(
            request, Staged, lambda reply, _wanted: reply
        ).reply()
        if staged.refusal:
            self.last_error = printable(staged.refusal)
            return None
        try:
            endpoints = [Endpoint.decode(endpoint) for endpoint in staged.endpoints]
        except PeerError as error:
            self.last_error = str(error)
            return None
        if len(endpoints) != staging.ranks or not staged.number:
            self.last_error = f"it has staging buffers for {len(endpoints)} ranks, not {staging.ranks}"
            return None
        return PeerStaging(staged.number, endpoints)

    async def _fill(
        self, staging: Staging, peer: PeerStaging, chunks: Sequence[Reservation], room: Room
    ) -> Sequence[int]:
        """Write the chunks that have room. Return the indexes of those that the peer serves now."""
        if not room.promises:
            return []
        unused: Sequence[Promise] = list(room.promises.values())
        valid: list[bool] = []
        try:
            writes = [(chunks[at].lease, promise) for at, promise in room.promises.items()]
            if await staging.write(peer, writes):
                ready, unused = unused, []
                valid = await self._target.commit(ready, [b""] * len(ready))
            else:
                self.last_error = LOST
        finally:
            # The transfers have ended, successfully or not: the peer may reuse its memory.
            self._target.source.release(unused)
        return [at for at, ok in zip(room.promises, valid, strict=False) if ok]
