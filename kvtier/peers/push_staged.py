"""Pushing chunks from a staging buffer here into that of one connected peer, without a copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvtier.errors import PeerError
from kvtier.peers.conversation import answer_of
from kvtier.peers.dialling import printable
from kvtier.peers.promises import Promise
from kvtier.peers.protocol import Stage, Staged
from kvtier.peers.push import Pushed, Room, Target
from kvtier.peers.staging import PeerStaging, Staging
from kvtier.pipeline.store import Reservation
from kvtier.transports.nixl.endpoint import Endpoint

NO_ROOM = "its staging buffer has no room at present"
LOST = "what was written to its staging buffer did not arrive"


class StagedTarget:
    """The staging buffers at one connected peer. Raises like :class:`~kvtier.peers.push.Target`."""

    def __init__(self, target: Target) -> None:
        self.trouble = ""
        """Why something went by another way last, for people."""
        self.refused = False
        """Whether there are no buffers that this side could write to."""
        self._target = target

    async def push(self, staging: Staging, chunks: Sequence[Reservation], seconds: float) -> Sequence[Pushed]:
        """Push chunks of one model, whose leases stay the caller's; what became of each, in their order.

        In ``seconds`` or not at all. What did not get there has to go by way of the first tier.
        """
        outcomes = [Pushed.FAILED] * len(chunks)
        with anyio.move_on_after(seconds):
            peer = await self._find(staging, chunks[0].header.namespace)
            if peer is None:
                self.refused = True
                return outcomes
            headers = [chunk.header for chunk in chunks]
            room = await self._target.reserve(headers, staging=peer.number, ranks=staging.ranks)
            for at in room.held:
                outcomes[at] = Pushed.HELD
            if len(room.promises) + len(room.held) + len(room.coming) < len(chunks):
                self.trouble = room.refusal or NO_ROOM
            for at in await self._fill(staging, peer, chunks, room):
                outcomes[at] = Pushed.OK
        return outcomes

    async def _find(self, staging: Staging, namespace: bytes) -> PeerStaging | None:
        """Asked each time: they may be others by now, and the answer takes a tenth of a millisecond."""
        staged = await answer_of(
            self._target.source.conversation.ask(
                lambda ticket: Stage(ticket, namespace), Staged, lambda said, _wanted: said
            )
        )
        if staged.refusal:
            self.trouble = printable(staged.refusal)
            return None
        try:
            endpoints = [Endpoint.decode(endpoint) for endpoint in staged.endpoints]
        except PeerError as error:
            self.trouble = str(error)
            return None
        if len(endpoints) != staging.ranks or not staged.number:
            self.trouble = f"it has staging buffers for {len(endpoints)} ranks, not {staging.ranks}"
            return None
        return PeerStaging(staged.number, endpoints)

    async def _fill(
        self, staging: Staging, peer: PeerStaging, chunks: Sequence[Reservation], room: Room
    ) -> Sequence[int]:
        """Write what there is room for; which of the chunks the peer serves now."""
        if not room.promises:
            return []
        unused: Sequence[Promise] = list(room.promises.values())
        whole: list[bool] = []
        try:
            writes = [(chunks[at].lease, promise) for at, promise in room.promises.items()]
            if await staging.write(peer, writes):
                ready, unused = unused, []
                whole = await self._target.commit(ready, [b""] * len(ready))
            else:
                self.trouble = LOST
        finally:
            # The transfers have ended, one way or the other: the peer may use its memory again.
            self._target.source.release(unused)
        return [at for at, good in zip(room.promises, whole, strict=False) if good]
