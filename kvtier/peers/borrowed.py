"""One named peer, asked for chunks that are to come from it and nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvtier.errors import PeerError
from kvtier.keys import ChunkKey
from kvtier.peers.client import PeerClient

KEYS_A_QUESTION = 32_768
"""1 MiB of keys; the answer to as many fits a frame, too."""

Bound = dict[ChunkKey, PeerClient]
"""Chunks that are to be read from one peer alone."""


class BorrowedPeer:
    """A peer that is connected, for as long as the block of :meth:`PeersBackend.borrow` lasts.

    To bring chunks from it, and from nobody else, with the stages of the pipeline::

        async with peers.borrow(address) as peer:
            async with discovering.known_for_now(tier_of_peers, keys, expected, peer.promise) as held:
                ...  # Raise or write these: within the block the tier of peers is known to hold them.

    The chunks need be no prefix. Take some ten of them or 64 MiB at a time: what a peer promises at once is
    no more than ``peer.share`` of its first tier, and lasts for ``peer.lease`` seconds. A peer that is lost
    meanwhile costs the chunks of its batch; :meth:`promise` raises when it is asked for the next.
    """

    def __init__(self, client: PeerClient, bound: Bound, seconds: float) -> None:
        self._client = client
        self._bound = bound
        self._seconds = seconds
        self._mine: set[ChunkKey] = set()

    @property
    def address(self) -> str:
        """Where it is."""
        return self._client.address

    @property
    def instance(self) -> str:
        """What the process there is called by itself."""
        return self._client.instance

    async def promise(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Have it promise those of ``keys`` that it holds in its own tiers; their positions, ascending.

        Reads of these go to this peer alone until the block is left. Raises :class:`PeerError` where it does
        not answer within the transport's deadline.
        """
        until = anyio.current_time() + self._seconds
        positions: list[int] = []
        for start in range(0, len(keys), KEYS_A_QUESTION):
            part = keys[start : start + KEYS_A_QUESTION]
            promised = await self._client.look_up(part, prefix=False, until=until, insist=True)
            if promised is None:
                raise PeerError(
                    f"peer {self.address}: {self._client.trouble or 'it has not answered in time'}"
                )
            positions += [start + position for position in sorted(promised)]
        for position in positions:
            self._bound[keys[position]] = self._client
            self._mine.add(keys[position])
        return positions

    def let_go(self) -> None:
        """What it promised and nobody has fetched is not needed any longer."""
        for key in self._mine:
            if self._bound.get(key) is self._client:
                del self._bound[key]
        if self._client.source is not None:
            self._client.source.promises.drop(self._mine)
