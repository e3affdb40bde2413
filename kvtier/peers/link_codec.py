"""The codec of links: chunks are encoded in the memory of the peer that has them, and decoded on arrival.

The instance that fetches decides whether they are, as it knows how fast the link is, and what encoding and
decoding take: see :mod:`kvtier.tiers.codec_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvtier.backends.base import Outcome
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import CorruptChunk
from kvtier.memory.arena import Arena
from kvtier.memory.header import IDENTITY, ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.peers.grants import Grant, GrantBook
from kvtier.tiers.batches import IN_FLIGHT
from kvtier.tiers.encoded_seal import Encoder, Written
from kvtier.tiers.seal import HEADERS_AT_ONCE, Seal
from kvtier.tiers.sealer import HASHED_AT_ONCE
from kvtier.transports.base import Access

EncodedRead = tuple[ChunkKey, memoryview, memoryview]
"""A chunk, its memory, and where its encoded form is."""
_Work = tuple[int, ChunkHeader, Lease, Lease]
"""The index of a chunk in its grant, its header, its memory, and where to encode it."""


class GrantEncoder:
    """Replaces granted chunks by encoded copies in free memory of the arena. Bound to one event loop."""

    def __init__(self, arena: Arena, grants: GrantBook, encoder: Encoder) -> None:
        self.code = encoder.code
        self._arena = arena
        self._grants = grants
        self._encoder = encoder
        self._executor = WorkerThreads(HASHED_AT_ONCE)
        # Of all peers together: requests, however many, take no more memory than these.
        self._slots = anyio.Semaphore(IN_FLIGHT)

    async def encode(self, grant: Grant, chunks: Sequence[int]) -> None:
        """Encode chunks of a grant, except those that get hardly smaller, or for which there is no room."""
        if grant.access is not Access.READ:
            return
        async with self._slots:
            for start in range(0, len(chunks), HEADERS_AT_ONCE):
                await self._encode_all(grant, chunks[start : start + HEADERS_AT_ONCE])

    async def _encode_all(self, grant: Grant, chunks: Sequence[int]) -> None:
        work: list[_Work] = []
        try:
            for index in set(chunks):
                plain = grant.leases[index] if grant.is_accessible(index) else None
                if plain is None:
                    continue
                try:
                    header = ChunkHeader.parse(plain.view)
                except CorruptChunk:  # It is encoded already, or the peer finds out what it is.
                    continue
                room = self._arena.allocate(self._encoder.max_bytes(header))
                if room is None:
                    break
                work.append((index, header, plain.share(), room))
            lengths = await spread(self._encode, work, parts=HASHED_AT_ONCE, executor=self._executor)
            for (index, _, _, room), length in zip(work, lengths, strict=True):
                if length:
                    self._grants.replace(grant, index, room, length)
        finally:
            for _, _, plain, room in work:
                plain.release()
                room.release()

    def _encode(self, work: _Work) -> int:
        """Encode one chunk. Return the length of the object; 0 if it is to be sent as it is."""
        _, header, plain, room = work
        try:
            return len(self._encoder.encode(header, plain.view, room.view) or b"")
        except CorruptChunk:
            return 0


class LinkDecoder:
    """Decodes what peers have sent encoded. What is corrupt or unreadable is a miss, as in any tier."""

    def __init__(self, encoder: Encoder, seal: Seal) -> None:
        """``seal``: that of the tier of the peers, which counts and reports them."""
        self.written = Written()
        """What peers have sent, before and after encoding."""
        self.scratch = encoder.scratch
        self._encoder = encoder
        self._seal = seal

    def count(self, chunk_bytes: int, stored_bytes: int) -> None:
        """Count chunks that have arrived: their bytes, and those that were sent."""
        self.written.chunk_bytes += chunk_bytes
        self.written.stored_bytes += stored_bytes

    def knows(self, code: int) -> bool:
        """Whether it can decode what this codec has encoded."""
        return code != IDENTITY and code in self._encoder.known

    async def decode(self, reads: Sequence[EncodedRead], found: Sequence[Outcome]) -> Sequence[Outcome]:
        """Decode those that were found, and return the outcomes."""
        outcomes = await self._seal.checked(reads, found, self._decode, parts=HASHED_AT_ONCE)
        # What was decoded has a valid header, and the checksum was that of the encoded form.
        return [Outcome.VERIFIED if outcome is Outcome.OK else outcome for outcome in outcomes]

    def _decode(self, read: EncodedRead, hashed: bool) -> None:
        key, chunk, encoded = read
        self._encoder.decode(key, encoded, chunk, hashed=hashed)
