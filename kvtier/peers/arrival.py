"""Chunks that a peer was granted before they could be read."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from anyio import CancelScope

from kvtier.peers.grants import Grant
from kvtier.peers.holdings import PART_BYTES, PART_CHUNKS, Holdings
from kvtier.pipeline.found import FoundChunk


class Arrival:
    """The chunks of a grant that are in flight or lack a checksum, until they can be read."""

    def __init__(self, holdings: Holdings, grant: Grant, late: dict[int, FoundChunk]) -> None:
        self._holdings = holdings
        self._grant = grant
        self._late = late
        """Neither readable nor given up, by index in the grant."""
        self._progress = anyio.Event()
        self._scope = CancelScope()
        grant.unready.update(late)

    async def run(self) -> None:
        """Make chunks readable as they arrive, until all have arrived or the grant has ended."""
        with self._scope:
            # Chunks that only lack a checksum do not wait for those in flight.
            await self._seal([index for index, chunk in self._late.items() if chunk.arrived])
            while self._late:
                first = next(iter(self._late.values()))
                if first.flight is not None:
                    await first.flight.done.wait()
                landed = [
                    index for index, chunk in self._late.items() if chunk.flight is None or chunk.flight.ended
                ]
                await self._seal(landed)

    async def wait(self, chunks: Sequence[int]) -> None:
        """Wait until each of these is readable, has failed, or has lost its grant."""
        waiting = self._late.keys() & set(chunks)
        while waiting:
            await self._progress.wait()
            waiting &= self._late.keys()

    def end(self) -> None:
        """Wake all waiters, because the grant has ended."""
        self._late.clear()
        self._scope.cancel()
        self._notify()

    async def _seal(self, indexes: Sequence[int]) -> None:
        for part in self._parts(indexes):
            # Some may have been released meanwhile, and their memory may be in use again.
            chunks = {
                index: (self._late[index].key, lease)
                for index in part
                if index in self._late and (lease := self._grant.leases[index]) is not None
            }
            arrived = [index for index in chunks if self._late[index].arrived]
            valid = await self._holdings.seal([chunks[index] for index in arrived])
            self._grant.unready.difference_update(
                index for index, ok in zip(arrived, valid, strict=True) if ok
            )
            for index in part:
                self._late.pop(index, None)
            self._notify()

    def _parts(self, indexes: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        length = 0
        for index in indexes:
            if not parts or (length >= PART_BYTES and len(parts[-1]) >= PART_CHUNKS):
                parts.append([])
                length = 0
            parts[-1].append(index)
            length += self._late[index].lease.length
        return parts

    def _notify(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()
