"""A temporary connection to one named peer, to fetch chunks from that peer alone."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvtier.errors import PeerError
from kvtier.memory.keys import ChunkKey
from kvtier.peers.client import PeerClient

KEYS_PER_REQUEST = 32_768
"""1 MiB of keys; the answer fits a frame as well."""

Bound = dict[ChunkKey, PeerClient]
"""The peer from which alone a chunk may be read."""


class TemporaryPeer:
    """A peer that stays connected within the block of :meth:`PeersBackend.temporary_peer`.

    To fetch chunks from this peer alone, with the stages of the pipeline::

        async with peers.temporary_peer(address) as peer:
            async with discovering.temporarily_known(tier_of_peers, keys, expected, peer.promise) as held:
                ...  # Promote or write these: within the block the peers tier is known to hold them.

    The chunks need not form a prefix. Take about ten of them or 256 MiB at a time: a peer grants at most
    ``peer.share`` of its first tier at once, for ``peer.lease`` seconds. If the peer is lost, the chunks of
    the current batch fail, and the next :meth:`promise` raises.
    """

    def __init__(self, client: PeerClient, bound: Bound, seconds: float) -> None:
        self._client = client
        self._bound = bound
        self._seconds = seconds
        self._promised: set[ChunkKey] = set()

    @property
    def address(self) -> str:
        """The peer's ``HOST:PORT``."""
        return self._client.address

    @property
    def instance(self) -> str:
        """The instance name that the peer reports."""
        return self._client.instance

    async def promise(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Lease those of ``keys`` that the peer's own tiers hold, and return their positions, ascending.

        Reads of these go to this peer alone until the block ends. Raises :class:`PeerError` if the peer does
        not answer within the transport's deadline.
        """
        until = anyio.current_time() + self._seconds
        positions: list[int] = []
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            part = keys[start : start + KEYS_PER_REQUEST]
            promised = await self._client.look_up(part, prefix=False, until=until, force=True)
            if promised is None:
                raise PeerError(f"peer {self.address}: {self._client.last_error or 'no answer in time'}")
            positions += [start + position for position in sorted(promised)]
        for position in positions:
            self._bound[keys[position]] = self._client
            self._promised.add(keys[position])
        return positions

    def release(self) -> None:
        """Release the promises that were not used."""
        for key in self._promised:
            if self._bound.get(key) is self._client:
                del self._bound[key]
        if self._client.source is not None:
            self._client.source.promises.drop(self._promised)
